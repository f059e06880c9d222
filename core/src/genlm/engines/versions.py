"""Versions of installed distributions, and the check of the version of an engine's library."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from genlm.core.base.errors import MissingRequirementError


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed, by name."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def supported_version(
    plugin: str, distributions: Iterable[str], supported: str, install: str
) -> str:
    """Return the installed version of an engine's library; refuse an unsupported one.

    The plugin must require the distribution `packaging`.

    Args:
        plugin: Distribution of the engine.
        distributions: Names of distributions that provide the library, of which one is
            installed; the first is that of the library.
        supported: Supported versions, such as `">=0.32,<0.34"`.
        install: How to install a supported version.

    Raises:
        MissingRequirementError: No version is installed, or its version is not supported.
    """
    # Not at the top of the module: plugins are listed before `packaging` is installed.
    from packaging.specifiers import SpecifierSet

    library, *_ = distributions = tuple(distributions)
    for name, version in installed_versions(distributions).items():
        # Builds from a repository have versions such as 0.31.1.dev5+g0123.
        if SpecifierSet(supported).contains(version, prereleases=True):
            return version
        requirement = f"{library} {supported} (found {name} {version})"
        raise MissingRequirementError(plugin, [requirement], install)
    raise MissingRequirementError(plugin, [library], install)
