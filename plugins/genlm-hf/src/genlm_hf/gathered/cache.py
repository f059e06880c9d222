"""A cache of transformers' interface that keeps keys and values in slots.

The model hands over the keys and values of new tokens as it would to its own cache. They
go into their slots, and the model gets back the whole past of every sequence, gathered
from the slots. And the recorder that finds out what a model hands over.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from genlm.prefix import SegmentBatch
from genlm_hf.storage import KVStorage, LayerShape

__all__ = ["RecordingCache", "SlotCache"]

# For CPU tensors of more bytes C's allocator has new pages made each time, which takes
# longer than filling them.
_LARGE = 2**25


class SlotCache(Cache):  # type: ignore[misc] # transformers is untyped
    """What a model sees of the storage in one forward pass.

    Args:
        storage: Takes the new keys and values.
        batch: Which slots are written and read.
    """

    def __init__(self, storage: KVStorage, batch: SegmentBatch) -> None:
        slots = _Slots(batch)
        super().__init__(
            layers=[
                _SlotLayer(batch.past, layer, storage, slots) for layer in range(storage.layers)
            ]
        )


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that sees all of its past, padding included."""

    def __init__(self, past: int, index: int, storage: KVStorage, slots: _Slots) -> None:
        super().__init__()
        self._length = past
        self._index, self._storage, self._slots = index, storage, slots

    def get_seq_length(self) -> int:
        """Return how many tokens it holds."""
        return self._length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `(segments, heads, new, width)`; return `(segments, heads, all, width)`."""
        self._length += key_states.shape[2]
        keys, values = self._storage.write(
            self._index,
            self._slots.writes(key_states.device),
            _by_head(key_states),
            _by_head(value_states),
        )
        return self._slots.gathered("keys", keys), self._slots.gathered("values", values)


def _by_head(states: torch.Tensor) -> torch.Tensor:
    """From (segments, heads, tokens, width) to (heads, segments * tokens, width)."""
    return states.transpose(0, 1).flatten(1, 2)


class _Slots:
    """A batch's slots as tensors, made once for each device and number of heads."""

    def __init__(self, batch: SegmentBatch) -> None:
        self._batch = batch
        self._writes: dict[torch.device, torch.Tensor] = {}
        self._reads: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._gathered: dict[Hashable, torch.Tensor] = {}

    def writes(self, device: torch.device) -> torch.Tensor:
        """Return the slots of new tokens, segment by segment."""
        if device not in self._writes:
            self._writes[device] = torch.from_numpy(self._batch.writes.reshape(-1)).to(device)
        return self._writes[device]

    def gathered(self, what: str, states: torch.Tensor) -> torch.Tensor:
        """Return the past of every sequence, `(segments, heads, all, width)`.

        If it is large, the next layer's replaces it in memory.

        Args:
            what: Whether keys or values.
            states: Those of a layer, `(heads, slots, width)`.
        """
        index = self._read(states)
        key = (what, states.device, states.dtype, states.shape)
        found = torch.index_select(
            states.flatten(0, 1), 0, index.reshape(-1), out=self._gathered.get(key)
        )
        if found.nbytes > _LARGE:
            self._gathered[key] = found
        return found.view(*index.shape, states.shape[2])

    def _read(self, states: torch.Tensor) -> torch.Tensor:
        """Return where in `states.flatten(0, 1)` the past lies, (segments, heads, all)."""
        heads, slots, _ = states.shape
        key = (states.device, heads)
        if key not in self._reads:
            reads = torch.from_numpy(self._batch.reads).to(states.device)
            offsets = torch.arange(heads, device=states.device) * slots
            self._reads[key] = reads[:, None] + offsets[:, None]
        return self._reads[key]


class RecordingCache(Cache):  # type: ignore[misc]
    """Notes what each layer hands over, and keeps it for the one pass it is used in.

    Attributes:
        shapes: By the index that the layer gives.
        problems: What a gathered past could not give back.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}
        self.problems: list[str] = []

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the keys and values of a layer and hand them back."""
        keys, values = key_states.shape, value_states.shape
        if len(keys) != 4 or keys[:3] != values[:3]:
            self.problems.append(f"a layer caches tensors of shape {keys} and {values}")
        elif layer_idx in self.shapes:
            self.problems.append("a layer caches twice in a forward pass")
        else:
            self.shapes[layer_idx] = LayerShape(
                keys[1], keys[3], values[3], key_states.dtype, key_states.device
            )
        return key_states, value_states
