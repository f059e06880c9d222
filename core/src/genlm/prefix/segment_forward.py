"""`SegmentForward`: runs a model in padded passes over sequences with gathered pasts."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch

from genlm.core.queries.generations import Integers64
from genlm.prefix.forward import ForwardResult, Segment, TableBatch, TreeBatch
from genlm.prefix.node import Slots
from genlm.prefix.padding import SegmentLimits, group_segments, table_passes
from genlm.prefix.pass_layout import PassLayout


class SegmentForward(abc.ABC):
    """A `ForwardFn` whose passes are `PassLayout`s, as few as padding allows.

    Args:
        limits: Limits of a pass.
        pad_id: Token id that pads sequences.
    """

    def __init__(self, limits: SegmentLimits, pad_id: int = 0) -> None:
        self._limits, self._pad_id = limits, pad_id

    @abc.abstractmethod
    def run_pass(
        self, layout: PassLayout, rows: Integers64, places: Integers64
    ) -> torch.Tensor:
        """Run the model over sequences side by side.

        Args:
            layout: The sequences.
            rows: Sequence of each token whose logits are requested, shape `(n,)`.
            places: Index of the token among the new tokens of the sequence, shape `(n,)`.

        Returns:
            The logits, shape `(n, width of the model's output)`.
        """

    def run_segments(
        self, segments: Sequence[Segment], rows: Integers64, places: Integers64
    ) -> torch.Tensor:
        """Run one pass over segments, whose pasts are computed; see `run_pass`."""
        return self.run_pass(PassLayout.of_segments(segments, self._pad_id), rows, places)

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

    def run_table(
        self,
        batch: TableBatch,
        adapter: str | None,  # noqa: ARG002 - the adapter is active in the model
    ) -> ForwardResult:
        """Run tokens that continue rows of a table, each as a sequence with one new token.

        Later passes read the keys and values that earlier ones stored.
        """
        is_requested = np.zeros(len(batch.tokens), bool)
        is_requested[batch.results] = True
        keys, parts = [], []
        for members in table_passes(batch.positions, self._limits):
            rows = np.flatnonzero(is_requested[members])
            layout = PassLayout.of_table(batch, members)
            keys.append(members[rows])
            parts.append(self.run_pass(layout, rows, np.zeros_like(rows)))
        logits = logits_of_keys(batch.results, keys, parts)
        return ForwardResult(logits, len(batch.tokens), forwards=len(parts))


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
