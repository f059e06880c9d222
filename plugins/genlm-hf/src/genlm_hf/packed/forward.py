"""Tier `packed`: one packed forward pass over everything that is not computed yet.

For decoder-only models whose layers mix tokens by plain attention only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from genlm.prefix import Computed, TreeBatch
from genlm_hf.forward import accepted, evaluation_mode, head_sees
from genlm_hf.packed.attention import packed_step
from genlm_hf.packed.device_plan import DevicePlan
from genlm_hf.packed.layout import AttentionLayout
from genlm_hf.packed.plan import PackedPlan, plan_forward
from genlm_hf.storage import KVStorage, LayerShape

__all__ = ["PackedForward", "takes_positions"]


class PackedForward:
    """Runs a model over what is fresh in a tree, as one sequence; see `Computing`.

    Args:
        model: Of transformers' interface.
        layout: Its attention layers.
        device: Where it takes its input.
    """

    def __init__(self, model: Any, layout: AttentionLayout, device: torch.device) -> None:
        self._model, self._layout, self._device = model, layout, device

    @property
    def shapes(self) -> Sequence[LayerShape]:
        """What each layer keeps of a token."""
        return [layer.shape for layer in self._layout.layers]

    def compute(self, batch: TreeBatch, storage: KVStorage) -> Computed:
        """Run one pass; positions are passed explicitly, no mask is.

        The output embedding is applied to the results only.
        """
        plan = plan_forward(batch.tree, batch.adapter, batch.sequences, batch.last_slots)
        return Computed(self._logits(plan, storage), tokens=len(plan.tokens), forwards=1)

    def _logits(self, plan: PackedPlan, storage: KVStorage) -> torch.Tensor:
        first = DevicePlan(plan, self._device)
        inputs = {
            "input_ids": first.tokens[None],
            "position_ids": first.positions[None],
            "use_cache": False,
            "return_dict": True,
        }
        taken = False

        def take(states: torch.Tensor) -> torch.Tensor:
            nonlocal taken
            taken = True
            return states[:, first.results.to(states.device)]

        with (
            torch.inference_mode(),
            evaluation_mode(self._model),
            head_sees(self._model, (1, len(plan.tokens)), take),
            packed_step(self._layout, storage, plan, {self._device: first}),
        ):
            output = self._model(**inputs)
            logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
            return (logits if taken else take(logits))[0]


def takes_positions(model: Any) -> bool:
    """Whether a model can be told the position of each token."""
    return bool(accepted(model, {"position_ids": None}))
