"""Forward passes of an mlx-lm model: over slots, or through mlx-lm's cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from genlm.prefix import (
    CollectedLogits,
    ForwardResult,
    Receive,
    Segment,
    SegmentBatch,
    SegmentForward,
    SegmentLimits,
    Slots,
    TableBatch,
    UnsupportedModelError,
)
from genlm_mlx.cache import RecordingCache, slot_caches
from genlm_mlx.pieces import OutputPieces, as_tensor
from genlm_mlx.resident import Extent, ResidentBatch, ResidentBatches
from genlm_mlx.storage import KVStorage, LayerShape
from genlm_mlx.tables import TablePass, extent_of

__all__ = [
    "LOGITS_PER_PASS",
    "SlotCacheForward",
    "own_logits",
    "own_pieces",
    "read_shapes",
    "read_windows",
]

LOGITS_PER_PASS = 2**26
"""Maximum number of logits that one pass returns; 256 MiB in float32."""

# Number of logits of a pass from which only the requested ones are computed, in pieces; 32 MiB
# in float16.
_LOGITS_AT_ONCE = 2**24

# Maximum number of slots that a pass over a block table gathers: 128 MiB a layer at 2 KiB a
# slot.
_GATHERED_AT_ONCE = 2**16


class SlotCacheForward(SegmentForward):
    """Runs a model over the uncached tokens of a tree, or over tokens that continue a table.

    Args:
        model: An mlx-lm model.
        windows: Number of tokens that a token sees in each layer; None for all.
        storage: Keeps keys and values.
        limits: Limits of one pass.
        width: Width of the model's output.
        budget_bytes: Maximum size of keys and values.

    Attributes:
        storage: The argument.
    """

    def __init__(
        self,
        model: Any,
        windows: Sequence[int | None],
        storage: KVStorage,
        *,
        limits: SegmentLimits,
        width: int,
        budget_bytes: int,
    ) -> None:
        super().__init__(limits)
        self._model, self._windows, self.storage = model, list(windows), storage
        self._width, self._budget = width, budget_bytes
        self._token_bytes = sum(layer.bytes_per_token for layer in storage.layers)
        self._resident = ResidentBatches()
        self._pieces = OutputPieces(model)

    def clear(self) -> None:
        """Free everything computed."""
        self._resident.clear()
        self.storage.reset()

    def scores_in_pieces(self) -> bool:
        """Whether `score` never has the logits of a whole pass in memory."""
        return self._pieces.are_small

    def run_segments(
        self, segments: Sequence[Segment], wanted: Slots, receive: Receive, *, in_pieces: bool
    ) -> None:
        """Run one pass over segments side by side; see `SegmentForward`."""
        self._run_pass(
            Extent.of_segments(segments),
            np.concatenate([segment.writes for segment in segments]),
            functools.partial(SegmentBatch, segments, 0),
            wanted=wanted,
            receive=receive,
            # The sequences of scores are rarely continued.
            stays_resident=not in_pieces,
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
        most = max(1, min(_GATHERED_AT_ONCE // width, LOGITS_PER_PASS // self._width))
        is_wanted = np.zeros(count, bool)
        is_wanted[batch.results] = True
        found = CollectedLogits()
        for first in range(0, count, most):
            part = slice(first, min(first + most, count))
            rows = np.flatnonzero(is_wanted[part])
            self._run_pass(
                extent_of(batch, part),
                batch.writes[part],
                functools.partial(TablePass, batch, part),
                wanted=np.stack([first + rows, rows, np.zeros_like(rows)], axis=1),
                receive=found.add,
                stays_resident=True,
            )
        logits = found.of(batch.results)
        return ForwardResult(logits, count, forwards=-(-count // most))

    def _run_pass(
        self,
        extent: Extent,
        writes: Slots,
        side_by_side: Callable[..., SegmentBatch | TablePass],
        *,
        wanted: Slots,
        receive: Receive,
        stays_resident: bool,
    ) -> None:
        """Run the model over sequences side by side, with pasts that are resident if possible.

        Args:
            extent: Ends of the sequences.
            writes: The slots that take keys and values.
            side_by_side: Lays the pass out, with `past` or more columns of pasts.
            wanted: Key, sequence and new token of each requested position, shape `(n, 3)`.
            receive: Receives keys and logits.
            stays_resident: Whether the sequences may be kept for the next pass; if not, or if
                all tokens have many logits, logits are computed in pieces.
        """
        # First: a reallocated slot is no longer the end of its earlier sequence.
        self._resident.forget_slots(writes)
        slot = int(writes.max())
        room = self._budget // self._token_bytes - self.storage.slots_with(slot)
        resident, continues, tokens = None, False, 0
        if stays_resident:
            resident, continues, tokens = self._chosen(extent, room)
        self._resident.fit((room - tokens) * self._token_bytes)
        self.storage.make_room(slot)
        batch = side_by_side(past=resident.columns if resident else 0)
        caches = slot_caches(
            self.storage, batch, self._windows, resident=resident, continues=continues
        )
        ids = mx.array(batch.tokens.astype(np.int32))
        keys, (rows, places) = wanted[:, 0], mx.array(wanted[:, 1:].T)
        kept = [] if resident is None else [resident.arrays]

        def run() -> mx.array:
            logits: mx.array = self._model(ids, cache=caches)
            return logits

        def take(states: mx.array) -> mx.array:
            found = states[rows, places][None]
            self.storage.settle(found, *kept)
            return found

        many = extent.new > 1 and batch.tokens.size * self._width > _LOGITS_AT_ONCE
        if not len(keys):
            run()
            self.storage.settle(*kept)
        elif many or not stays_resident:
            self._pieces.compute(run, take, lambda part, logits: receive(keys[part], logits))
        else:
            receive(keys, as_tensor(take(run())[0]))
        if resident is not None:
            resident.columns = batch.past + batch.tokens.shape[1]
            if extent.is_even:
                self._resident.put(resident)

    def _chosen(self, extent: Extent, room: int) -> tuple[ResidentBatch | None, bool, int]:
        """Return the resident batch that keeps what the pass reads, if any.

        Args:
            extent: Ends of the sequences of the pass.
            room: Number of tokens that fit beside the storage.

        Returns:
            The batch; whether it has the pasts already; its future number of tokens.
        """
        resident = self._resident.take(extent, room)
        if resident is not None:
            return resident, True, resident.tokens_after(len(extent), extent.new)
        tokens = len(extent) * (extent.longest_past + extent.new)
        if extent.is_even and tokens <= room:
            return ResidentBatch(extent, len(self._windows)), False, tokens
        return None, False, 0


def own_logits(model: Any, sequences: Sequence[Sequence[int]], piece: int) -> torch.Tensor:
    """Run a model over whole sequences through its cache, as mlx-lm does.

    Args:
        model: An mlx-lm model.
        sequences: Sequences of one length.
        piece: Number of tokens of each in one pass.

    Returns:
        Logits after the last token, shape `(sequences, width)`, float32, on the CPU.
    """
    ids = mx.array(np.array(sequences, np.int32))
    cache = make_prompt_cache(model)
    last = ids.shape[1] - 1
    for first in range(0, last, piece):
        model(ids[:, first : min(first + piece, last)], cache=cache)
        _settle(cache)
    return as_tensor(model(ids[:, last:], cache=cache)[:, -1])


def own_pieces(
    model: Any,
    pieces: OutputPieces,
    sequences: Sequence[Sequence[int]],
    firsts: Sequence[int],
    *,
    piece: int,
    receive: Callable[[np.ndarray[Any, Any], torch.Tensor], None],
) -> None:
    """Run a model over whole sequences through its cache; pass on the logits of their ends.

    Args:
        model: An mlx-lm model.
        pieces: Its output embedding.
        sequences: Sequences of one length.
        firsts: The first position of each whose logits are wanted.
        piece: Number of tokens of each in one pass.
        receive: Receives (sequence, position) pairs, shape `(n, 2)`, and their logits.
    """
    ids = mx.array(np.array(sequences, np.int32))
    cache = make_prompt_cache(model)
    positions = np.arange(ids.shape[1])
    is_wanted = positions >= np.array(firsts)[:, None]
    for begin in range(0, len(positions), piece):
        part = ids[:, begin : begin + piece]
        wanted = np.argwhere(is_wanted[:, begin : begin + piece])
        run = functools.partial(model, part, cache=cache)
        if not len(wanted):
            run()
            _settle(cache)
            continue
        rows, places = mx.array(wanted.T)
        wanted[:, 1] += begin

        def take(
            states: mx.array, rows: mx.array = rows, places: mx.array = places
        ) -> mx.array:
            found = states[rows, places][None]
            _settle(cache, found)
            return found

        pieces.compute(
            run, take, lambda part, logits, wanted=wanted: receive(wanted[part], logits)
        )


def _settle(cache: Sequence[Any], *results: mx.array) -> None:
    """Evaluate MLX's pending computations: these results and the cache."""
    mx.eval([layer.state for layer in cache], *results)


def read_windows(model: Any) -> list[int | None]:
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


def read_shapes(model: Any, layers: int) -> tuple[list[LayerShape], int]:
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
