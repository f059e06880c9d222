"""`SegmentForward`: runs a model over a tree in padded batches of segments."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch

from genlm.core.queries.generations import Integers64
from genlm.prefix.forward import ForwardResult, Segment, TreeBatch
from genlm.prefix.node import Slots
from genlm.prefix.padding import SegmentLimits, group_segments

__all__ = ["SegmentForward", "logits_of_keys"]


class SegmentForward(abc.ABC):
    """A `ForwardFn` that runs each prefill stage in as few passes as padding allows.

    Args:
        limits: Limits of a pass.
    """

    def __init__(self, limits: SegmentLimits) -> None:
        self._limits = limits

    @abc.abstractmethod
    def run_segments(
        self, segments: Sequence[Segment], rows: Integers64, places: Integers64
    ) -> torch.Tensor:
        """Run one pass over segments side by side.

        Args:
            segments: The segments, whose pasts are computed.
            rows: Segment of each token whose logits are requested, shape `(n,)`.
            places: Index of the token among the segment's tokens, shape `(n,)`.

        Returns:
            The logits, shape `(n, width of the model's output)`.
        """

    def __call__(self, batch: TreeBatch) -> ForwardResult:
        """Compute the uncached tokens of the tree and the requested logits."""
        tokens = 0
        slots, parts = [], []
        for stage in batch.stages:
            for segments in group_segments(stage, self._limits):
                counts = np.array([len(segment.tokens) for segment in segments])
                new = np.concatenate([segment.slots[segment.past :] for segment in segments])
                wanted = np.flatnonzero(np.isin(new, batch.wanted))
                rows = np.repeat(np.arange(len(segments)), counts)[wanted]
                places = wanted - (np.cumsum(counts) - counts)[rows]
                slots.append(new[wanted])
                parts.append(self.run_segments(segments, rows, places))
                tokens += len(new)
        return ForwardResult(logits_of_keys(batch.wanted, slots, parts), tokens, len(parts))


def logits_of_keys(
    keys: Slots, pass_keys: Sequence[Slots], parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the logits of keys, such as slots, in order.

    Args:
        keys: Keys, possibly repeated.
        pass_keys: The keys of the logits of each pass.
        parts: The logits of each pass.

    Returns:
        Shape `(len(keys), width)`; the logits of the only pass if they have this order.
    """
    computed_keys = np.concatenate(pass_keys)
    logits = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if np.array_equal(computed_keys, keys):
        return logits
    order = np.argsort(computed_keys)
    places = order[np.searchsorted(computed_keys, keys, sorter=order)]
    return logits[torch.from_numpy(places).to(logits.device)]
