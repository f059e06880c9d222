"""Which versions of libraries a backend was tested with, beside the installed ones."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping

__all__ = ["tested_versions"]


def tested_versions(tested: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield, for each library, the versions that were tested and how the installed one differs.

    Args:
        tested: `BackendSpec.tested`.
    """
    for distribution, versions in tested.items():
        text = f"{distribution} {', '.join(versions)}"
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            yield text
            continue
        # The local part, such as +cpu, names a build of the same release.
        is_tested = installed.partition("+")[0] in versions
        yield text if is_tested else f"{text} (installed: {installed}, not tested)"
