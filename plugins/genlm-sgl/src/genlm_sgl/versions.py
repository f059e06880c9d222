"""The supported versions of SGLang."""

from __future__ import annotations

import re
from importlib.metadata import version

__all__ = ["NEWEST", "OLDEST", "check_version", "installed_version"]

OLDEST = (0, 5, 23)
NEWEST = (0, 5, 23)
"""Each release in this range was run; see docs/sglang-engine.md."""


def installed_version() -> str:
    """Return the installed version of SGLang."""
    return version("sglang")


def check_version(found: str) -> tuple[int, ...]:
    """Refuse a version outside the range.

    SGLang's model runner is not a public interface: another version may compute wrong rows.

    Returns:
        Major, minor and patch number.

    Raises:
        MissingRequirementError: The version is too old, too new, or not a version.
    """
    # Here, because `install_cpu` runs without genlm-core, which it installs.
    from genlm.plugin import MissingRequirementError

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
