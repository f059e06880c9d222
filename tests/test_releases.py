"""`make newest` and `make oldest`: what they install, report, and write on GitHub."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import tomllib
from types import SimpleNamespace

import pytest
from documents import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "releases.py"
releases = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("torch>=2.7,<2.16", "torch>=2.7"),
        ("safetensors<1,>=0.8", "safetensors>=0.8"),
        ("xllamacpp==2026.10", "xllamacpp"),
        ("vllm>=0.28,<0.34; sys_platform == 'linux'", "vllm>=0.28; sys_platform == 'linux'"),
        ("genlm-core~=1.0.0", "genlm-core"),
        ("mlx[cpu]>=0.32.2,<0.33", "mlx[cpu]>=0.32.2"),
        ("mlx[cpu]==0.32.4; sys_platform == 'linux'", "mlx[cpu]; sys_platform == 'linux'"),
        ("protobuf", "protobuf"),
    ],
)
def test_only_upper_bounds_are_removed(requirement, expected):
    assert releases.unbounded(requirement) == expected


def test_requirements_of_extras_are_installed_and_own_packages_are_not():
    project = {
        "dependencies": ["genlm-core~=1.0", "torch>=2.7,<2.16"],
        "optional-dependencies": {"lora": ["peft>=0.21,<0.22"], "vllm": ["genlm-vllm~=1.0"]},
    }
    newest = releases.requirements("newest", [project])
    assert {"peft>=0.21", "torch>=2.7"} <= {*newest}
    oldest = releases.requirements("oldest", [project])
    assert {"peft>=0.21,<0.22", "torch>=2.7,<2.16"} <= {*oldest}
    assert not [each for each in newest + oldest if each.startswith("genlm")]


def test_what_the_tests_need_is_installed_in_its_newest_release():
    needed = releases.requirements("newest", [])
    assert {"hypothesis>=6.130", "numba>=0.61", "peft>=0.21", "ray", "ruff", "torch"} <= {
        *needed
    }
    assert not [each for each in needed if "<" in each.partition(";")[0] or "#" in each]


def test_the_oldest_releases_are_limited_by_the_packages_and_not_by_the_tests():
    project = {"dependencies": ["lm_eval>=0.4.1", "mlx>=0.30,<0.33", "torch>=2.7,<2.16"]}
    needed = releases.requirements("oldest", [project])
    names = ("lm-eval", "lm_eval", "mlx", "torch")
    assert sorted(each for each in needed if re.split(r"[^\w-]", each)[0] in names) == [
        "lm_eval>=0.4.1",
        "mlx>=0.30,<0.33",
        'mlx[cpu]; sys_platform == "linux"',
        "torch>=2.7,<2.16",
    ]
    assert "ruff==0.17.5" in needed


def test_the_lowest_versions_are_those_that_uv_resolves(monkeypatch):
    inputs = []

    def run(command, **options):
        inputs.append(options.get("input"))
        return subprocess.CompletedProcess(command, 0, stdout="mlx==0.30.0\ntorch==2.7.0\n")

    monkeypatch.setattr(subprocess, "run", run)
    found = releases._lowest(["mlx>=0.30,<0.33", "torch>=2.7"], "python")
    assert found == ["mlx==0.30.0", "torch==2.7.0"]
    assert inputs == [None, "mlx>=0.30,<0.33\ntorch>=2.7"]


def test_every_requirement_of_a_package_has_a_lowest_version():
    folders = [*REPOSITORY.glob("core"), *REPOSITORY.glob("plugins/*")]
    projects = [
        tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        for folder in folders
    ]
    stated = releases.requirements("oldest", projects)
    assert not [each for each in stated if not re.search(r">=|==|\[cpu]", each)]


def test_releases_that_were_not_tested_are_named():
    tested = {"vllm": ["0.28.0", "0.32.0"], "sglang": ["0.5.23"], "private": ["1.0"]}
    index = {"vllm": "0.34.0", "sglang": "0.5.23", "private": ""}
    assert releases.untested(tested, index) == [
        "vllm: the newest release is 0.34.0, the newest tested version 0.32.0",
        "private: the newest release is unknown, the newest tested version 1.0",
    ]


def test_bounds_that_exclude_an_installed_version_are_named():
    project = {
        "name": "genlm-x",
        "dependencies": ["genlm-core~=1.0", "torch>=2.7,<2.16", "outlines-core<0.3", "ray<3"],
        "optional-dependencies": {"lora": ["peft>=0.21,<0.22"]},
    }
    installed = {"torch": "2.15.0+cpu", "peft": "0.22.1", "outlines_core": "0.3.0"}
    assert releases.excluded([project], installed) == [
        "genlm-x excludes outlines-core 0.3.0 (<0.3)",
        "genlm-x excludes peft 0.22.1 (<0.22,>=0.21)",
    ]


def test_the_report_has_failures_releases_and_versions():
    text = releases.report(
        "newest",
        {"torch": "3.0"},
        {"core/tests": "FAILED a"},
        ["vllm 0.34.0 is released"],
    )
    assert "- vllm 0.34.0 is released" in text
    assert "## core/tests\n\n```text\nFAILED a\n```" in text
    assert "- torch 3.0" in text


@pytest.mark.parametrize("open_issues", [[], [{"number": 7}]])
def test_one_issue_is_open_at_a_time(monkeypatch, open_issues):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(open_issues))

    monkeypatch.setattr(subprocess, "run", run)
    assert releases.issue("oldest") == 0
    listed, told = commands
    assert listed[:3] == ("gh", "issue", "list")
    assert told[2:4] == (("comment", "7") if open_issues else ("create", "--title"))
    assert told[-2:] == ("--body-file", str(REPOSITORY / "build/oldest/report.md"))


def test_every_suite_is_run_except_those_of_vllm_and_sglang():
    """Each suite compares the list of private names of its package with what is installed."""
    folders = [*REPOSITORY.glob("core/tests"), *REPOSITORY.glob("plugins/*/tests")]
    suites = {str(folder.relative_to(REPOSITORY)) for folder in folders}
    engines = {f"{folder}/tests" for folder in releases.LISTED_ONLY}
    assert suites - engines == {*releases.SUITES} - {"tests"}
