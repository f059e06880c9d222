"""Tiers of many architectures against transformers, and against mlx-lm's own generator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import torch
from mlx_lm.generate import generate_step

from genlm.testing import TINY_LLAMA, TINY_LOGITS, TINY_VOCABULARY
from genlm_mlx.cache import SlotCache
from genlm_mlx.engine import MLXEngine

from .conftest import Make
from .driving import largest_error, population

WIDE = {**TINY_LLAMA, "hidden_size": 64, "head_dim": 8}  # mlx-lm rounds roots of others
GPT = {"vocab_size": TINY_LOGITS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT |= {"n_ctx": 64, "bos_token_id": 1, "eos_token_id": 2}
WINDOWS = {
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
SHARED = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# As transformers computes them, in float32.
ALIKE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "learned positions": ("gathered", "gpt2", GPT),
    "attention in code of its own": ("gathered", "gptj", GPT | {"rotary_dim": 4}),
    "grouped heads": ("gathered", "llama", dict(TINY_LLAMA)),
    "norms of heads": ("gathered", "qwen3", {**TINY_LLAMA, "head_dim": 8}),
    "experts": ("gathered", "mixtral", {**TINY_LLAMA, "num_local_experts": 4}),
    "parallel blocks": ("gathered", "phi", {**TINY_LLAMA, "num_key_value_heads": 4}),
    "fused projections": ("gathered", "phi3", dict(TINY_LLAMA)),
    "norms after": ("gathered", "olmo2", dict(TINY_LLAMA)),
    "windows in some layers": (
        "gathered",
        "gemma3_text",
        WIDE | WINDOWS | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    ),
    "compressed keys and values": (
        "gathered",
        "deepseek_v3",
        TINY_LLAMA
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": 8}
        | {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"first_k_dense_replace": 1, "head_dim": 4},
    ),
    "a recurrent state": (
        "uncached",
        "mamba",
        {"vocab_size": TINY_LOGITS, "hidden_size": 32, "num_hidden_layers": 2}
        | {"state_size": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
}

# As mlx-lm computes them: it leaves out windows of Mistral, for example.
OWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("gathered", "mistral", {**TINY_LLAMA, "sliding_window": 4}),
    "cohere2": (
        "gathered",
        "cohere2",
        {**TINY_LLAMA, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 5},
    ),
    "gemma": ("gathered", "gemma", WIDE),
    "starcoder2": ("gathered", "starcoder2", dict(TINY_LLAMA)),
    # Its attention in code of its own takes no mask for several sequences.
    "gemma2": ("uncached", "gemma2", WIDE | {"query_pre_attn_scalar": 8}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_rows_are_those_of_transformers(name: str, make: Make) -> None:
    tier, model_type, settings = ALIKE[name]
    model = make(model_type, settings)
    if model_type == "gpt2":
        name_weights_as_published(model.path)
    engine = MLXEngine(model.path, dtype="float32")
    assert engine.statistics()["tier"] == tier, engine.statistics()["tier_reason"]
    for step in population(1, 9):
        assert largest_error(engine, step, model.logprobs) <= 1e-4


def name_weights_as_published(folder: Path) -> None:
    """The published GPT-2, which mlx-lm knows, has shorter names than transformers gives."""
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    mx.eval(weights)
    renamed = {name.removeprefix("transformer."): array for name, array in weights.items()}
    mx.save_safetensors(str(file), renamed, {"format": "pt"})


@pytest.mark.parametrize("name", OWN)
def test_rows_are_those_of_mlx_lm(name: str, make: Make) -> None:
    tier, model_type, settings = OWN[name]
    model, tokens = mlx_lm.load(str(make(model_type, settings).path))
    engine = MLXEngine.from_model(model, tokens)
    assert engine.statistics()["tier"] == tier, engine.statistics()["tier_reason"]
    for step in population(2, 9):
        assert largest_error(engine, step, lambda ids: generated(model, ids)) <= 1e-4


def generated(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """The row by which mlx-lm would draw the next token."""
    _, logprobs = next(generate_step(mx.array(token_ids), model, max_tokens=1))
    row = torch.from_numpy(np.array(logprobs.astype(mx.float32)))[:TINY_VOCABULARY]
    return row.double().log_softmax(-1)


def test_what_does_not_pass_the_self_test_is_served_without_a_cache(make: Make) -> None:
    model_type, settings = OWN["gemma2"][1:]
    engine = MLXEngine(make(model_type, settings).path, dtype="float32")
    assert "in the self-test it raised" in str(engine.statistics()["tier_reason"])


def test_what_keeps_something_else_of_its_past_is_served_without_a_cache(make: Make) -> None:
    engine = MLXEngine(make("mamba", ALIKE["a recurrent state"][2]).path)
    assert engine.statistics()["tier_reason"] == "not gathered: a layer has a ArraysCache"


@pytest.mark.parametrize("mask", [None, float("nan")])
def test_wrong_rows_do_not_pass_the_self_test(
    mask: float | None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide = None if mask is None else mx.array(mask)
    monkeypatch.setattr(SlotCache, "make_mask", lambda *_, **__: hide)
    model = make("llama")
    engine = MLXEngine(model.path, dtype="float32")
    assert "its log-probabilities were off by" in str(engine.statistics()["tier_reason"])
    assert largest_error(engine, [(5, 6, 7), (8,)], model.logprobs) <= 1e-5
