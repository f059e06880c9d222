"""The resident batch cache: pasts of recent passes in the layout that attention reads.

Gathering the past of every sequence from its slots copies it. For a population that grows by
a token a step, the same pasts would be copied at every step; a resident batch only appends
the new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from genlm.prefix import Segment, SegmentBatch

__all__ = ["ResidentBatch", "ResidentBatches"]

# Columns that are added when a batch has no column left.
_STEP = 64

# Searching more batches rarely finds a past.
_MOST_BATCHES = 8

# Padding columns before the longest past that are read rather than removed by a copy.
_MOST_PADDING = 64


class ResidentBatch:
    """Keys and values of the sequences of one pass.

    Attributes:
        arrays: Keys and values of each layer, `(sequences, heads, columns, width)`.
        columns: Number of columns in use.
        rows: Index of the sequence that ends in a slot.
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
        """Return the row of each segment's past, None if one of the pasts is missing."""
        found = [
            self.rows.get(int(segment.slots[segment.past - 1])) if segment.past else None
            for segment in segments
        ]
        rows = [row for row in found if row is not None]
        return rows if len(rows) == len(found) else None

    def tokens_after(self, rows: int, new: int) -> int:
        """Return the capacity in tokens after `new` tokens are appended to `rows` sequences."""
        end, have = self.columns + new, int(self.arrays[0][0].shape[2])
        return rows * (have if end <= have else end + _STEP)

    def continue_with(self, segments: Sequence[Segment], sources: Sequence[int]) -> None:
        """Select the pasts of these segments; `append` then adds their new tokens."""
        same = list(sources) == list(range(self._count))
        self._sources = None if same else mx.array(list(sources))
        self._name_rows(segments)

    def _name_rows(self, segments: Sequence[Segment]) -> None:
        self._count = len(segments)
        self.rows = {int(segment.slots[-1]): row for row, segment in enumerate(segments)}

    def append(self, layer: int, new: Sequence[mx.array]) -> list[mx.array]:
        """Append a layer's new keys and values; return those of whole sequences.

        Args:
            layer: Index of the layer.
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
        # In place: after evaluation no other array refers to the old one.
        array[:, :, self.columns : end] = new
        return array[:, :, :end]


class ResidentBatches:
    """The batches of the last passes that fit into memory."""

    def __init__(self) -> None:
        self._batches: list[ResidentBatch] = []

    @property
    def nbytes(self) -> int:
        """Size of all batches."""
        return sum(batch.nbytes for batch in self._batches)

    def take(self, segments: Sequence[Segment], most_tokens: int) -> ResidentBatch | None:
        """Remove and return the batch that has the pasts of all segments, ready to continue.

        None if there is no such batch, or if it would then hold more than `most_tokens`.
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
        """Forget the sequences that end in slots which a pass has written."""
        for slot in batch.writes.reshape(-1).tolist():
            for resident in self._batches:
                resident.rows.pop(slot, None)

    def put(self, batch: ResidentBatch) -> None:
        """Keep a batch, for which `fit` has freed memory."""
        self._batches.append(batch)

    def fit(self, room: int) -> None:
        """Free the oldest batches until all take at most `room` bytes."""
        self._batches = [batch for batch in self._batches if batch.rows][-_MOST_BATCHES:]
        while self._batches and self.nbytes > room:
            del self._batches[0]

    def clear(self) -> None:
        """Free all batches."""
        self._batches.clear()
