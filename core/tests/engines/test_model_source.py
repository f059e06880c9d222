"""Names of models: what is here, what may be elsewhere, and what is nowhere."""

from __future__ import annotations

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


def test_a_path_is_no_hub_id() -> None:
    with pytest.raises(ModelLoadError, match="folder 'nowhere'; there is no such folder"):
        model_source(Path("nowhere"))


@pytest.mark.parametrize("model", [None, 3, b"gpt2"])
def test_what_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="asked for the model"):
        model_source(model)
