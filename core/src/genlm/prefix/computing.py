"""A batch of a prefix tree: what it asks for, and who computes it.

The tree decides what is missing and where it goes; how a model is run over it is left
to a `Computing`, of which there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from genlm.prefix.tree import PrefixTree

__all__ = ["Computed", "Computing", "TreeBatch"]


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """Sequences in the current batch of a tree.

    Attributes:
        tree: Holds them all; what is fresh in it is to be computed.
        adapter: Under which they were inserted.
        sequences: Whose next tokens are wanted.
        last_slots: What `insert` returned for each.
    """

    tree: PrefixTree
    adapter: str | None
    sequences: Sequence[tuple[int, ...]]
    last_slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Computed:
    """What came of a batch.

    Attributes:
        logits: Shape `(sequences, width of the model's output)`, in the model's dtype.
        tokens: How many went through the model, without padding.
        forwards: In how many forward passes.
    """

    logits: torch.Tensor
    tokens: int
    forwards: int


class Computing(Protocol):
    """One way to run a model over what is fresh in a tree."""

    def __call__(self, batch: TreeBatch) -> Computed:
        """Store keys and values of all that is fresh; return the sequences' logits."""
        ...
