"""Execution path `slot_cache`: every token once, through the model's own attention and cache.

For decoder-only models whose layers keep plain keys and values, but attend in custom
code. The layers of the cache that the model gets write the keys and values of new tokens into
their slots and return the whole past of each sequence, gathered from the slots. transformers'
cache would copy the pasts in addition.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from genlm.plugin import describe_error
from genlm.prefix import (
    Integers64,
    PassLayout,
    SegmentForward,
    SegmentLimits,
    TokenBatch,
    UnsupportedModelError,
)
from genlm_hf.forward import accepted_arguments, compute_logits
from genlm_hf.served_model import ServedModel
from genlm_hf.storage import KVStorage, LayerShape

# Names of the cache among the arguments of `forward`: since transformers 5.24, and before.
_CACHE_NAMES = ("cache", "past_key_values")

# CPU tensors of more bytes get new pages from the system at each allocation, which takes
# longer than filling them.
_LARGE_BYTES = 2**25


class _SlotLayer(DynamicLayer):  # type: ignore[misc] # transformers is untyped
    """The cache of one layer for one forward pass; its length includes padding."""

    def __init__(self, past: int, index: int, storage: KVStorage, slots: _Slots) -> None:
        super().__init__()
        self._length = past
        self._index, self._storage, self._slots = index, storage, slots

    def get_seq_length(self) -> int:
        """Return the number of tokens in the cache."""
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
    """Reshape (segments, heads, tokens, width) to (heads, segments * tokens, width)."""
    return states.transpose(0, 1).flatten(1, 2)


class _Slots:
    """Slots of a batch as tensors, created once per device and number of heads."""

    def __init__(self, batch: PassLayout) -> None:
        self._batch = batch
        self._writes: dict[torch.device, torch.Tensor] = {}
        self._reads: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._gathered: dict[Hashable, torch.Tensor] = {}

    def writes(self, device: torch.device) -> torch.Tensor:
        """Return the slots of new tokens, segment by segment."""
        if device not in self._writes:
            self._writes[device] = torch.from_numpy(self._batch.writes.reshape(-1)).to(device)
        return self._writes[device]

    def gathered(self, kind: str, states: torch.Tensor) -> torch.Tensor:
        """Return the past of every sequence, `(segments, heads, all, width)`.

        A large result is overwritten by that of the next layer.

        Args:
            kind: Whether `states` are keys or values.
            states: Keys or values of a layer, `(heads, slots, width)`.
        """
        index = self._past_index(states)
        key = (kind, states.device, states.dtype, states.shape)
        past = torch.index_select(
            states.flatten(0, 1), 0, index.reshape(-1), out=self._gathered.get(key)
        )
        if past.nbytes > _LARGE_BYTES:
            self._gathered[key] = past
        return past.view(*index.shape, states.shape[2])

    def _past_index(self, states: torch.Tensor) -> torch.Tensor:
        """Return the past's indices in `states.flatten(0, 1)`, (segments, heads, all)."""
        heads, slots, _ = states.shape
        key = (states.device, heads)
        if key not in self._reads:
            reads = torch.from_numpy(self._batch.reads).to(states.device)
            offsets = torch.arange(heads, device=states.device) * slots
            self._reads[key] = reads[:, None] + offsets[:, None]
        return self._reads[key]


class SlotCacheForward(SegmentForward):
    """Runs a model through its own attention, in padded batches."""

    def __init__(self, served: ServedModel, storage: KVStorage) -> None:
        super().__init__(SegmentLimits(served.max_tokens, served.max_context))
        self.storage, self._served = storage, served

    def run_pass(
        self, layout: PassLayout, rows: Integers64, places: Integers64
    ) -> torch.Tensor:
        """Run the model over sequences side by side; see `SegmentForward`."""
        model, device = self._served.model, self._served.device
        inputs = _inputs(model, layout, device)
        slots = _Slots(layout)
        inputs[_cache_name(model)] = Cache(
            layers=[
                _SlotLayer(layout.past, layer, self.storage, slots)
                for layer in range(self.storage.layers)
            ]
        )
        positions = torch.from_numpy(np.stack([rows, places])).to(device)
        return compute_logits(model, inputs, *positions).to(device)


def read_cache(served: ServedModel, length: int) -> list[LayerShape]:
    """Run a model once and return the shapes of each layer's keys and values.

    Args:
        served: The model.
        length: Number of tokens to run.

    Raises:
        UnsupportedModelError: The model does not use a cache of keys and values.
    """
    model, device = served.model, served.device
    needed = (_cache_name(model), "attention_mask", "use_cache")
    missing = [name for name in needed if not accepted_arguments(model, {name: None})]
    if missing:
        raise UnsupportedModelError(f"its forward takes no {missing[0]}")
    cache = DynamicCache()
    slots = np.arange(1, length + 1, dtype=np.int64)
    batch = TokenBatch.of_paths(None, [slots], [(0,) * length])
    layout = PassLayout(batch, batch.segments)
    try:
        with torch.inference_mode():
            model(**_inputs(model, layout, device), **{needed[0]: cache})
    except Exception as error:
        raise UnsupportedModelError(
            f"with a `DynamicCache` its forward pass raises {describe_error(error)}"
        ) from error
    used = [index for index, layer in enumerate(cache.layers) if layer.is_initialized]
    if len(used) != len(cache.layers):
        raise UnsupportedModelError(f"only its layers {used} use the cache")
    shapes = []
    for layer in cache.layers:
        keys, values = layer.keys.shape, layer.values.shape
        if len(keys) != 4 or keys[:3] != values[:3] or keys[2] != length:
            raise UnsupportedModelError(
                f"a layer caches tensors of shape {keys} and {values} for {length} tokens"
            )
        tensor = layer.keys
        shapes.append(LayerShape(keys[1], keys[3], values[3], tensor.dtype, tensor.device))
    return shapes


def _cache_name(model: Any) -> str:
    """Return the name of the cache among the arguments of a model's `forward`."""
    return next(iter(accepted_arguments(model, dict.fromkeys(_CACHE_NAMES))), _CACHE_NAMES[-1])


def _inputs(model: Any, layout: PassLayout, device: torch.device) -> dict[str, Any]:
    inputs = {
        "input_ids": torch.from_numpy(layout.tokens).to(device),
        "attention_mask": torch.from_numpy(layout.is_token).to(device).long(),
        "use_cache": True,
        "position_ids": torch.from_numpy(layout.positions).to(device),
        "return_dict": True,
    }
    return accepted_arguments(model, inputs)
