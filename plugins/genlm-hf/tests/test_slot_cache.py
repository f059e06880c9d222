"""Models that attend in code of their own."""

from __future__ import annotations

from typing import Any

import pytest

from genlm import ModelLoadError, Query, rows_from_logits
from genlm_hf import execution_paths, slot_cache
from genlm_hf.engine import HFEngine
from genlm_hf.padded import PaddedPath

from .families import FAMILIES
from .population import Oracle, used
from .tiny import answers, build_model, ids_of_lengths


@pytest.fixture
def gptj() -> Any:
    model_type, options = FAMILIES["gptj"]
    return build_model(model_type, **options)


def test_a_prefix_that_is_new_to_all_is_computed_once_and_first(
    gptj: Any, tokenizer: Any
) -> None:
    engine = HFEngine.from_model(gptj, tokenizer, execution_path="slot_cache")
    before, forwards = used(engine, "tokens_computed"), used(engine, "forwards")
    prompt = ids_of_lengths(20)[0]
    sequences = [[*prompt, i] for i in range(3, 13)]
    assert Oracle(gptj).largest_error(sequences, answers(engine, sequences)) <= 1e-5
    assert used(engine, "tokens_computed") - before == 20 + 10
    assert used(engine, "forwards") - forwards == 2


@pytest.mark.parametrize("name", ["gptj", "gpt_neo", "mpt", "codegen"])
def test_padding_never_reaches_beyond_the_positions_that_a_model_has(
    name: str, tokenizer: Any
) -> None:
    model_type, options = FAMILIES[name]
    longest = "max_seq_len" if name == "mpt" else "max_position_embeddings"
    model = build_model(model_type, **options | {longest: 64})
    engine = HFEngine.from_model(model, tokenizer, execution_path="slot_cache")
    long, new = ids_of_lengths(60, 33)
    oracle = Oracle(model)
    for step in ([long], [[*long, 4], new], [[*new, 4], [*long, 9]]):
        # Not by way of `step`, which would try again with each sequence alone.
        queries = [Query(i, tuple(ids)) for i, ids in enumerate(step)]
        rows = rows_from_logits(engine.evaluate(queries).values, engine.vocabulary)
        assert oracle.largest_error(step, list(rows)) <= 1e-5


def test_chunks_too_long_for_the_self_test_are_refused_by_their_masks(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, options = FAMILIES["llama4_text"]
    model = build_model(model_type, **options | {"attention_chunk_size": 8192})
    monkeypatch.setattr(execution_paths, "_refuse_by_config", lambda *_: None)
    figures = HFEngine.from_model(model, tokenizer).statistics()
    assert figures["execution_path"] == "padded"
    assert str(figures["execution_path_reason"]).count("one of its masks is unknown") == 2


def test_models_that_padding_disturbs_are_not_served_by_the_slot_cache(
    gptj: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PaddedPath, "can_mix_lengths", False)
    with pytest.raises(
        ModelLoadError, match=r"execution_path='slot_cache' cannot serve .* padding changes"
    ):
        HFEngine.from_model(gptj, tokenizer, execution_path="slot_cache")


def test_models_with_other_caches_are_not_served_by_the_slot_cache(tokenizer: Any) -> None:
    for name, reason in {
        "rwkv": "takes no past_key_values",
        # In transformers 5.24, from 5.18 on, and in 5.17, whose forward pass raises.
        "recurrent_gemma": "layers of kind linear|only its layers|IndexError",
        "lfm2": "layers of kind conv",
    }.items():
        model_type, options = FAMILIES[name]
        model = build_model(model_type, **options)
        with pytest.raises(ModelLoadError, match=reason):
            HFEngine.from_model(model, tokenizer, execution_path="slot_cache")


@pytest.mark.parametrize("name", ["gptj", "bloom", "falcon with grouped heads"])
def test_layers_that_share_memory_for_their_pasts_give_the_same(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_cache, "_LARGE_BYTES", 0)
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    engine = HFEngine.from_model(model, tokenizer, execution_path="slot_cache")
    oracle, sequences = Oracle(model), ids_of_lengths(20, 9, 3, 1)
    for _ in range(3):
        assert oracle.largest_error(sequences, answers(engine, sequences)) <= 1e-5
        sequences = [[*ids, 5] for ids in sequences]
