"""Forward passes of an mlx-lm model: over slots, or through mlx-lm's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from genlm.prefix import (
    ForwardResult,
    Integers64,
    PassLayout,
    Segment,
    SegmentForward,
    SegmentLimits,
    TableBatch,
    UnsupportedModelError,
    logits_of_keys,
    slots_within,
)
from genlm_mlx.cache import RecordingCache, slot_caches
from genlm_mlx.resident import ResidentBatch, ResidentBatches
from genlm_mlx.storage import KVStorage, LayerShape, default_budget_bytes

__all__ = [
    "LOGITS_PER_PASS",
    "SlotCacheForward",
    "as_tensor",
]

LOGITS_PER_PASS = 2**26
"""Maximum number of logits that one pass returns; 256 MiB in float32."""

# Number of logits whose computation takes as long as another pass of a few tokens.
_LOGITS_AT_ONCE = 2**24

# Maximum number of slots that a pass over a block table gathers: 128 MiB a layer at 2 KiB a
# slot.
_GATHERED_AT_ONCE = 2**16


class SlotCacheForward(SegmentForward):
    """Runs a model over the uncached tokens of a tree, or over tokens that continue a table.

    Args:
        model: An mlx-lm model.
        kv_budget_bytes: Maximum size of keys and values; None for the default.
        limits: Limits of one pass.

    Attributes:
        storage: Keeps keys and values.
        budget_bytes: Maximum size of keys and values.
        bytes_per_token: Size of those of one token.
        width: Width of the model's output.

    Raises:
        UnsupportedModelError: The layers cache state other than keys and values of their past.
    """

    def __init__(self, model: Any, kv_budget_bytes: int | None, limits: SegmentLimits) -> None:
        super().__init__(limits)
        self._model, self._windows = model, _read_windows(model)
        shapes, self.width = _read_shapes(model, len(self._windows))
        self.bytes_per_token = sum(shape.bytes_per_token for shape in shapes)
        self.budget_bytes = (
            default_budget_bytes(self.bytes_per_token)
            if kv_budget_bytes is None
            else kv_budget_bytes
        )
        self.storage = KVStorage(shapes, slots_within(self.budget_bytes, self.bytes_per_token))
        self._resident = ResidentBatches()

    def clear(self) -> None:
        """Free everything computed."""
        self._resident.clear()
        self.storage.reset()

    def run_segments(
        self, segments: Sequence[Segment], rows: Integers64, places: Integers64
    ) -> torch.Tensor:
        """Run one pass over segments side by side; see `SegmentForward`.

        A long pass is divided before the first token whose logits are requested: MLX does not
        compute the logits of the first part, because nothing reads them.
        """
        first = int(places.min()) if len(places) else 0
        if len(segments) * first * self.width > _LOGITS_AT_ONCE:
            self.run_segments([_part(s, slice(first)) for s in segments], rows[:0], rows[:0])
            kept = [i for i, segment in enumerate(segments) if len(segment.tokens) > first]
            segments = [_part(segments[i], slice(first, None)) for i in kept]
            rows, places = np.searchsorted(kept, rows), places - first
        return self._run_pass(
            PassLayout.of_segments(segments),
            rows,
            places,
            # Scored sequences, with many requested positions, are rarely continued.
            stays_resident=len(rows) <= len(segments),
        )

    def run_table(
        self,
        batch: TableBatch,
        adapter: str | None,  # noqa: ARG002 - it is active in the model
    ) -> ForwardResult:
        """Run tokens that continue rows of a table, each as a sequence with one new token.

        Pasts that the last passes left resident are not gathered. A pass that gathers has few
        enough tokens; later ones see the keys and values that earlier ones stored.
        """
        count, width = len(batch.tokens), int(batch.positions.max()) + 1
        most = max(1, min(_GATHERED_AT_ONCE // width, LOGITS_PER_PASS // self.width))
        is_wanted = np.zeros(count, bool)
        is_wanted[batch.results] = True
        known, parts = [], []
        for first in range(0, count, most):
            part = slice(first, min(first + most, count))
            rows = np.flatnonzero(is_wanted[part])
            layout = PassLayout.of_table(batch, part)
            known.append(first + rows)
            parts.append(self._run_pass(layout, rows, np.zeros_like(rows), stays_resident=True))
        logits = logits_of_keys(batch.results, known, parts)
        return ForwardResult(logits, count, forwards=len(parts))

    def _run_pass(
        self, layout: PassLayout, rows: Integers64, places: Integers64, *, stays_resident: bool
    ) -> torch.Tensor:
        """Run the model over sequences side by side, with pasts that are resident if possible.

        Args:
            layout: The sequences.
            rows: Sequence of each requested position.
            places: New token of each requested position.
            stays_resident: Whether the sequences may be kept for the next pass.
        """
        # First: a reallocated slot is no longer the end of its earlier sequence.
        self._resident.forget_slots(layout.writes)
        slot = int(layout.writes.max())
        room = self.budget_bytes // self.bytes_per_token - self.storage.slots_with(slot)
        resident, continues, tokens = None, False, 0
        if stays_resident:
            resident, continues, tokens = self._chosen(layout, room)
        self._resident.fit((room - tokens) * self.bytes_per_token)
        self.storage.make_room(slot)
        if resident is not None:
            layout.past = max(layout.past, resident.columns)
        caches = slot_caches(
            self.storage, layout, self._windows, resident=resident, continues=continues
        )
        logits = self._model(mx.array(layout.tokens.astype(np.int32)), cache=caches)
        wanted = [logits[mx.array(rows), mx.array(places)]] if len(rows) else []
        self.storage.settle(*wanted, *([] if resident is None else [resident.arrays]))
        if resident is not None:
            resident.columns = layout.past + layout.tokens.shape[1]
            if layout.is_even:
                self._resident.put(resident)
        return as_tensor(wanted[0]) if wanted else torch.empty(0, self.width)

    def _chosen(self, layout: PassLayout, room: int) -> tuple[ResidentBatch | None, bool, int]:
        """Return the resident batch that keeps what the pass reads, if any.

        Args:
            layout: The pass.
            room: Number of tokens that fit beside the storage.

        Returns:
            The batch; whether it has the pasts already; its future number of tokens.
        """
        resident, new = self._resident.take(layout, room), layout.tokens.shape[1]
        if resident is not None:
            return resident, True, resident.tokens_after(len(layout), new)
        tokens = len(layout) * (layout.past + new)
        if layout.is_even and tokens <= room:
            return ResidentBatch(layout, len(self._windows)), False, tokens
        return None, False, 0


def _part(segment: Segment, part: slice) -> Segment:
    """Return some tokens of a segment, whose past includes the tokens before them."""
    end = len(segment.tokens[: part.stop])
    slots = segment.slots[: segment.past + end]
    return Segment(segment.tokens[part], slots, segment.writes[part])


def as_tensor(array: mx.array) -> torch.Tensor:
    """Return an array as a float32 tensor on the CPU."""
    array = array.astype(mx.float32)
    mx.eval(array)
    return torch.from_numpy(np.array(array))


def _read_windows(model: Any) -> list[int | None]:
    """Return the window of each layer's cache in tokens, None for all tokens.

    Raises:
        UnsupportedModelError: A layer caches state other than keys and values of its past.
    """
    windows: list[int | None] = []
    for cache in make_prompt_cache(model):
        kind = type(cache)
        if kind is KVCache:
            windows.append(None)
        elif kind is RotatingKVCache and cache.keep == 0:
            windows.append(int(cache.max_size))
        else:
            raise UnsupportedModelError(f"a layer has a {kind.__name__}")
    return windows


def _read_shapes(model: Any, layers: int) -> tuple[list[LayerShape], int]:
    """Return the cached shapes of a token in each layer, and the width of the output.

    The model is run over three tokens.

    Raises:
        UnsupportedModelError: The model uses its caches differently from attention.
    """
    caches = [RecordingCache() for _ in range(layers)]
    try:
        logits = model(mx.zeros((1, 3), mx.int32), cache=caches)
        mx.eval(logits)
    except Exception as error:
        raise UnsupportedModelError(
            f"with another cache its forward pass raises {type(error).__name__}: {error}"
        ) from error
    problems = [cache.problem for cache in caches if cache.problem is not None]
    if problems:
        raise UnsupportedModelError(problems[0])
    shapes = [cache.shape for cache in caches if cache.shape is not None]
    if len(shapes) != layers:
        raise UnsupportedModelError(
            f"{len(shapes)} of its {layers} caches take keys and values"
        )
    return shapes, int(logits.shape[-1])
