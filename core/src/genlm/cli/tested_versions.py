"""The tested and the installed versions of the libraries of a backend."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def tested_versions(tested: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the tested versions of every library, and the installed one if it was not tested.

    Args:
        tested: `BackendSpec.tested`.
    """
    for distribution, versions in tested.items():
        text = f"{distribution} {', '.join(versions)}"
        installed = installed_version(distribution)
        # The local part, such as +cpu, names a build of the same release.
        is_tested = installed is None or installed.partition("+")[0] in versions
        yield text if is_tested else f"{text} (installed: {installed}, not tested)"
