"""The tested and the installed versions of the libraries of a backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from genlm.engines.versions import installed_versions


def tested_versions(tested: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the tested versions of every library, and the installed one if it was not tested.

    Args:
        tested: `BackendSpec.tested`.
    """
    found = installed_versions(tested)
    for distribution, versions in tested.items():
        text, installed = f"{distribution} {', '.join(versions)}", found.get(distribution)
        # The local part, such as +cpu, names a build of the same release.
        is_tested = installed is None or installed.partition("+")[0] in versions
        yield text if is_tested else f"{text} (installed: {installed}, not tested)"
