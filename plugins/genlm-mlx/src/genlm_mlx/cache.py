"""Caches of mlx-lm's interface that keep keys and values in slots.

The model hands over the keys and values of new tokens as it would to its own cache, and
gets back those of whole sequences, gathered from the slots. And the recorder that finds out
what a model hands over.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from genlm.prefix import SegmentBatch
from genlm_mlx.storage import KVStorage, LayerShape

__all__ = ["RecordingCache", "SlotCache", "slot_caches"]


def slot_caches(
    storage: KVStorage, batch: SegmentBatch, windows: list[int | None]
) -> list[SlotCache]:
    """Return what a model sees of the storage in one forward pass.

    Args:
        storage: Takes the new keys and values.
        batch: Which slots are written and read.
        windows: Of each layer, how many tokens a token sees; None for all.
    """
    shared = _Batch(storage, batch)
    return [SlotCache(shared, layer, window) for layer, window in enumerate(windows)]


class SlotCache:
    """One layer's.

    Attributes:
        offset: How many tokens each sequence has already, shape `(sequences,)`.
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
        """Return what was fetched last, for layers that share it."""
        return self._fetched

    def make_mask(
        self,
        N: int,  # noqa: N803 - as models call it
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | None:
        """Return which of all tokens the new ones see, `(sequences, 1, new, all)`.

        None if they see all.
        """
        window = window_size or self._window
        return self._shared.visible(window, as_array=return_array or N > 1)


class _Batch:
    """A batch's slots as arrays, made once for all layers alike."""

    def __init__(self, storage: KVStorage, batch: SegmentBatch) -> None:
        self._storage, self._batch = storage, batch
        pasts = batch.positions[:, 0].astype(np.int32)
        self.pasts = mx.array(pasts)
        self.ends = mx.array(pasts + batch.tokens.shape[1])
        self._first = batch.past - pasts  # columns of padding before each past
        self._rows: dict[int, tuple[mx.array, mx.array]] = {}
        self._visible: dict[int | None, mx.array] = {}

    def exchange(self, layer: int, keys: mx.array, values: mx.array) -> list[mx.array]:
        heads = self._storage.layers[layer].heads
        if heads not in self._rows:
            first = np.arange(heads)[:, None] * self._storage.slots
            writes, reads = (
                mx.array((slots[:, None] + first).astype(np.int32))
                for slots in (self._batch.writes, self._batch.reads)
            )
            self._rows[heads] = writes, reads
        writes, reads = self._rows[heads]
        return self._storage.exchange(layer, writes=writes, reads=reads, new=(keys, values))

    def visible(self, window: int | None, *, as_array: bool) -> mx.array | None:
        if not as_array and not self._first.any() and not self._hides(window):
            return None
        if window not in self._visible:
            new = self._batch.tokens.shape[1]
            column = np.arange(self._batch.past + new)
            own = column[self._batch.past :, None]
            visible = column <= own
            if window is not None:
                visible &= column > own - window
            padding = column < self._first[:, None]
            self._visible[window] = mx.array((visible & ~padding[:, None])[:, None])
        return self._visible[window]

    def _hides(self, window: int | None) -> bool:
        return window is not None and self._batch.reads.shape[1] > window


class RecordingCache:
    """Notes what a layer hands over, and hands it back; for one pass over one sequence.

    Attributes:
        shape: None until the layer has run.
        problem: What a gathered past could not give back, if anything.
        offset: As models read it.
    """

    offset = 0

    def __init__(self) -> None:
        self.shape: LayerShape | None = None
        self.problem: str | None = None
        self._handed: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Note the keys and values of the layer and hand them back."""
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            self.problem = f"a layer caches {keys.dtype} {keys.shape}, {values.shape}"
        elif self.shape is not None:
            self.problem = "a layer caches twice in a forward pass"
        else:
            self.shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        self._handed = keys, values
        return keys, values

    def keys_and_values(self) -> Any:
        """Return what was handed over."""
        return self._handed

    def make_mask(
        self,
        N: int,  # noqa: N803 - as models call it
        return_array: bool = False,
        window_size: int | None = None,  # noqa: ARG002
    ) -> mx.array | str | None:
        """Return a causal mask; what is seen does not matter here."""
        if N == 1:
            return None
        return mx.tril(mx.ones((N, N), mx.bool_)) if return_array else "causal"
