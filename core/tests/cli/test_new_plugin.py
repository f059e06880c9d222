"""`genlm plugin new`: what it writes is a plugin that passes the conformance suite."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
from programs import run_program

import genlm

COMMAND = (sys.executable, "-c", "from genlm.cli import main; main()")
QUICK = ("rows-are-right", "batch-equals-map", "order-matters")


def new(folder: Path, *arguments: str, status: int = 0) -> str:
    done = run_program(*COMMAND, "plugin", "new", *arguments, cwd=folder, status=status)
    return done.stdout if status == 0 else done.stderr


def on_path(project: Path) -> dict[str, str]:
    """The environment in which a project is importable and listed, as if installed."""
    metadata = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    stem = metadata["name"].replace("-", "_")
    info = project / "src" / f"{stem}-{metadata['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n"
    (info / "METADATA").write_text(head)
    entries = [f"{key} = {value}" for key, value in metadata["entry-points"]["genlm"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[genlm]", *entries, ""]))
    return os.environ | {"PYTHONPATH": str(project / "src")}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    new(folder, "my-engine")
    return folder / "genlm-my-engine"


@pytest.fixture(scope="module")
def environment(project) -> dict[str, str]:
    return on_path(project)


def test_it_says_what_to_do_next(tmp_path):
    printed = new(tmp_path, "mine")
    assert "pip install -e './genlm-mine[test]'" in printed
    assert "genlm check mine" in printed
    assert (tmp_path / "genlm-mine" / "src/genlm_mine/engine.py").exists()


def test_nothing_of_the_template_is_left(project):
    files = [path for path in project.rglob("*.*") if path.is_file()]
    assert len(files) >= 9
    for path in files:
        assert "$" not in path.read_text("utf-8"), path


def test_the_project_requires_this_core(project):
    metadata = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"genlm-core~={genlm.__version__}" in metadata["dependencies"]
    assert metadata["name"] == "genlm-my-engine"
    assert metadata["entry-points"]["genlm"] == {"my-engine": "genlm_my_engine.plugin"}


def test_torch_is_bounded_by_the_core_alone(project):
    metadata = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert [each for each in metadata["dependencies"] if each.startswith("torch")] == ["torch"]


def test_the_engine_is_listed(environment):
    printed = run_program(*COMMAND, "plugins", "--json", env=environment).stdout
    [info] = [each for each in json.loads(printed) if each["name"] == "my-engine"]
    assert info["status"] == "ok"
    assert info["provider"] == "genlm-my-engine:my-engine"


def test_checks_of_the_conformance_suite_pass(environment):
    listed = run_program(*COMMAND, "check", "my-engine", "--list", env=environment).stdout
    ids = [line.partition(":")[0] for line in listed.splitlines()]
    only = [each for each in ids if each.partition("[")[0] in QUICK]
    assert len(only) >= 2
    options = [word for each in only for word in ("--only", each)]
    command = [*COMMAND, "check", "my-engine", "--json", *options]
    report = json.loads(run_program(*command, env=environment).stdout)
    assert report["counts"] == {"passed": len(only)}


def test_its_own_tests_use_the_engine(project, environment):
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_engine.py"]
    assert "1 passed" in run_program(*command, cwd=project, env=environment).stdout


def test_the_demonstration_runs_on_it(environment):
    options = ["--backend", "my-engine", "--particles", "5", "--max-tokens", "5", "--json"]
    report = json.loads(run_program(*COMMAND, "demo", *options, env=environment).stdout)
    assert len(report["particles"]) == 5


def test_the_code_is_in_the_style_of_this_project(project):
    config = Path(__file__).parents[3] / "pyproject.toml"
    for command in (
        ["format", "--check", project],
        ["check", "--extend-ignore=ARG", project / "src"],
    ):
        run_program(sys.executable, "-m", "ruff", *command, "--config", config)


@pytest.mark.parametrize(
    "name", ["Mine", "2x", "a b", "-x", "x-", "a--b", "genlm.x", "../x", ""]
)
def test_a_name_that_is_no_name_is_refused(tmp_path, name):
    assert "expected lower-case letters" in new(tmp_path, "--", name, status=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["hf", "vllm", "reference", "numpy", "control", "core"])
def test_a_name_that_is_taken_is_refused(tmp_path, name):
    assert f"'{name}' is taken by genlm-" in new(tmp_path, name, status=2)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_changed(tmp_path):
    (tmp_path / "genlm-mine").mkdir()
    assert "genlm-mine exists" in new(tmp_path, "mine", status=2)
    assert list((tmp_path / "genlm-mine").iterdir()) == []
    new(tmp_path, "mine", "--folder", "elsewhere/mine")
    assert (tmp_path / "elsewhere" / "mine" / "pyproject.toml").exists()
