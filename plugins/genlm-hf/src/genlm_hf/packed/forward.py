"""One packed forward pass through a model: the logits that a plan asks for."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from genlm_hf.forward import evaluation_mode, head_sees
from genlm_hf.kv.storage import KVStorage
from genlm_hf.packed.attention import packed_step
from genlm_hf.packed.layout import AttentionLayout
from genlm_hf.packed.plan import PackedPlan

__all__ = ["packed_logits", "takes_positions"]


def packed_logits(
    model: Any,
    plan: PackedPlan,
    *,
    layout: AttentionLayout,
    storage: KVStorage,
    device: torch.device,
) -> torch.Tensor:
    """Run a plan: store keys and values of its tokens and return the results' logits.

    Positions are passed explicitly, no mask is; the output embedding is applied to
    the results only.

    Returns:
        Shape `(len(plan.results), width of the model's output)`, in the model's
        dtype, on the device of its output.
    """
    inputs = {
        "input_ids": torch.from_numpy(plan.tokens).to(device)[None],
        "position_ids": torch.from_numpy(plan.positions).to(device)[None],
        "use_cache": False,
        "return_dict": True,
    }
    results = torch.from_numpy(plan.results).to(device)

    taken = False

    def take(states: torch.Tensor) -> torch.Tensor:
        nonlocal taken
        taken = True
        return states[:, results.to(states.device)]

    with (
        torch.inference_mode(),
        evaluation_mode(model),
        head_sees(model, (1, len(plan.tokens)), take),
        packed_step(layout, storage, plan),
    ):
        output = model(**inputs)
        logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
        return (logits if taken else take(logits))[0]


def takes_positions(model: Any) -> bool:
    """Whether a model can be told the position of each token."""
    return "position_ids" in inspect.signature(model.forward).parameters
