"""The targets of `genlm check mlx`.

Tiny models with random weights, made by transformers, whose forward pass of one sequence is
the oracle: an independent implementation of each model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from genlm.testing import TINY_LLAMA, TINY_LOGITS, EngineTarget, TinyModel

__all__ = ["ARCHITECTURES", "targets"]

_TIGHT_BUDGETS = (0, 2048, 20_000)  # in bytes: no token, a few, fewer than a batch has


class _Architecture(NamedTuple):
    """Settings of a model and of its adapters."""

    model_type: str
    settings: Mapping[str, Any]
    lora: Mapping[str, Any]


_COMMON = {
    "vocab_size": TINY_LOGITS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES = {
    "llama": _Architecture("llama", TINY_LLAMA, {"target_modules": ["q_proj", "down_proj"]}),
    "gemma3_text": _Architecture(
        "gemma3_text",
        {
            **TINY_LLAMA,
            "hidden_size": 64,  # mlx-lm rounds the root of others to bfloat16
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"target_modules": ["v_proj", "o_proj"]},
    ),
    "mamba": _Architecture(
        "mamba",
        _COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        {"target_modules": ["x_proj"]},
    ),
}
"""Grouped-query attention, a window shorter than the sequences, a recurrent state."""


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target per architecture; each is built when it is first used.

    Args:
        folder: Folder for the models.
    """
    for name, (model_type, settings, lora) in ARCHITECTURES.items():
        model = TinyModel(
            folder / name,
            settings,
            model_type=model_type,
            adapters=("red", "blue"),
            lora=lora,
        )
        yield EngineTarget(
            model=name,
            build=functools.partial(_engine, model),
            oracle=model.logprobs,
            adapters=model.adapters,
            tight_options=[{"kv_budget_bytes": budget} for budget in _TIGHT_BUDGETS],
        )


def _engine(model: TinyModel, **options: Any) -> Any:
    """Serve a model, in float32."""
    from genlm_mlx.engine import MLXEngine

    return MLXEngine(model.path, dtype="float32", **options)
