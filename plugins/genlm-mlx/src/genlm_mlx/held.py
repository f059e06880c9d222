"""Pasts of recent passes, side by side as attention read them.

Gathering the past of every sequence from its slots copies it. A population that grows by a
token a step would have the same pasts copied at every step; kept as they were, they only
get the new tokens appended.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from genlm.prefix import Segment, SegmentBatch

__all__ = ["HeldBatch", "HeldBatches"]

# Columns that are added when there is no room for more tokens.
_STEP = 64

# More than these are looked through in vain.
_MOST_BATCHES = 8

# Padding columns before the longest past that are read rather than copied away.
_MOST_PADDING = 64


class HeldBatch:
    """Keys and values of the sequences of one pass.

    Attributes:
        arrays: Of each layer, keys and values, `(sequences, heads, columns, width)`.
        columns: How many of these are in use.
        rows: Which sequence ends in a slot.
    """

    def __init__(self, segments: Sequence[Segment], layers: int) -> None:
        self.arrays: list[list[mx.array]] = [[] for _ in range(layers)]
        self.columns = 0
        self._name_rows(segments)
        self._sources: mx.array | None = None

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(int(array.nbytes) for pair in self.arrays for array in pair)

    def sources(self, segments: Sequence[Segment]) -> list[int] | None:
        """Return the row that each segment's past is, None if one of them is none."""
        found = [
            self.rows.get(int(segment.slots[segment.past - 1])) if segment.past else None
            for segment in segments
        ]
        rows = [row for row in found if row is not None]
        return rows if len(rows) == len(found) else None

    def tokens_after(self, rows: int, new: int) -> int:
        """Return for how many tokens it has memory once it is of `rows`, `new` longer."""
        end, have = self.columns + new, int(self.arrays[0][0].shape[2])
        return rows * (have if end <= have else end + _STEP)

    def continue_with(self, segments: Sequence[Segment], sources: Sequence[int]) -> None:
        """Become a batch of these segments, whose new tokens are still to be appended."""
        same = list(sources) == list(range(self._count))
        self._sources = None if same else mx.array(list(sources))
        self._name_rows(segments)

    def _name_rows(self, segments: Sequence[Segment]) -> None:
        self._count = len(segments)
        self.rows = {int(segment.slots[-1]): row for row, segment in enumerate(segments)}

    def append(self, layer: int, new: Sequence[mx.array]) -> list[mx.array]:
        """Append a layer's new keys and values; return those of whole sequences.

        Args:
            layer: Its place.
            new: Keys and values, `(sequences, heads, new, width)`.
        """
        return [self._appended(layer, which, states) for which, states in enumerate(new)]

    def _appended(self, layer: int, which: int, new: mx.array) -> mx.array:
        array = self.arrays[layer][which]
        if self._sources is not None:
            array = mx.take(array, self._sources, axis=0)
        end = self.columns + new.shape[2]
        if end > array.shape[2]:
            rows, heads, _, width = array.shape
            room = mx.zeros((rows, heads, end - array.shape[2] + _STEP, width), array.dtype)
            array = mx.concatenate([array, room], axis=2)
        self.arrays[layer][which] = array
        # In place: once this is evaluated, nothing else holds the array as it was.
        array[:, :, self.columns : end] = new
        return array[:, :, :end]


class HeldBatches:
    """Those of the last passes, as many as there is memory for."""

    def __init__(self) -> None:
        self._batches: list[HeldBatch] = []

    @property
    def nbytes(self) -> int:
        """Size of all of them."""
        return sum(batch.nbytes for batch in self._batches)

    def take(self, segments: Sequence[Segment], most_tokens: int) -> HeldBatch | None:
        """Hand over the batch that has the pasts of all segments, ready to continue them.

        None as well if it would then have memory for more than so many tokens.
        """
        past = max(segment.past for segment in segments)
        new = max(len(segment.tokens) for segment in segments)
        for batch in reversed(self._batches):
            sources = batch.sources(segments)
            if sources is None or batch.columns > past + _MOST_PADDING:
                continue
            self._batches.remove(batch)
            if batch.tokens_after(len(segments), new) > most_tokens:
                return None
            batch.continue_with(segments, sources)
            return batch
        return None

    def forget_slots(self, batch: SegmentBatch) -> None:
        """Note that slots were written: what ended in one of them does so no longer."""
        for slot in batch.writes.reshape(-1).tolist():
            for held in self._batches:
                held.rows.pop(slot, None)

    def put(self, batch: HeldBatch) -> None:
        """Keep a batch, for which `fit` has left room."""
        self._batches.append(batch)

    def fit(self, room: int) -> None:
        """Let go of the oldest until all of them take no more than `room` bytes."""
        self._batches = [batch for batch in self._batches if batch.rows][-_MOST_BATCHES:]
        while self._batches and self.nbytes > room:
            del self._batches[0]

    def clear(self) -> None:
        """Let go of all."""
        self._batches.clear()
