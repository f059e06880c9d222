"""`SegmentForward`: runs a model over a tree in padded batches of segments."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch

from genlm.prefix.forward import ForwardCounts, ForwardResult, Receive, TreeBatch
from genlm.prefix.node import Slots
from genlm.prefix.padding import (
    Segment,
    SegmentLimits,
    group_segments,
    places_of,
    prefill_stages,
)

__all__ = ["CollectedLogits", "SegmentForward"]


class SegmentForward(abc.ABC):
    """A `ScoringForward` that runs each prefill stage in as few passes as padding allows.

    Args:
        limits: Limits of a pass.
    """

    def __init__(self, limits: SegmentLimits) -> None:
        self._limits = limits

    @abc.abstractmethod
    def run_segments(
        self, segments: Sequence[Segment], wanted: Slots, receive: Receive, *, in_pieces: bool
    ) -> None:
        """Run one pass over segments side by side.

        Args:
            segments: The segments, whose pasts are computed.
            wanted: Slot, segment and place in the segment of each token whose logits are
                requested, shape `(n, 3)`.
            receive: Receives these slots and logits.
            in_pieces: Whether to compute the logits of a few tokens at a time.
        """

    @abc.abstractmethod
    def scores_in_pieces(self) -> bool:
        """Whether `score` never has the logits of a whole pass in memory."""

    def __call__(self, batch: TreeBatch) -> ForwardResult:
        """Compute the uncached tokens of the tree and the logits of the sequences."""
        found = CollectedLogits()
        counts = self._run_stages(batch, found.add, in_pieces=False)
        return ForwardResult(found.of(batch.last_slots), *counts)

    def score(self, batch: TreeBatch, receive: Receive) -> ForwardCounts:
        """Compute the uncached tokens of the tree; pass on the requested logits."""
        return self._run_stages(batch, receive, in_pieces=True)

    def _run_stages(
        self, batch: TreeBatch, receive: Receive, *, in_pieces: bool
    ) -> ForwardCounts:
        wanted = set(batch.wanted_slots())
        tokens = forwards = 0
        for stage in prefill_stages(batch):
            for segments in group_segments(stage, self._limits):
                places = np.array(places_of(segments, wanted), np.int64).reshape(-1, 3)
                self.run_segments(segments, places, receive, in_pieces=in_pieces)
                tokens += sum(len(segment.tokens) for segment in segments)
                forwards += 1
        return ForwardCounts(tokens, forwards)


class CollectedLogits:
    """Logits of several passes by key, such as slots."""

    def __init__(self) -> None:
        self._keys: list[Slots] = []
        self._parts: list[torch.Tensor] = []

    def add(self, keys: Slots, logits: torch.Tensor) -> None:
        """Add the logits of some keys, shape `(len(keys), width)`."""
        self._keys.append(keys)
        self._parts.append(logits)

    def of(self, keys: Sequence[int]) -> torch.Tensor:
        """Return the logits of keys in order; a view of the only part if it has this order."""
        known = np.concatenate(self._keys)
        logits = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        if np.array_equal(known, keys):
            return logits
        order = np.argsort(known)
        places = order[np.searchsorted(known, keys, sorter=order)]
        return logits[torch.from_numpy(places).to(logits.device)]
