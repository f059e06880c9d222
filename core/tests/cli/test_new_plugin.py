"""`genlm plugin new`: what it writes is a plugin; `tests/packaging/` certifies it."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import run_program
from typer.testing import CliRunner

import genlm
from genlm.cli import app

COMMAND = (sys.executable, "-c", "from genlm.cli import main; main()")


def new(folder: Path, *arguments: str, status: int = 0) -> str:
    result = run_program(*COMMAND, "plugin", "new", *arguments, cwd=folder, status=status)
    return result.stdout if status == 0 else result.stderr


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
    assert [
        requirement
        for requirement in metadata["dependencies"]
        if requirement.startswith("torch")
    ] == ["torch"]


def test_the_engine_is_listed(environment):
    printed = run_program(*COMMAND, "plugins", "--json", env=environment).stdout
    [info] = [entry for entry in json.loads(printed) if entry["name"] == "my-engine"]
    assert info["status"] == "ok"
    assert info["provider"] == "genlm-my-engine:my-engine"


def test_the_demonstration_runs_on_it(environment):
    options = ["--backend", "my-engine", "--particles", "5", "--max-tokens", "5"]
    printed = run_program(*COMMAND, "demo", *options, env=environment).stdout
    assert "5 particles after 5 steps" in printed


def test_the_code_is_in_the_style_of_this_project(project):
    config = Path(__file__).parents[3] / "pyproject.toml"
    sources = f"src = ['{project / 'src'}']"  # genlm is a third-party library of a plugin
    for command in (
        ["format", "--check", project],
        ["check", "--extend-ignore=ARG", project / "src"],
    ):
        options = ["--config", config, "--config", sources]
        run_program(sys.executable, "-m", "ruff", *command, *options)


@pytest.fixture
def refused(tmp_path, monkeypatch) -> Callable[..., str]:
    """Run the command in this process and return its error; it writes nothing."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["plugin", "new", *arguments])
        assert result.exit_code == 2
        assert list(tmp_path.iterdir()) == []
        return result.stderr

    return run


@pytest.mark.parametrize(
    "name", ["Mine", "2x", "a b", "-x", "x-", "a--b", "genlm.x", "../x", ""]
)
def test_a_name_that_is_no_name_is_refused(refused, name):
    assert "expected lower-case letters" in refused("--", name)


@pytest.mark.parametrize(
    "name",
    ["hf", "vllm", "reference", "numpy", "control", "core", "trie-cuda", "lm-eval", "lm_eval"],
)
def test_a_name_that_is_taken_is_refused(refused, name):
    assert f"'{name}' is taken by genlm-" in refused(name)


def test_a_folder_that_exists_is_not_changed(tmp_path):
    (tmp_path / "genlm-mine").mkdir()
    assert "genlm-mine exists" in new(tmp_path, "mine", status=2)
    assert list((tmp_path / "genlm-mine").iterdir()) == []
    new(tmp_path, "mine", "--folder", "elsewhere/mine")
    assert (tmp_path / "elsewhere" / "mine" / "pyproject.toml").exists()


def test_an_error_of_writing_names_the_file(tmp_path, monkeypatch):
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")  # errors of writing name no file

    monkeypatch.setattr(Path, "write_text", full_disk)
    folder = tmp_path / "mine"
    result = CliRunner().invoke(app, ["plugin", "new", "mine", "--folder", str(folder)])
    assert result.exit_code == 2
    message = "".join(result.stderr.replace("│", " ").split())  # of several lines
    assert f"cannotwrite{folder}" in message
