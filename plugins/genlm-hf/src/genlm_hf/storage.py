"""The tensors that hold keys and values, one pair for each layer.

Their size is fixed by a budget in bytes. On the CPU the operating system allocates the
memory as slots are first written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from genlm.plugin import free_memory_bytes
from genlm.prefix import slots_within

# Share of free memory of the default budget.
_SHARE_OF_CPU = 0.25
_SHARE_OF_ACCELERATOR = 0.5

# More than any particle population uses; bounds the pool of a tiny model.
_MAX_DEFAULT_SLOTS = 2**20


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of the keys and values of one token in one layer.

    Attributes:
        heads: Number of key-value heads.
        key_width: Width of a key.
        value_width: Width of a value.
        dtype: Dtype of both.
        device: Device of the layer.
    """

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Memory of one slot."""
        return self.heads * (self.key_width + self.value_width) * self.dtype.itemsize


class KVStorage:
    """Keys, shape `(heads, slots, key width)`, and values of every layer.

    Slot 0 is the scratch slot. Slots are uninitialised before they are written.

    Args:
        layers: Shapes of the layers in the order in which the model runs them.
        budget_bytes: Upper bound of the memory of all tensors together.

    Attributes:
        budget_bytes: The upper bound passed in.
        bytes_per_token: Memory of one slot in all layers.
    """

    def __init__(self, layers: Sequence[LayerShape], budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.bytes_per_token = sum(layer.bytes_per_token for layer in layers)
        slots = slots_within(budget_bytes, self.bytes_per_token)

        def allocate(layer: LayerShape, width: int) -> torch.Tensor:
            return torch.empty(
                layer.heads, slots, width, dtype=layer.dtype, device=layer.device
            )

        self._tensors = [
            (allocate(layer, layer.key_width), allocate(layer, layer.value_width))
            for layer in layers
        ]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._tensors)

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values `(heads, tokens, width)` of a layer; return its tensors."""
        all_keys, all_values = self._tensors[layer]
        all_keys.index_copy_(1, slots, keys)
        all_values.index_copy_(1, slots, values)
        return all_keys, all_values


def default_budget_bytes(layers: Sequence[LayerShape]) -> int:
    """Return a quarter of the free memory, half of that of CUDA devices.

    With several devices, the device with the least room limits the number of tokens. The
    maximum is 2**20 tokens.
    """
    per_device: dict[torch.device, int] = {}
    for layer in layers:
        total = per_device.get(layer.device, 0)
        per_device[layer.device] = total + layer.bytes_per_token
    tokens = min(_available_bytes(device) // size for device, size in per_device.items())
    return min(tokens, _MAX_DEFAULT_SLOTS) * sum(per_device.values())


def _available_bytes(device: torch.device) -> int:
    share = _SHARE_OF_ACCELERATOR if device.type == "cuda" else _SHARE_OF_CPU
    return int(free_memory_bytes(device) * share)
