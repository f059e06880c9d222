"""Which versions of SGLang the engine speaks to."""

from __future__ import annotations

import re
from importlib.metadata import version

from genlm import MissingRequirementError

__all__ = ["CPU_PAGES_FROM", "NEWEST", "OLDEST", "check_version", "installed_version"]

OLDEST = (0, 5, 20)
NEWEST = (0, 5, 23)
"""Each release from the one to the other was run; see docs/sglang-engine.md."""

CPU_PAGES_FROM = (0, 5, 22)
"""Before, pages of several tokens need a GPU."""


def installed_version() -> str:
    """The version of SGLang that an import finds."""
    return version("sglang")


def check_version(found: str) -> tuple[int, ...]:
    """Refuse a version outside the range.

    SGLang's scheduler is no public interface: another version may start and answer wrongly.

    Returns:
        Its numbers.

    Raises:
        MissingRequirementError: It is too old, too new, or no version.
    """
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", found)
    release = tuple(map(int, numbers.groups())) if numbers else None
    if release is None or not OLDEST <= release <= NEWEST:
        oldest, newest = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
        raise MissingRequirementError(
            "genlm-sgl:sgl",
            [f"sglang from {oldest} to {newest} (found {found})"],
            f"pip install sglang=={newest}",
        )
    return release
