"""The arrays that hold keys and values, one pair for each layer.

They grow as slots are used, up to a budget in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from genlm.plugin import free_memory_bytes

_INITIAL_SLOTS = 1024

# Share of free memory of the default budget.
_SHARE = 0.25

# More than any particle population uses; bounds the budget of a tiny model.
_MAX_DEFAULT_SLOTS = 2**20


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of the keys and values of one token in one layer.

    Attributes:
        heads: Number of key-value heads.
        key_width: Width of a key.
        value_width: Width of a value.
        dtype: Dtype of both.
    """

    heads: int
    key_width: int
    value_width: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        """Memory of one slot."""
        return int(self.heads * (self.key_width + self.value_width) * self.dtype.size)


class KVStorage:
    """Keys, shape `(heads * slots, key width)`, and values of every layer.

    Slot 0 is the scratch slot. Rows of one head are consecutive, so that the past of a
    sequence is gathered by head, as attention reads it.

    Args:
        layers: Shapes of the layers in the order of the model's caches.
        max_slots: Upper bound of the number of slots.

    Attributes:
        slots: Current number of slots.
        is_corrupt: Whether a write failed half-way, so that the contents are invalid.
    """

    def __init__(self, layers: Sequence[LayerShape], max_slots: int) -> None:
        self.layers, self._max_slots = layers, max(1, max_slots)
        self.reset()

    def reset(self) -> None:
        """Free all memory and return to the initial size."""
        self.is_corrupt = False
        self.slots = min(_INITIAL_SLOTS, self._max_slots)
        self._arrays = [
            [
                mx.zeros((layer.heads * self.slots, width), layer.dtype)
                for width in (layer.key_width, layer.value_width)
            ]
            for layer in self.layers
        ]
        mx.eval(self._arrays)

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(int(array.nbytes) for pair in self._arrays for array in pair)

    def slots_with(self, slot: int) -> int:
        """Return the number of slots after growing to this slot."""
        if slot < self.slots:
            return self.slots
        return min(self._max_slots, max(slot + 1, 2 * self.slots))

    def make_room(self, slot: int) -> None:
        """Grow until this slot exists; one array at a time is in memory twice."""
        slots = self.slots_with(slot)
        if slots == self.slots:
            return
        self.is_corrupt = True  # until all arrays have grown
        for layer, pair in zip(self.layers, self._arrays, strict=True):
            for index, old in enumerate(pair):
                by_head = old.reshape(layer.heads, self.slots, -1)
                shape = layer.heads, slots - self.slots, by_head.shape[-1]
                grown = mx.concatenate([by_head, mx.zeros(shape, layer.dtype)], axis=1)
                pair[index] = grown.reshape(layer.heads * slots, -1)
                del old, by_head
                mx.eval(pair[index])
        self.slots, self.is_corrupt = slots, False

    def write(self, layer: int, rows: mx.array, new: Sequence[mx.array]) -> None:
        """Store new keys and values of a layer.

        Args:
            layer: Index of the layer.
            rows: Rows of the layer's arrays, shape `(sequences, heads, new)`.
            new: Keys and values, `(sequences, heads, new, width)`.
        """
        for array, states in zip(self._arrays[layer], new, strict=True):
            # In place, because after evaluation no other array refers to the old one.
            array[rows] = states

    def gather(self, layer: int, rows: mx.array) -> list[mx.array]:
        """Return keys and values of a layer, `(sequences, heads, all, width)`.

        Args:
            layer: Index of the layer.
            rows: Rows of the layer's arrays, shape `(sequences, heads, all)`.
        """
        return [mx.take(array, rows, axis=0) for array in self._arrays[layer]]

    def settle(self, *results: Any) -> None:
        """Evaluate MLX's pending computations: these results and the stored arrays."""
        try:
            mx.eval(self._arrays, *results)
        except BaseException:
            self.is_corrupt = True
            raise


def default_budget_bytes(bytes_per_token: int) -> int:
    """Return a quarter of the free memory, at most that of 2**20 tokens."""
    return min(int(_free_bytes() * _SHARE), _MAX_DEFAULT_SLOTS * bytes_per_token)


def _free_bytes() -> int:
    device: dict[str, Any] = mx.device_info()
    recommended = device.get("max_recommended_working_set_size")
    if recommended is not None:  # the GPU's part of the memory
        return max(0, int(recommended) - int(mx.get_active_memory()))
    return free_memory_bytes()
