"""What the check at loading finds out about a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genlm_hf.engine import HFEngine
from genlm_hf.probe import sample_ids

from .tiny import VOCAB_SIZE, WIDTH, alone, answers, build_model, ids_of_lengths, llama_settings


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("bert", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    ],
)
def test_a_model_that_sees_later_tokens_is_refused(
    model_type: str, settings: dict[str, Any], tokenizer: Any
) -> None:
    model = build_model(model_type, vocab_size=WIDTH, **settings)
    with pytest.raises(ValueError, match="not a causal language model"):
        HFEngine.from_model(model, tokenizer)


def test_bert_as_a_decoder_is_served(tokenizer: Any) -> None:
    model = build_model(
        "bert",
        vocab_size=WIDTH,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        is_decoder=True,
    )
    engine = HFEngine.from_model(model, tokenizer)
    sequences = ids_of_lengths(9, 1, 23)
    for ids, row in zip(sequences, answers(engine, sequences)):
        assert (row - alone(model, ids)).abs().max() <= 1e-4


def test_a_model_that_padding_disturbs_gets_batches_of_equal_lengths(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = llama.model.embed_tokens.forward
    # Stands for a model whose states depend on how wide the batch is.
    monkeypatch.setattr(
        llama.model.embed_tokens, "forward", lambda ids: embed(ids) * (1 + 0.01 * ids.shape[1])
    )
    with pytest.raises(ValueError, match="not a causal language model"):
        HFEngine.from_model(llama, tokenizer)
    # Causal, but padding (the id 0) leaks into every position.
    monkeypatch.setattr(
        llama.model.embed_tokens,
        "forward",
        lambda ids: embed(ids) * (1 + (ids == 0).any(1).float())[:, None, None],
    )
    engine = HFEngine.from_model(llama, tokenizer, execution_path="padded")
    before = int(engine.statistics()["forwards"])
    sequences = ids_of_lengths(9, 4, 9, 4)
    rows = answers(engine, sequences)
    assert int(engine.statistics()["forwards"]) == before + 2
    monkeypatch.undo()
    for ids, row in zip(sequences, rows):
        assert (row - alone(llama, ids)).abs().max() <= 1e-4


def test_a_model_of_few_positions_is_served(tokenizer: Any) -> None:
    for positions in (1, 2, 3):
        model = build_model("llama", **llama_settings(max_position_embeddings=positions))
        engine = HFEngine.from_model(model, tokenizer)
        [row] = answers(engine, [[5] * positions])
        assert (row - alone(model, [5] * positions)).abs().max() <= 1e-4


def test_sampled_ids_are_distinct_and_can_be_embedded(tokenizer: Any) -> None:
    ids = sample_ids(tokenizer, VOCAB_SIZE, None)
    assert len(set(ids)) >= 4
    assert sample_ids(tokenizer, 5, None) == [i % 5 for i in range(9)]
    assert len(sample_ids(tokenizer, VOCAB_SIZE, 3)) == 3
    assert torch.tensor(ids).max() < VOCAB_SIZE


@pytest.mark.parametrize(
    ("encoded", "limit", "ids"),
    [
        ([9, 1, 2, 3, 4, 9, 5], 9, [1, 2, 3, 4, 5]),  # ids without an embedding are removed
        ([9, 1, 2, 3, 9], 10, [9, 1, 2, 3, 9]),
        ([9, 1, 2, 3, 9], 9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),  # too few different ones
        ([1, 2, 1, 2, 3], 4, [0, 1, 2, 3, 0, 1, 2, 3, 0]),
        ([*range(20)], 20, [*range(9)]),
    ],
)
def test_sampled_ids_are_those_of_a_text_if_it_has_several(
    encoded: list[int], limit: int, ids: list[int]
) -> None:
    for result in (encoded, SimpleNamespace(ids=encoded)):  # of transformers and of tokenizers
        tokenizer = SimpleNamespace(encode=lambda _, result=result: result)
        assert sample_ids(tokenizer, limit, None) == ids


def test_a_model_that_needs_more_than_token_ids_is_refused_when_loaded(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def picky(**inputs: Any) -> None:
        raise TypeError("pixel_values is missing")

    monkeypatch.setattr(llama, "forward", picky)
    with pytest.raises(ValueError, match=r"first forward pass .* pixel_values is missing"):
        HFEngine.from_model(llama, tokenizer)
