"""The resident batch cache: pasts of recent passes in the layout that attention reads.

Gathering the past of every sequence from its slots copies it. For a population that grows by
a token a step, the same pasts would be copied at every step; a resident batch only appends
the new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from genlm.prefix import PassLayout, Slots

# Number of columns added when a batch is full.
_STEP = 64

# More batches rarely contain a past.
_MAX_BATCHES = 8

# Maximum number of columns of padding, or of shared slots, before the longest past; more are
# removed by a copy.
_MAX_PADDING = 64

# Replaces the last slot of a sequence after another token was written to that slot.
_NO_SLOT = -1


class ResidentBatch:
    """Keys and values of the sequences of one pass.

    Args:
        layout: The first pass of the batch, which gathers the keys and values of its pasts.
        layers: Number of layers.

    Attributes:
        arrays: Keys and values of each layer, `(sequences, heads, columns, width)`; empty until
            the pass has gathered them.
        columns: Number of columns of the pasts.
        shared: Number of first tokens that all sequences have in common and that have no
            column.
    """

    def __init__(self, layout: PassLayout, layers: int) -> None:
        self.arrays: list[list[mx.array]] = [[] for _ in range(layers)]
        self.columns, self.shared = layout.past, layout.shared
        self._ends = layout.ends
        self._sources: mx.array | None = None

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(int(array.nbytes) for pair in self.arrays for array in pair)

    @property
    def has_sequences(self) -> bool:
        """Whether the batch still contains a sequence that can be continued."""
        return bool((self._ends != _NO_SLOT).any())

    def sources(self, pasts: Slots) -> Slots | None:
        """Return the row of each past by its last slot, None if one of them is missing."""
        order = np.argsort(self._ends, kind="stable")
        ends = self._ends[order]
        indices = np.minimum(np.searchsorted(ends, pasts), len(ends) - 1)
        return order[indices] if (ends[indices] == pasts).all() else None

    def forget(self, slots: Slots) -> None:
        """Drop the sequences that end in some slots."""
        self._ends = np.where(np.isin(self._ends, slots), _NO_SLOT, self._ends)

    def tokens_after(self, layout: PassLayout) -> int:
        """Return the capacity in tokens after a pass that appends its new tokens."""
        end = self.columns + layout.tokens.shape[1]
        capacity = int(self.arrays[0][0].shape[2]) if self.arrays[0] else end
        return len(layout) * (capacity if end <= capacity else end + _STEP)

    def continue_with(self, layout: PassLayout, sources: Slots) -> None:
        """Select the pasts of these sequences, to which `append` adds their new tokens."""
        is_identity = np.array_equal(sources, np.arange(len(self._ends)))
        self._sources = None if is_identity else mx.array(sources.astype(np.int32))
        self._ends = layout.ends

    def append(self, layer: int, new: Sequence[mx.array]) -> list[mx.array]:
        """Append a layer's new keys and values; return those of whole sequences.

        Args:
            layer: Index of the layer.
            new: Keys and values, `(sequences, heads, new, width)`.
        """
        return [self._append_states(layer, index, states) for index, states in enumerate(new)]

    def _append_states(self, layer: int, index: int, new: mx.array) -> mx.array:
        array = self.arrays[layer][index]
        if self._sources is not None:
            array = mx.take(array, self._sources, axis=0)
        end = self.columns + new.shape[2]
        if end > array.shape[2]:
            rows, heads, _, width = array.shape
            room = mx.zeros((rows, heads, end - array.shape[2] + _STEP, width), array.dtype)
            array = mx.concatenate([array, room], axis=2)
        self.arrays[layer][index] = array
        # In place, because after evaluation no other array refers to the old one.
        array[:, :, self.columns : end] = new
        return array[:, :, :end]


class ResidentBatches:
    """The batches of the last passes that fit into memory.

    Args:
        layers: Number of layers.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._batches: list[ResidentBatch] = []

    @property
    def nbytes(self) -> int:
        """Size of all batches."""
        return sum(batch.nbytes for batch in self._batches)

    def take(self, layout: PassLayout, max_tokens: int) -> ResidentBatch | None:
        """Return a batch for the keys and values that a pass reads, which `put` returns.

        If a batch has the pasts of all sequences, the pass continues it, and the layout then
        shares as many slots as the batch. Otherwise the batch is new. The result is None if the
        batch would have more than `max_tokens` tokens after the pass, or if it is new and could
        not be continued, because the sequences have different numbers of new tokens.
        """
        longest = layout.shared + layout.past
        for batch in reversed(self._batches):
            if batch.columns + batch.shared > longest + _MAX_PADDING:
                continue
            if layout.shared - batch.shared > max(_MAX_PADDING, batch.columns // 2):
                continue  # the sequences have more in common than when the batch began
            sources = batch.sources(layout.past_ends)
            if sources is None:
                continue
            self._batches.remove(batch)
            if batch.tokens_after(layout) > max_tokens:
                break
            batch.continue_with(layout, sources)
            layout.share(batch.shared)
            return batch
        batch = ResidentBatch(layout, self._layers)
        is_kept = layout.is_even and batch.tokens_after(layout) <= max_tokens
        return batch if is_kept else None

    def forget_slots(self, written: Slots) -> None:
        """Drop the sequences that end in slots which a pass has written."""
        for batch in self._batches:
            batch.forget(written)

    def put(self, batch: ResidentBatch) -> None:
        """Add a batch, for which `fit` has freed memory."""
        self._batches.append(batch)

    def fit(self, room: int) -> None:
        """Free the oldest batches until all batches take at most `room` bytes."""
        self._batches = [batch for batch in self._batches if batch.has_sequences][
            -_MAX_BATCHES:
        ]
        while self._batches and self.nbytes > room:
            del self._batches[0]

    def clear(self) -> None:
        """Free all batches."""
        self._batches.clear()
