"""Caches with mlx-lm's interface that keep keys and values in slots.

The model passes the keys and values of new tokens to `SlotCache` and receives those of whole
sequences, gathered from the slots or resident from the last pass. If all sequences of a pass
begin with the same slots, it receives the others, and its attention reads the shared ones once
(`shared_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from genlm.prefix import PassLayout, Slots
from genlm_mlx.resident import ResidentBatch
from genlm_mlx.shared_attention import SharedPast
from genlm_mlx.storage import KVStorage


def slot_caches(
    storage: KVStorage,
    batch: PassLayout,
    windows: Sequence[int | None],
    *,
    resident: ResidentBatch | None = None,
) -> list[SlotCache]:
    """Return the caches that a model gets for one forward pass.

    Args:
        storage: Stores the new keys and values.
        batch: Slots to write and to read.
        windows: Attention window of each layer in tokens; None for all tokens.
        resident: Batch that keeps the keys and values that the layers read; pasts that it
            has are not gathered. None to keep nothing.
    """
    pass_state = _Batch(storage, batch, resident)
    kind = SharedSlotCache if batch.shared else SlotCache
    return [kind(pass_state, layer, window) for layer, window in enumerate(windows)]


def check_attention(caches: Sequence[SlotCache]) -> None:
    """Check that each layer's attention has read the shared keys and values, if there are any.

    Raises:
        ValueError: A layer has not.
    """
    for layer, cache in enumerate(caches):
        if isinstance(cache, SharedSlotCache) and not cache.group_size.is_used:
            raise ValueError(
                f"the attention of layer {layer} is not that of mlx_lm.models.base"
            )


class SlotCache:
    """The cache of one layer.

    Attributes:
        offset: Number of cached tokens of each sequence, shape `(sequences,)`.
    """

    def __init__(self, batch: _Batch, layer: int, window: int | None) -> None:
        self.offset = batch.pasts
        self._batch, self._layer, self._window = batch, layer, window
        self._fetched: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Store `(sequences, heads, new, width)`; return `(sequences, heads, all, width)`."""
        self._fetched = self._batch.exchange(self._layer, keys, values)
        self.offset = self._batch.ends
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
        return self._batch.visible(window, as_array=return_array or N > 1)


class SharedSlotCache(SlotCache):
    """The cache of one layer in a pass whose sequences begin with the same slots.

    `update_and_fetch` returns the keys and values after the shared ones.

    Attributes:
        bits: Makes mlx-lm call the function that `shared_attention` replaces.
        group_size: The shared keys and values, which mlx-lm passes to that function.
    """

    bits = 0
    group_size: SharedPast

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Store `(sequences, heads, new, width)`; return `(sequences, heads, own, width)`."""
        own = super().update_and_fetch(keys, values)
        self.group_size = SharedPast(self._batch.gather_shared(self._layer), own)
        return own


class _Batch:
    """Slots and masks of a batch as MLX arrays, shared by the caches of all layers."""

    def __init__(
        self, storage: KVStorage, batch: PassLayout, resident: ResidentBatch | None
    ) -> None:
        self._storage, self._batch, self._resident = storage, batch, resident
        pasts = batch.pasts.astype(np.int32)
        self.pasts = mx.array(pasts)
        self.ends = mx.array(pasts + batch.tokens.shape[1])
        self._row_indices: dict[tuple[int, int], mx.array] = {}
        self._visible: dict[int | None, mx.array] = {}

    def exchange(self, layer: int, keys: mx.array, values: mx.array) -> list[mx.array]:
        heads = self._storage.layers[layer].heads
        self._storage.write(layer, self._rows(self._batch.writes, heads), (keys, values))
        if self._resident is not None and self._resident.arrays[layer]:
            return self._resident.append(layer, (keys, values))
        states = self._storage.gather(layer, self._rows(self._batch.reads, heads))
        if self._resident is not None:
            self._resident.arrays[layer] = list(states)
        return states

    def gather_shared(self, layer: int) -> list[mx.array]:
        """Return the shared keys and values of a layer, `(1, heads, shared, width)`."""
        heads = self._storage.layers[layer].heads
        return self._storage.gather(layer, self._rows(self._batch.shared_slots, heads))

    def _rows(self, slots: Slots, heads: int) -> mx.array:
        """Return the rows of slots in a layer's arrays, `(sequences, heads, tokens)`."""
        key = id(slots), heads
        if key not in self._row_indices:
            first = np.arange(heads)[:, None] * self._storage.slots
            self._row_indices[key] = mx.array((slots[:, None] + first).astype(np.int32))
        return self._row_indices[key]

    def visible(self, window: int | None, *, as_array: bool) -> mx.array | None:
        """Return which tokens the new ones attend to, `(sequences, 1, new, shared + all)`."""
        batch = self._batch
        if not as_array and not batch.padding.any() and not self._hides(window):
            return None
        if window not in self._visible:
            shared = np.tile(np.arange(batch.shared), (len(batch), 1))
            place = np.hstack([shared, batch.places])[:, None]
            position = batch.positions[..., None]
            visible = place <= position
            if window is not None:
                visible &= place > position - window
            visible[..., batch.shared :] &= batch.places[:, None] >= batch.shared
            self._visible[window] = mx.array(visible[:, None])
        return self._visible[window]

    def _hides(self, window: int | None) -> bool:
        longest = int(self._batch.pasts.max()) + self._batch.tokens.shape[1]
        return window is not None and longest > window
