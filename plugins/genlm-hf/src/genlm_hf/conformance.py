"""The targets of `genlm check hf`.

Tiny models with random weights, of architectures that keep their past in different ways. The
oracle is transformers' forward pass of one sequence, without a cache, and peft's own model for
adapters. The engine runs on the first CUDA device if there is one, else on the CPU; the oracle
always on the CPU.
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

    settings: Mapping[str, Any]
    lora: Mapping[str, Any]


_COMMON = {
    "vocab_size": TINY_LOGITS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = _COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

ARCHITECTURES = {
    "llama": _Architecture(TINY_LLAMA, {"target_modules": ["q_proj", "down_proj"]}),
    "gpt2": _Architecture(_GPT, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "gptj": _Architecture(_GPT | {"rotary_dim": 4}, {"target_modules": ["q_proj", "v_proj"]}),
    "mistral": _Architecture(
        {**TINY_LLAMA, "sliding_window": 4}, {"target_modules": ["v_proj", "o_proj"]}
    ),
    "mamba": _Architecture(
        _COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        {"target_modules": ["x_proj"]},
    ),
}
"""By transformers' name: grouped-query attention, learned positions, custom attention code, a
window shorter than the sequences, a recurrent state."""


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target per architecture; each is built when it is first used.

    Args:
        folder: Folder for the models.
    """
    for name, (settings, lora) in ARCHITECTURES.items():
        model = TinyModel(
            folder / name, settings, model_type=name, adapters=("red", "blue"), lora=lora
        )
        yield EngineTarget(
            model=name,
            build=functools.partial(_engine, model),
            oracle=model.logprobs,
            adapters=model.adapters,
            tight_options=[{"kv_budget_bytes": budget} for budget in _TIGHT_BUDGETS],
        )


def _engine(model: TinyModel, **options: Any) -> Any:
    """Serve a model in float32, on the engine's default device."""
    from genlm_hf.engine import HFEngine

    return HFEngine(model.path, dtype="float32", **options)
