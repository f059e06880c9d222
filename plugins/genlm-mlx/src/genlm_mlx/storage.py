"""The arrays that hold keys and values, one pair for each layer.

They grow as slots are used, up to a budget in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from genlm.plugin import free_memory_bytes

__all__ = ["KVStorage", "LayerShape", "default_budget_bytes"]

_FIRST_SLOTS = 1024

# Share of free memory of the default budget.
_SHARE = 0.25

# Larger than any particle population; bounds a tiny model's budget.
_MOST_SLOTS_BY_DEFAULT = 2**20


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
        most_slots: Upper bound of the number of slots.

    Attributes:
        slots: Current number of slots.
        lost: Whether a write failed half-way; the contents are invalid then.
    """

    def __init__(self, layers: Sequence[LayerShape], most_slots: int) -> None:
        self.layers, self._most = layers, max(1, most_slots)
        self.reset()

    def reset(self) -> None:
        """Free everything and return to the initial size."""
        self.lost = False
        self.slots = min(_FIRST_SLOTS, self._most)
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
        return min(self._most, max(slot + 1, 2 * self.slots))

    def make_room(self, slot: int) -> None:
        """Grow until this slot exists; one array at a time is in memory twice."""
        slots = self.slots_with(slot)
        if slots == self.slots:
            return
        self.lost = True  # until all arrays have grown
        for layer, pair in zip(self.layers, self._arrays, strict=True):
            for place, old in enumerate(pair):
                by_head = old.reshape(layer.heads, self.slots, -1)
                shape = layer.heads, slots - self.slots, by_head.shape[-1]
                grown = mx.concatenate([by_head, mx.zeros(shape, layer.dtype)], axis=1)
                pair[place] = grown.reshape(layer.heads * slots, -1)
                del old, by_head
                mx.eval(pair[place])
        self.slots, self.lost = slots, False

    def write(self, layer: int, rows: mx.array, new: Sequence[mx.array]) -> None:
        """Store new keys and values of a layer.

        Args:
            layer: Index of the layer.
            rows: Rows of its arrays, shape `(sequences, heads, new)`.
            new: Keys and values, `(sequences, heads, new, width)`.
        """
        for array, states in zip(self._arrays[layer], new, strict=True):
            # In place: after evaluation no other array refers to the old one.
            array[rows] = states

    def gathered(self, layer: int, rows: mx.array) -> list[mx.array]:
        """Return keys and values of a layer, `(sequences, heads, all, width)`.

        Args:
            layer: Index of the layer.
            rows: Rows of its arrays, shape `(sequences, heads, all)`.
        """
        return [mx.take(array, rows, axis=0) for array in self._arrays[layer]]

    def settle(self, *results: Any) -> None:
        """Evaluate MLX's pending computations: these results and everything stored."""
        try:
            mx.eval(self._arrays, *results)
        except BaseException:
            self.lost = True
            raise


def default_budget_bytes(bytes_per_token: int) -> int:
    """Return a quarter of the free memory, at most that of 2**20 tokens."""
    return min(int(_free_bytes() * _SHARE), _MOST_SLOTS_BY_DEFAULT * bytes_per_token)


def _free_bytes() -> int:
    device: dict[str, Any] = mx.device_info()
    recommended = device.get("max_recommended_working_set_size")
    if recommended is not None:  # the GPU's part of the memory
        return max(0, int(recommended) - int(mx.get_active_memory()))
    return free_memory_bytes()
