"""Families of models against transformers: right or refused, and on which execution path."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from architecture_tables import read_table

import genlm
from genlm import AsyncLM, UnverifiedModelWarning
from genlm.testing import TINY_LLAMA, TINY_LOGITS, TinyModel, families, measure_family
from genlm_mlx.cache import SlotCache
from genlm_mlx.engine import MLXEngine

from .conftest import Make, family_parameters
from .driving import largest_error, population

FAMILIES = {name: family for name, family in families(16).items() if family.representative}
TABLE = read_table("mlx")

GPT = {"vocab_size": TINY_LOGITS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
GEMMA2 = TINY_LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
MAMBA = {"vocab_size": TINY_LOGITS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}


def load(folder: Path) -> AsyncLM:
    return genlm.load_model(str(folder), backend="mlx", dtype="float32", unverified="refuse")


@pytest.mark.usefixtures("eager_sharing")
@pytest.mark.parametrize("name", family_parameters(FAMILIES))
def test_a_family_is_right_or_refused_as_documented(name: str, tmp_path: Path) -> None:
    row = TABLE[name]
    result = measure_family(load, TinyModel.of(tmp_path, FAMILIES[name]), bound=row.bound)
    assert (result.status, result.statistics.get("execution_path", "")) == (
        row.status,
        row.path,
    ), result


def test_no_family_is_documented_as_wrong_or_failing() -> None:
    assert TABLE.keys() == families(16).keys()
    assert {row.status for row in TABLE.values()} == {"right", "refused"}


def test_the_published_form_of_gpt2_is_served(make: Make) -> None:
    model = make("gpt2", GPT)
    name_weights_as_published(model.path)
    with pytest.warns(UnverifiedModelWarning, match="GPT2LMHeadModel"):
        engine = MLXEngine(model.path, dtype="float32")
    for step in population(1, 9):
        assert largest_error(engine, step, model.logprobs) <= 1e-5


def name_weights_as_published(folder: Path) -> None:
    """The published GPT-2, which mlx-lm knows, has shorter names than transformers gives."""
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    mx.eval(weights)
    renamed = {name.removeprefix("transformer."): array for name, array in weights.items()}
    mx.save_safetensors(str(file), renamed, {"format": "pt"})


@pytest.mark.parametrize("budget", [None, 3000])
def test_what_does_not_pass_the_self_test_is_served_without_a_cache(
    budget: int | None, make: Make
) -> None:
    path = make("gemma2", GEMMA2).path
    engine = MLXEngine(path, dtype="float32", kv_budget_bytes=budget)
    assert "in the self-test it raised" in str(engine.statistics()["execution_path_reason"])


def test_what_keeps_something_else_of_its_past_is_served_without_a_cache(make: Make) -> None:
    engine = MLXEngine(make("mamba", MAMBA).path)
    assert (
        engine.statistics()["execution_path_reason"]
        == "not slot_cache: a layer has a ArraysCache"
    )


@pytest.mark.parametrize("mask", [None, float("nan")])
def test_wrong_rows_do_not_pass_the_self_test(
    mask: float | None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide = None if mask is None else mx.array(mask)
    monkeypatch.setattr(SlotCache, "make_mask", lambda *_, **__: hide)
    model = make("llama")
    engine = MLXEngine(model.path, dtype="float32")
    assert "its log-probabilities were off by" in str(
        engine.statistics()["execution_path_reason"]
    )
    assert largest_error(engine, [(5, 6, 7), (8,)], model.logprobs) <= 1e-5
