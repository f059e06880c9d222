"""Versions of installed distributions, and the check of an engine's library."""

from __future__ import annotations

import importlib.metadata

import pytest

from genlm import MissingRequirementError
from genlm.engines import versions
from genlm.plugin import installed_versions, supported_version


def test_only_installed_distributions_have_a_version() -> None:
    found = installed_versions(["numpy", "no-such-library"])
    assert found == {"numpy": importlib.metadata.version("numpy")}


@pytest.mark.parametrize("distribution", ["fast", "fast-cpu"])
def test_one_of_several_distributions_must_have_a_supported_version(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> str:
        return supported_version("genlm-fast", ("fast", "fast-cpu"), ">=1.2,<2", "pip it")

    installed: dict[str, str] = {}
    monkeypatch.setattr(versions, "installed_versions", lambda _: installed)
    with pytest.raises(MissingRequirementError, match=r"^genlm-fast needs fast, .*: pip it$"):
        check()
    for version in ("1.2", "1.9.dev3+g012", "1.3+cu130"):
        installed[distribution] = version
        assert check() == version
    for version in ("1.1", "2.0"):
        installed[distribution] = version
        with pytest.raises(
            MissingRequirementError,
            match=rf"needs fast >=1\.2,<2 \(found {distribution} {version}\)",
        ):
            check()
