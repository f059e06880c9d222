"""The engine's answers, refusals and figures, driven as the scheduler drives it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from genlm import (
    Engine,
    LoraEngine,
    Query,
    TokenIdError,
)
from genlm_hf.engine import HFEngine

from .tiny import VOCAB_SIZE, WIDTH, alone, answers, build_model, ids_of_lengths, llama_settings


def largest_error(model: Any, sequences: list[list[int]], rows: list[torch.Tensor]) -> float:
    errors = [
        (row - alone(model, ids)).abs().max() for ids, row in zip(sequences, rows, strict=True)
    ]
    return float(torch.stack(errors).max())  # NaN if one is


def test_the_engine_has_what_the_protocols_ask_for(engine: HFEngine) -> None:
    assert isinstance(engine, Engine)
    assert isinstance(engine, LoraEngine)


def test_a_row_does_not_depend_on_its_batch(engine: HFEngine, llama: Any) -> None:
    sequences = ids_of_lengths(9, 1, 23, 4, 23, 64, 2, 2)
    for size in (1, 2, 3, 8):
        for start in range(0, 8, size):
            batch = sequences[start : start + size]
            assert largest_error(llama, batch, answers(engine, batch)) <= 1e-4


def test_near_copies_of_a_sequence_get_their_own_rows(engine: HFEngine, llama: Any) -> None:
    [ids] = ids_of_lengths(9)
    # 0 is the padding id: as content it must not be taken for padding.
    near = [ids, ids[::-1], [*ids, 0], [*ids, 0, 0], [0, *ids], ids[1:], ids[:-1], [0]]
    rows = answers(engine, near)
    assert largest_error(llama, near, rows) <= 1e-4
    assert torch.pdist(torch.stack(rows)).min() > 1e-2


@pytest.mark.parametrize("max_tokens", [1, 30, 100, 10_000])
def test_the_batch_limit_changes_the_passes_and_not_the_rows(
    llama: Any, tokenizer: Any, max_tokens: int
) -> None:
    engine = HFEngine.from_model(
        llama, tokenizer, max_tokens_per_batch=max_tokens, execution_path="padded"
    )
    before = engine.statistics()
    sequences = ids_of_lengths(9, 1, 23, 4, 23, 40, 2)
    assert largest_error(llama, sequences, answers(engine, sequences)) <= 1e-4
    after = engine.statistics()
    passes = int(after["forwards"]) - int(before["forwards"])
    assert {1: passes == 7, 30: 1 < passes < 7, 100: 1 < passes < 4, 10_000: passes == 1}[
        max_tokens
    ]
    assert int(after["tokens_computed"]) - int(before["tokens_computed"]) == 102
    padded = int(after["tokens_padded"]) - int(before["tokens_padded"])
    assert padded == {1: 0, 10_000: 7 * 40 - 102}.get(max_tokens, padded)


def test_rows_are_the_callers_own(engine: HFEngine) -> None:
    requests = ids_of_lengths(5, 5, 3)
    rows = answers(engine, requests)
    copies = [row.clone() for row in rows]
    for row in answers(engine, requests) + answers(engine, requests[:1]):
        row.fill_(7.0)
        assert row.is_contiguous()
        assert row.untyped_storage().nbytes() == row.nbytes
        assert not row.is_inference()
        assert not row.requires_grad
    assert all(torch.equal(row, copy_) for row, copy_ in zip(rows, copies))


def test_logits_beyond_the_tokenizer_are_cut_before_normalising(
    engine: HFEngine, llama: Any
) -> None:
    assert (llama.config.vocab_size, engine.vocabulary.size) == (WIDTH, VOCAB_SIZE)
    [row] = answers(engine, ids_of_lengths(5))
    assert row.shape == (VOCAB_SIZE,)
    assert row.dtype == torch.float32
    assert abs(float(row.logsumexp(0))) <= 1e-4


def test_ids_without_logits_have_probability_zero_and_are_refused_as_context(
    tokenizer: Any,
) -> None:
    model = build_model("llama", **llama_settings(vocab_size=290))
    engine = HFEngine.from_model(model, tokenizer)
    [row] = answers(engine, [[3, 4, 5]])
    assert row.shape == (VOCAB_SIZE,)
    assert row[290:].tolist() == [float("-inf")] * 10
    assert (row[:290] - alone(model, [3, 4, 5], 290)).abs().max() <= 1e-4
    engine.submit(Query(1, (3, 289)))
    with pytest.raises(TokenIdError) as refused:
        engine.submit(Query(2, (3, 290, 299)))
    assert (refused.value.token_id, refused.value.position) == (290, 1)
    assert refused.value.vocab_size == 290
    assert [c.query_id for c in engine.step()] == [1]


def test_ids_added_to_the_tokenizer_only_have_probability_zero(
    llama: Any, tokenizer: Any
) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens([f"<new{i}>" for i in range(30)])
    engine = HFEngine.from_model(llama, larger)
    assert engine.vocabulary.size == VOCAB_SIZE + 30
    [row] = answers(engine, [[3, 4, 5]])
    assert row[WIDTH:].tolist() == [float("-inf")] * 10
    assert (row[:WIDTH] - alone(llama, [3, 4, 5], WIDTH)).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_float32_and_close(
    llama: Any, tokenizer: Any, dtype: torch.dtype
) -> None:
    sequences = ids_of_lengths(9, 1, 23)
    expected = [alone(llama, ids) for ids in sequences]
    engine = HFEngine.from_model(llama.to(dtype), tokenizer)
    assert engine.statistics()["dtype"] == str(dtype).removeprefix("torch.")
    rows = answers(engine, sequences)
    for row, exact in zip(rows, expected, strict=True):
        assert row.dtype == torch.float32
        assert abs(float(row.logsumexp(0))) <= 1e-4
        assert (row - exact).abs().max() <= {torch.bfloat16: 1e-1, torch.float16: 1e-2}[dtype]
    assert largest_error(llama, sequences, rows) <= 2e-2


def test_a_query_that_raises_fails_alone(engine: HFEngine, llama: Any) -> None:
    def picky(_: Any, args: tuple[torch.Tensor]) -> None:
        if (args[0] == 99).any():
            raise RuntimeError("99")

    sequences = [[3, 4], [5, 99], [6], [7, 8, 9]]
    handle = llama.model.embed_tokens.register_forward_pre_hook(picky)
    rows = answers(engine, sequences)
    handle.remove()
    assert isinstance(rows.pop(1), RuntimeError)
    sequences.pop(1)
    assert largest_error(llama, sequences, rows) <= 1e-4


def test_an_aborted_query_is_not_computed(engine: HFEngine) -> None:
    before = int(engine.statistics()["tokens_computed"])
    engine.submit(Query(1, (3, 4, 5)))
    engine.submit(Query(2, (6,)))
    engine.abort(1)
    assert [c.query_id for c in engine.step()] == [2]
    assert int(engine.statistics()["tokens_computed"]) == before + 1


def test_statistics_name_model_device_and_dtype(engine: HFEngine) -> None:
    figures = engine.statistics()
    assert figures["model"] == "LlamaForCausalLM"
    assert (figures["device"], figures["dtype"]) == ("cpu", "float32")


def test_closing_lets_go_of_the_model(tokenizer: Any) -> None:
    model = build_model("llama", **llama_settings())
    gone = weakref.ref(model)
    engine = HFEngine.from_model(model, tokenizer)
    answers(engine, [[3]])
    gc.collect()
    gc.disable()
    try:
        engine.close()
        del model
        assert gone() is None  # a GPU's memory must not wait for the garbage collector
    finally:
        gc.enable()


def test_a_model_in_training_is_served_without_dropout_until_the_engine_closes(
    tokenizer: Any,
) -> None:
    model = build_model(
        "gpt2", vocab_size=WIDTH, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    engine = HFEngine.from_model(model, tokenizer)
    sequences = ids_of_lengths(9, 4)
    assert largest_error(model, sequences, answers(engine, sequences)) <= 1e-4
    assert not any(module.training for module in model.modules())
    engine.close()
    assert [module.training for module in model.modules()] == modes
    loss = model(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss
    loss.backward()


def test_the_training_mode_returns_if_an_adapter_cannot_be_removed(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama.train()
    engine = HFEngine.from_model(llama, tokenizer)

    def unload() -> None:
        raise RuntimeError("in use")

    monkeypatch.setattr(engine._adapters, "unload", unload)
    with pytest.raises(RuntimeError, match="in use"):
        engine.close()
    assert all(module.training for module in llama.modules())


def test_a_models_hooks_and_weights_are_left_alone(engine: HFEngine, llama: Any) -> None:
    weights = copy.deepcopy(llama.state_dict())
    answers(engine, ids_of_lengths(9, 4))
    assert not any(module._forward_pre_hooks for module in llama.modules())
    assert all(torch.equal(weights[name], value) for name, value in llama.state_dict().items())


def test_an_encoder_decoder_object_is_refused(tokenizer: Any) -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=WIDTH, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        HFEngine.from_model(transformers.T5ForConditionalGeneration(config), tokenizer)
