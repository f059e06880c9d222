"""`make newest`: what it installs, reports, and says on GitHub."""

from __future__ import annotations

import json
import runpy
import subprocess
from types import SimpleNamespace

import pytest
from documents import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "newest.py"
newest = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


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
    assert newest.unbounded(requirement) == expected


def test_requirements_of_extras_are_installed_and_own_packages_are_not():
    project = {
        "dependencies": ["genlm-core~=1.0", "torch>=2.7,<2.16"],
        "optional-dependencies": {"lora": ["peft>=0.21,<0.22"], "vllm": ["genlm-vllm~=1.0"]},
    }
    assert sorted(newest.requirements([project])) == ["peft>=0.21", "torch>=2.7"]


def test_what_the_tests_need_is_installed_in_its_newest_release():
    needed = list(newest.tools())
    assert {"hypothesis>=6.130", "numba>=0.61", "peft>=0.21", "ray", "ruff", "torch"} <= {
        *needed
    }
    assert not [each for each in needed if "<" in each.partition(";")[0] or "#" in each]


def test_releases_that_were_not_tested_are_named():
    tested = {"vllm": ["0.28.0", "0.32.0"], "sglang": ["0.5.23"], "private": ["1.0"]}
    index = {"vllm": "0.34.0", "sglang": "0.5.23", "private": ""}
    assert newest.untested(tested, index) == [
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
    assert newest.excluded([project], installed) == [
        "genlm-x excludes outlines-core 0.3.0 (<0.3)",
        "genlm-x excludes peft 0.22.1 (<0.22,>=0.21)",
    ]


def test_the_report_has_failures_releases_and_versions():
    text = newest.report(
        {"torch": "3.0"}, {"core/tests": "FAILED a"}, ["vllm 0.34.0 is released"]
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
    assert newest.issue() == 0
    listed, told = commands
    assert listed[:3] == ("gh", "issue", "list")
    assert told[2:4] == (("comment", "7") if open_issues else ("create", "--title"))
    assert told[-2:] == ("--body-file", str(REPOSITORY / "build/newest/report.md"))


def test_every_suite_is_run_except_those_of_vllm_and_sglang():
    """Each suite compares the list of private names of its package with what is installed."""
    folders = [*REPOSITORY.glob("core/tests"), *REPOSITORY.glob("plugins/*/tests")]
    suites = {str(folder.relative_to(REPOSITORY)) for folder in folders}
    engines = {f"{folder}/tests" for folder in newest.LISTED_ONLY}
    assert suites - engines == {*newest.SUITES} - {"tests"}
