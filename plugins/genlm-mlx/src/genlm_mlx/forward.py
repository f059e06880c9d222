"""Forward passes of an mlx-lm model over slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from genlm.prefix import (
    Integers64,
    PassLayout,
    SegmentForward,
    SegmentLimits,
    Segments,
    Slots,
    TokenBatch,
    UnsupportedModelError,
    slots_within,
)
from genlm_mlx.cache import check_attention, slot_caches
from genlm_mlx.resident import ResidentBatches
from genlm_mlx.storage import KVStorage, LayerShape, default_budget_bytes

LOGITS_PER_PASS = 2**26
"""Maximum number of logits that one pass returns; 256 MiB in float32."""

# Number of logits whose computation takes as long as another pass of a few tokens.
_LOGITS_AT_ONCE = 2**24

# Number of tokens of the pass that shows what a model caches.
_PROBE_TOKENS = 3

# Number of slots for the passes that show whether a model shares pasts.
_PROBE_SLOTS = 8

# Maximum errors in log-probability, in float32 and in half precision.
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 0.3


class SlotCacheForward(SegmentForward):
    """Runs a model over the tokens of a batch.

    Args:
        model: An mlx-lm model.
        kv_budget_bytes: Maximum size of keys and values; None for the default.
        limits: Limits of one pass.

    Attributes:
        storage: The arrays of keys and values.
        budget_bytes: Maximum size of keys and values.
        bytes_per_token: Size of the keys and values of one token.
        width: Width of the model's output.
        tolerance: Maximum error in log-probability.

    Raises:
        UnsupportedModelError: The layers cache state other than keys and values of their past.
    """

    def __init__(self, model: Any, kv_budget_bytes: int | None, limits: SegmentLimits) -> None:
        self._model = model
        self._windows, shapes, self.width = _read_layers(model)
        max_rows = max(1, LOGITS_PER_PASS // self.width)
        super().__init__(dataclasses.replace(limits, max_rows=max_rows))
        self.bytes_per_token = sum(shape.bytes_per_token for shape in shapes)
        self.budget_bytes = (
            default_budget_bytes(self.bytes_per_token)
            if kv_budget_bytes is None
            else kv_budget_bytes
        )
        is_exact = all(shape.dtype == mx.float32 for shape in shapes)
        self.tolerance = _TOLERANCE if is_exact else _COARSE_TOLERANCE
        self._resident = ResidentBatches(len(shapes))
        self.storage = KVStorage(shapes, _PROBE_SLOTS)
        self.shares_pasts = self._can_share_pasts()
        self.storage = KVStorage(shapes, slots_within(self.budget_bytes, self.bytes_per_token))

    def clear(self) -> None:
        """Free all cached state, and return its memory to the system."""
        self._resident.clear()
        self.storage.reset()
        mx.clear_cache()

    def _can_share_pasts(self) -> bool:
        """Whether attention reads common slots once with the same result, on a few tokens."""
        slots = np.arange(1, _PROBE_SLOTS)

        def batch_of(*sequences: tuple[int, Slots]) -> TokenBatch:
            paths = [np.concatenate([slots[:past], new]) for past, new in sequences]
            tokens = [(new % self.width).tolist() for _, new in sequences]
            return TokenBatch.of_paths(None, paths, tokens)

        prompt = batch_of((0, slots[:3]))
        passes = (
            batch_of((2, slots[3:4]), (2, slots[4:5])),
            batch_of((2, slots[3:4]), (3, slots[4:5])),
            batch_of((2, slots[3:5]), (3, slots[5:7])),
        )
        try:
            self.run_segments(prompt, prompt.segments, slots[:0], slots[:0])
            for batch in passes:
                segments, rows = batch.segments, np.arange(2)
                places = segments.counts - 1
                separate, shared = (
                    self.run_segments(batch, segments, rows, places, count).log_softmax(dim=-1)
                    for count in (0, 2)
                )
                if not (shared - separate).abs().max() <= self.tolerance:
                    return False
        except (AttributeError, TypeError, ValueError):
            return False
        finally:
            self._resident.clear()
        return True

    def run_segments(
        self,
        batch: TokenBatch,
        segments: Segments,
        rows: Integers64,
        places: Integers64,
        shared: int = 0,
    ) -> torch.Tensor:
        """Run one pass over segments side by side; see `SegmentForward`.

        A long pass is divided before the first token whose logits are requested: MLX does not
        compute the logits of the first part, because nothing reads them.
        """
        firsts, counts = segments
        begin = int(places.min()) if len(places) else 0
        if len(counts) * begin * self.width > _LOGITS_AT_ONCE:
            before, none = Segments(firsts, np.minimum(counts, begin)), rows[:0]
            self.run_segments(batch, before, none, none, shared)
            remaining = np.flatnonzero(counts > begin)
            segments = Segments(firsts[remaining] + begin, counts[remaining] - begin)
            rows, places = np.searchsorted(remaining, rows), places - begin
        return super().run_segments(batch, segments, rows, places, shared)

    def run_pass(
        self, layout: PassLayout, rows: Integers64, places: Integers64
    ) -> torch.Tensor:
        """Run the model, with pasts that are resident if possible; see `SegmentForward`."""
        # This comes first: a reallocated slot is no longer the end of its earlier sequence.
        self._resident.forget_slots(layout.writes)
        slot = int(layout.writes.max())
        room = self.budget_bytes // self.bytes_per_token - self.storage.slots_with(slot)
        # Scored sequences, with many requested positions, are rarely continued.
        is_scored = len(rows) > len(layout)
        resident = None if is_scored else self._resident.take(layout, room)
        tokens = 0 if resident is None else resident.tokens_after(layout)
        self._resident.fit((room - tokens) * self.bytes_per_token)
        self.storage.make_room(slot)
        if resident is not None:
            layout.past = max(layout.past, resident.columns)
        caches = slot_caches(self.storage, layout, self._windows, resident=resident)
        logits = self._model(mx.array(layout.tokens.astype(np.int32)), cache=caches)
        check_attention(caches)
        requested = [select_logits(logits, rows, places)] if len(rows) else []
        del logits  # before the requested ones are computed
        self.storage.settle(*requested, *([] if resident is None else [resident.arrays]))
        if resident is not None:
            resident.columns = layout.past + layout.tokens.shape[1]
            if layout.is_even:
                self._resident.put(resident)
        return as_tensor(requested[0]) if requested else torch.empty(0, self.width)


def select_logits(logits: mx.array, rows: Integers64, places: Integers64) -> mx.array:
    """Return the logits of tokens; a view if they are those of a new token per sequence."""
    if logits.shape[1] == 1 and np.array_equal(rows, np.arange(len(logits))):
        return logits[:, 0]
    return logits[mx.array(rows), mx.array(places)]


def as_tensor(array: mx.array) -> torch.Tensor:
    """Return an array as a float32 tensor on the CPU, with the memory of a float32 array."""
    array = array.astype(mx.float32)
    mx.eval(array)
    return torch.from_numpy(np.asarray(array))


def _read_layers(model: Any) -> tuple[list[int | None], list[LayerShape], int]:
    """Run a model over a few tokens with mlx-lm's caches, and return what it caches.

    Returns:
        The window of each layer's cache in tokens, None for all tokens; the shape of a token's
        keys and values in each layer; and the width of the output.

    Raises:
        UnsupportedModelError: A layer caches state other than keys and values of its past.
    """
    caches = make_prompt_cache(model)
    windows: list[int | None] = []
    for cache in caches:
        kind = type(cache)
        if kind is not KVCache and not (kind is RotatingKVCache and cache.keep == 0):
            raise UnsupportedModelError(f"a layer has a {kind.__name__}")
        windows.append(None if kind is KVCache else int(cache.max_size))
    logits = model(mx.zeros((1, _PROBE_TOKENS), mx.int32), cache=caches)
    mx.eval(logits)
    used = [cache for cache in caches if cache.offset == _PROBE_TOKENS]
    if len(used) != len(caches):
        raise UnsupportedModelError(
            f"{len(used)} of its {len(caches)} caches receive keys and values once in a pass"
        )
    if any(cache.keys.dtype != cache.values.dtype for cache in caches):
        raise UnsupportedModelError("a layer caches keys and values of different dtypes")
    shapes = [
        LayerShape(c.keys.shape[1], c.keys.shape[3], c.values.shape[3], c.keys.dtype)
        for c in caches
    ]
    return windows, shapes, int(logits.shape[-1])
