"""`genlm env` has what a bug report needs, and no secrets."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys

import pytest
import torch
from typer.testing import CliRunner

from genlm.cli import app, env
from genlm.cli import tested_versions as versions


def read_report() -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(app, ["env", "--json"])
    assert result.exit_code == 0, result.output
    parsed: dict[str, dict[str, str]] = json.loads(result.stdout)
    return parsed


def test_versions_are_those_of_the_installation() -> None:
    report = read_report()
    assert report["libraries"]["torch"] == importlib.metadata.version("torch")
    assert report["genlm"]["genlm-core"] == importlib.metadata.version("genlm-core")
    assert platform.python_version() in report["system"]["python"]
    assert report["devices"]["torch built for"] == (torch.version.cuda or "the CPU only")


def test_libraries_with_tested_versions_are_listed_if_they_are_installed() -> None:
    report = read_report()
    installed = {each.name for each in importlib.metadata.distributions()}
    tested = {name for info in report["plugins"] for name in info["tested"]}  # type: ignore[index]
    assert tested & installed <= report["libraries"].keys()


def test_libraries_that_a_distribution_requires_are_listed() -> None:
    libraries = read_report()["libraries"]
    for name in ("psutil", "hypothesis"):  # the second with an extra only
        assert libraries[name] == importlib.metadata.version(name)
    assert "genlm-core" not in libraries


def test_distributions_without_a_plugin_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"genlm-core": "1.0", "genlm-backend": "1.1", "genlm-lm-eval": "1.2"}
    monkeypatch.setattr(
        env,
        "installed_versions",
        lambda names: {name: installed[name] for name in names if name in installed},
    )
    monkeypatch.setattr(env, "list_backends", list)
    assert env.environment()["genlm"] == installed


def test_plugins_are_listed_with_their_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENLM_DISABLE_PLUGINS", "reference")
    report = read_report()
    status = {info["provider"]: info["status"] for info in report["plugins"]}  # type: ignore[index]
    assert status["genlm-core:reference"] == "disabled"
    assert report["variables"]["GENLM_DISABLE_PLUGINS"] == "reference"
    printed = CliRunner().invoke(app, ["env"]).stdout
    assert "disabled: GENLM_DISABLE_PLUGINS lists it" in printed


def test_a_misspelt_variable_does_not_prevent_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GENLM_PLUGINS", "no-such-plugin")
    report = read_report()
    assert report["plugins"] == []
    assert "no plugin named 'no-such-plugin'" in report["plugin error"]
    assert report["libraries"]["torch"] == importlib.metadata.version("torch")
    printed = CliRunner().invoke(app, ["env"])
    assert printed.exit_code == 0
    assert "plugins cannot be listed: no plugin named 'no-such-plugin'" in printed.stdout


def test_no_other_variable_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = CliRunner().invoke(app, ["env"])
    assert "secret-token" not in result.stdout
    assert "OMP_NUM_THREADS        1" in result.stdout


def test_a_torch_that_does_not_load_is_part_of_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "cannot be imported: ModuleNotFoundError" in read_report()["devices"]["torch"]


def test_tested_versions_are_beside_the_installed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"a": "1.2+cpu", "b": "3.0"}.__getitem__)
    assert list(versions.tested_versions({"a": ("1.0", "1.2"), "b": ("2.0",)})) == [
        "a 1.0, 1.2",
        "b 2.0 (installed: 3.0, not tested)",
    ]


def test_an_absent_library_has_no_installed_version() -> None:
    assert list(versions.tested_versions({"no-such-library": ("1.0",)})) == [
        "no-such-library 1.0"
    ]


def test_the_report_says_with_which_versions_each_backend_was_tested() -> None:
    report = read_report()
    [info] = [
        plugin for plugin in report["plugins"] if plugin["provider"] == "genlm-core:reference"
    ]  # type: ignore[index]
    assert importlib.metadata.version("torch").partition("+")[0] in info["tested"]["torch"]  # type: ignore[index]
    assert "    tested with torch " in CliRunner().invoke(app, ["env"]).stdout
