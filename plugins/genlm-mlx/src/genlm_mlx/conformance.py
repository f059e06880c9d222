"""The targets of `genlm check mlx`.

Tiny models with random weights, made by transformers, whose forward pass of one sequence is
the oracle: an independent implementation of each model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from genlm.testing import EngineTarget, TinyModel, families

_TIGHT_BUDGETS = (0, 2048, 20_000)  # in bytes: no token, a few tokens, less than one batch

LORA: Mapping[str, Mapping[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "down_proj"]},
    "gemma3_text": {"target_modules": ["v_proj", "o_proj"]},
    "mamba": {"target_modules": ["x_proj"]},
}
"""Settings of the adapters of each family: grouped-query attention, a window shorter than the
sequences, a recurrent state."""

_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
}
"""Changed settings of families: one layer of each kind instead of six layers."""


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target per architecture; its model is built when it is first used.

    Args:
        folder: Folder for the models.
    """
    for name, lora in LORA.items():
        # The width is 64: mlx-lm rounds the root of other widths to bfloat16 in Gemma models.
        family = families()[name]
        settings = {**family.settings, **_CHANGES.get(name, {})}
        family = dataclasses.replace(family, settings=settings)
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
    """Serve a model in float32.

    The self-test would replace an execution path with wrong rows, which the checks must see.
    """
    from genlm_mlx.engine import MLXEngine

    return MLXEngine(model.path, dtype="float32", self_test=False, **options)
