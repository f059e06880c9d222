"""Caches with mlx-lm's interface that keep keys and values in slots.

The model passes the keys and values of new tokens to `SlotCache` and receives those of whole
sequences, gathered from the slots or resident from the last pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from genlm.prefix import PassLayout, Slots
from genlm_mlx.resident import ResidentBatch
from genlm_mlx.storage import KVStorage


def slot_caches(
    storage: KVStorage,
    batch: PassLayout,
    windows: Sequence[int | None],
    *,
    resident: ResidentBatch | None = None,
    continues: bool = False,
) -> list[SlotCache]:
    """Return the caches that a model gets for one forward pass.

    Args:
        storage: Stores the new keys and values.
        batch: Slots to write and to read.
        windows: Attention window of each layer in tokens; None for all tokens.
        resident: Batch that keeps the keys and values that the layers read; None to keep
            nothing.
        continues: Whether `resident` already has the pasts, so that they are not gathered.
    """
    shared = _Batch(storage, batch, resident, continues=continues)
    return [SlotCache(shared, layer, window) for layer, window in enumerate(windows)]


class SlotCache:
    """The cache of one layer.

    Attributes:
        offset: Number of cached tokens of each sequence, shape `(sequences,)`.
    """

    def __init__(self, shared: _Batch, layer: int, window: int | None) -> None:
        self.offset = shared.pasts
        self._shared, self._layer, self._window = shared, layer, window
        self._fetched: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Store `(sequences, heads, new, width)`; return `(sequences, heads, all, width)`."""
        self._fetched = self._shared.exchange(self._layer, keys, values)
        self.offset = self._shared.ends
        return self._fetched

    def keys_and_values(self) -> list[mx.array]:
        """Return the last result of `update_and_fetch`, for layers that share it."""
        return self._fetched

    def make_mask(
        self,
        N: int,  # noqa: N803 - the name that models use
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | None:
        """Return the attention mask of the new tokens, `(sequences, 1, new, all)`.

        The result is None if every new token attends to all tokens.
        """
        window = window_size or self._window
        return self._shared.visible(window, as_array=return_array or N > 1)


class _Batch:
    """Slots and masks of a batch as MLX arrays, shared by the caches of all layers."""

    def __init__(
        self,
        storage: KVStorage,
        batch: PassLayout,
        resident: ResidentBatch | None,
        *,
        continues: bool,
    ) -> None:
        self._storage, self._batch = storage, batch
        self._resident, self._continues = resident, continues
        pasts = batch.pasts.astype(np.int32)
        self.pasts = mx.array(pasts)
        self.ends = mx.array(pasts + batch.tokens.shape[1])
        self._first = batch.past - pasts  # columns of padding before each past
        self._row_indices: dict[tuple[int, int], mx.array] = {}
        self._visible: dict[int | None, mx.array] = {}

    def exchange(self, layer: int, keys: mx.array, values: mx.array) -> list[mx.array]:
        heads = self._storage.layers[layer].heads
        self._storage.write(layer, self._rows(self._batch.writes, heads), (keys, values))
        if self._resident is not None and self._continues:
            return self._resident.append(layer, (keys, values))
        states = self._storage.gather(layer, self._rows(self._batch.reads, heads))
        if self._resident is not None:
            self._resident.arrays[layer] = list(states)
        return states

    def _rows(self, slots: Slots, heads: int) -> mx.array:
        """Return the rows of slots in a layer's arrays, `(sequences, heads, tokens)`."""
        key = id(slots), heads
        if key not in self._row_indices:
            first = np.arange(heads)[:, None] * self._storage.slots
            self._row_indices[key] = mx.array((slots[:, None] + first).astype(np.int32))
        return self._row_indices[key]

    def visible(self, window: int | None, *, as_array: bool) -> mx.array | None:
        if not as_array and not self._first.any() and not self._hides(window):
            return None
        if window not in self._visible:
            new = self._batch.tokens.shape[1]
            column = np.arange(self._batch.past + new)
            position = column[self._batch.past :, None]
            visible = column <= position
            if window is not None:
                visible &= column > position - window
            padding = column < self._first[:, None]
            self._visible[window] = mx.array((visible & ~padding[:, None])[:, None])
        return self._visible[window]

    def _hides(self, window: int | None) -> bool:
        return window is not None and self._batch.past + self._batch.tokens.shape[1] > window
