"""The targets of `genlm check hf`.

Tiny models with random weights, of architectures with different caches. The
oracle is transformers' forward pass of one sequence, without a cache, and peft's own model for
adapters. The engine runs on the first CUDA device if there is one, else on the CPU; the oracle
always on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from genlm.testing import EngineTarget, TinyModel, families

_TIGHT_BUDGETS = (0, 2048, 20_000)  # in bytes: no token, a few tokens, less than one batch

LORA: Mapping[str, Mapping[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "down_proj"]},
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "gptj": {"target_modules": ["q_proj", "v_proj"]},
    "mistral with a short window": {"target_modules": ["v_proj", "o_proj"]},
    "mamba": {"target_modules": ["x_proj"]},
}
"""Settings of the adapters of each family: grouped-query attention, learned positions, custom
attention code, a window shorter than the sequences, a recurrent state."""


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target per architecture; its model is built when it is first used.

    Args:
        folder: Folder for the models.
    """
    for name, lora in LORA.items():
        family = families(head_dim=8)[name]
        model = TinyModel.of(folder / name, family, adapters=("red", "blue"), lora=lora)
        yield EngineTarget(
            model=name,
            build=functools.partial(_engine, model),
            oracle=model.logprobs,
            adapters=model.adapters,
            weights=model.weights,
            tight_options=[{"kv_budget_bytes": budget} for budget in _TIGHT_BUDGETS],
            timeout_s=240.0,  # the first call imports transformers
        )


def _engine(model: TinyModel, **options: Any) -> Any:
    """Serve a model in float32, on the engine's default device.

    The self-test would replace an execution path with wrong rows, which the checks must see.
    """
    from genlm_hf.engine import HFEngine

    return HFEngine(model.path, dtype="float32", self_test=False, **options)
