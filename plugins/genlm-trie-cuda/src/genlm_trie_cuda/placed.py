"""A plan's index arrays on a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from genlm_trie_cuda.plan import Indices, TreePlan

__all__ = ["PlacedPlan"]


@dataclass(frozen=True)
class PlacedPlan:
    """A plan and the tensors that reductions on one device read; int32, never changed.

    Attributes:
        plan: On the host.
        turns: For each turn k how many intervals have a k-th piece; on the host too, so
            that no reduction waits for the device.
    """

    plan: TreePlan
    turns: tuple[int, ...]
    order: torch.Tensor
    place: torch.Tensor
    piece: torch.Tensor
    piece_offset: torch.Tensor
    piece_count: torch.Tensor
    source: torch.Tensor

    @classmethod
    def on(cls, plan: TreePlan, device: torch.device) -> PlacedPlan:
        """Copy a plan to a device; the copies are complete on return, for all streams."""

        def tensor(array: Indices) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            plan=plan,
            turns=tuple(np.diff(plan.piece_offset).tolist()),
            order=tensor(plan.order),
            place=tensor(plan.place),
            piece=tensor(plan.piece),
            piece_offset=tensor(plan.piece_offset),
            piece_count=tensor(plan.piece_count),
            source=tensor(plan.source),
        )
