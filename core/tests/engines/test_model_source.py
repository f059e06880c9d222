"""Names of models: what is here, what may be elsewhere, and what is nowhere."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from genlm import ModelLoadError, model_source


def test_what_exists_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "my model").mkdir(parents=True)
    (tmp_path / "weights.gguf").touch()
    for name in ("owner/my model", "owner", "./owner", "weights.gguf"):
        assert Path(model_source(name)) == Path(model_source(Path(name))) == Path(name)
    assert model_source(str(tmp_path)) == str(tmp_path)
    assert model_source("~/owner") == str(tmp_path / "owner")


@pytest.mark.parametrize(
    "name", ["gpt2", "owner/name", "owner/name-1.5_b", "owner/name:Q4_K_M", "s3://bucket/a/b"]
)
def test_what_may_be_elsewhere_is_left_to_the_engine(name: str) -> None:
    assert model_source(name) == name


@pytest.mark.parametrize(
    "name",
    ["./nowhere", "../nowhere", "/no/where", "~/none", "a/b/c", "my model", "C:\\x", "a/", ""],
)
def test_what_can_be_nowhere_is_refused_at_once(name: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no such folder"):
        model_source(name)


def test_the_demo_model_is_a_folder_in_the_package_of_genlm_hf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "genlm_hf"
    (package / "demo").mkdir(parents=True)
    (package / "demo" / "config.json").touch()
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    specs = {"genlm_hf": ModuleSpec("genlm_hf", None, origin=str(package / "__init__.py"))}
    monkeypatch.setattr("importlib.util.find_spec", specs.get)
    assert model_source("demo") == str(package / "demo")
    assert model_source("./demo") == model_source(Path("demo")) == "demo"
    (package / "demo" / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="reinstall genlm-hf"):
        model_source("demo")
    specs.clear()
    with pytest.raises(ModelLoadError, match="pip install genlm-hf, or pass a folder"):
        model_source("demo")


def test_a_text_in_place_of_a_name_is_refused() -> None:
    text = "Once upon a time " * 1000
    with pytest.raises(ModelLoadError, match=r"folder 'Once .*\.\.\.'; there is no") as caught:
        model_source(text)
    assert len(str(caught.value)) < 600


def test_a_path_is_no_hub_id() -> None:
    with pytest.raises(ModelLoadError, match="folder 'nowhere'; there is no such folder"):
        model_source(Path("nowhere"))


@pytest.mark.parametrize("model", [None, 3, b"gpt2"])
def test_what_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="asked for the model"):
        model_source(model)
