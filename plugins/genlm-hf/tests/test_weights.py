"""New weights are copied into a model by name; the conformance suite tests rows after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import genlm

from .test_adapters import make_adapter
from .tiny import alone, build_model, ids_of_lengths, llama_settings

IDS, _ = ids_of_lengths(9, 5)

Tensors = dict[str, torch.Tensor]


def scaled(model: Any) -> Tensors:
    return {name: 0.9 * tensor for name, tensor in model.state_dict().items()}


def check_rows(llm: genlm.AsyncLM, model: Any) -> None:
    row = llm.next_token_logprobs_sync(IDS)
    torch.testing.assert_close(row, alone(model, IDS, len(row)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_are_those_of_the_model_without_adapters(
    llama: Any, tokenizer: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    other = build_model("llama", **llama_settings())
    weights = {name: tensor.to(dtype) for name, tensor in scaled(other).items()}
    other.load_state_dict(weights)
    make_adapter(llama, tmp_path, seed=1)
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        check_rows(llm, llama)
        llm.load_lora(tmp_path, "one")
        adapted = llm.next_token_logprobs_sync(IDS, lora_name="one")
        llm.update_weights(weights)
        check_rows(llm, other)
        row = llm.next_token_logprobs_sync(IDS, lora_name="one")
        assert (row - adapted).abs().max() > 1e-2
        assert (row - alone(other, IDS, len(row))).abs().max() > 1e-2


def test_one_name_suffices_for_shared_weights(tokenizer: Any) -> None:
    settings = llama_settings(tie_word_embeddings=True)
    model, other = build_model("llama", **settings), build_model("llama", **settings)
    weights = scaled(other)
    other.load_state_dict(weights)
    with genlm.load_model(model, "hf", tokenizer=tokenizer) as llm:
        llm.update_weights(weights)
        check_rows(llm, other)
        del weights["lm_head.weight"]
        llm.update_weights(weights)
        check_rows(llm, other)


CHANGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "a prefix": (
        lambda weights: {f"module.{name}": value for name, value in weights.items()},
        "are missing, such as 'model.embed_tokens.weight', .* such as 'module.model.embed",
    ),
    "a missing name": (
        lambda weights: {name: weights[name] for name in list(weights)[1:]},
        "1 are missing, such as 'model.embed_tokens.weight', 0 are not in the model; pass all",
    ),
    "another shape": (
        lambda weights: {**weights, "model.norm.weight": torch.ones(3)},
        r"'model.norm.weight' has shape \(\d+,\); found \(3,\)",
    ),
    "an array of another library": (
        lambda weights: {**weights, "model.norm.weight": memoryview(bytes(32))},
        "'model.norm.weight' is a memoryview; expected a torch.Tensor",
    ),
    "whole numbers": (
        lambda weights: {**weights, "model.norm.weight": weights["model.norm.weight"].int()},
        "'model.norm.weight' has dtype torch.float32; found torch.int32",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_weights_that_do_not_fit_leave_the_model_unchanged(
    llama: Any, tokenizer: Any, change: Callable[[Tensors], Any], message: str
) -> None:
    weights = change(scaled(llama))
    with genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm:
        before = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            llm.update_weights(weights)
        assert all(torch.equal(before[name], t) for name, t in llama.state_dict().items())
        check_rows(llm, llama)


def test_weights_of_whole_numbers_are_not_replaced(llama: Any, tokenizer: Any) -> None:
    weights = scaled(llama)
    llama.model.norm.register_buffer("scale", torch.ones(2, dtype=torch.int8))
    weights["model.norm.scale"] = torch.ones(2)
    with (
        genlm.load_model(llama, "hf", tokenizer=tokenizer) as llm,
        pytest.raises(ValueError, match="weights of quantised models cannot be replaced"),
    ):
        llm.update_weights(weights)
