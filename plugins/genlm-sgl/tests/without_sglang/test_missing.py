"""The plugin without SGLang. These tests run only where SGLang is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import run_code, run_program

import genlm
from genlm_sgl import install_cpu


def test_the_plugin_is_listed_with_what_is_missing_and_how_to_install_it() -> None:
    [info] = [info for info in genlm.list_backends("engine") if info.name == "sgl"]
    assert info.status == "missing"
    listing = run_program(Path(sys.executable).parent / "genlm", "plugins").stdout
    assert "missing: sglang" in listing
    assert "python -m genlm_sgl.install_cpu" in listing


def test_asking_for_it_names_the_command() -> None:
    with pytest.raises(genlm.MissingRequirementError) as error:
        genlm.load_model("anything", backend="sgl")
    assert error.value.missing == ("sglang",)
    assert "python -m genlm_sgl.install_cpu" in str(error.value)


def test_the_command_installs_the_requirements_and_then_sglang_alone() -> None:
    requirements, alone = install_cpu.commands(["--quiet"])
    assert requirements[1:5] == ["-m", "pip", "install", "--quiet"]
    names, option = requirements[5:-2], requirements[-2]
    assert [name for name in names if name.startswith("genlm-core")]
    assert not [name for name in names if name.startswith("sglang")]
    assert option == "-r"
    assert "torch==" in Path(requirements[-1]).read_text(encoding="utf-8")
    assert alone[-2:] == ["--no-deps", "sglang==0.5.23"]


def test_the_command_needs_neither_genlm_nor_another_package() -> None:
    code = (
        "import sys; sys.modules['genlm'] = None\n"
        "from genlm_sgl import install_cpu\n"
        "listed = 'genlm-core~=1.0.0', \"sglang>=0.5.23; sys_platform == 'linux'\", 'numpy'\n"
        "print(install_cpu.other_requirements(listed))"
    )
    assert run_code(code).stdout == "['genlm-core~=1.0.0', 'numpy']\n"
