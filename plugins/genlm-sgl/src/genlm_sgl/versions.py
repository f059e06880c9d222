"""The supported versions of SGLang."""

from __future__ import annotations

import re
from importlib.metadata import version

OLDEST = (0, 5, 23)
NEWEST = (0, 5, 23)
"""Tested versions; see docs/sglang-engine.md."""


def installed_version() -> str:
    """Return the installed version of SGLang."""
    return version("sglang")


def check_version(installed: str) -> None:
    """Refuse an untested version.

    SGLang's model runner is not a public interface; another version may compute wrong rows.

    Args:
        installed: Version of SGLang.

    Raises:
        MissingRequirementError: The version is too old, too new, or not a version.
    """
    # Not at the top of the module: `install_cpu` imports it before it installs genlm-core.
    from genlm.plugin import MissingRequirementError

    match = re.match(r"(\d+)\.(\d+)\.(\d+)", installed)
    release = tuple(map(int, match.groups())) if match else None
    if release is None or not OLDEST <= release <= NEWEST:
        oldest, newest = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
        raise MissingRequirementError(
            "genlm-sgl:sgl",
            [f"sglang from {oldest} to {newest} (found {installed})"],
            f"pip install sglang=={newest}",
        )
