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
    SCRATCH_SLOT,
    ForwardCounts,
    ForwardResult,
    Receive,
    Segment,
    SegmentBatch,
    SegmentLimits,
    Slots,
    TableBatch,
    TreeBatch,
    UnsupportedModelError,
    group_segments,
    places_of,
    prefill_stages,
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

# Maximum number of logits that one pass computes; 32 MiB in float16. If all tokens of a pass
# have more, the requested ones are computed in one more pass, over their tokens alone.
_LOGITS_AT_ONCE = 2**24

# Maximum number of slots that a pass over a block table gathers: 128 MiB a layer at 2 KiB a
# slot.
_GATHERED_AT_ONCE = 2**16


class SlotCacheForward:
    """Runs a model over the uncached tokens of a tree, or over tokens that continue a table.

    A `ScoringForward` and a `TableForward`; passes are padded batches.

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
        self._model, self._windows, self.storage = model, list(windows), storage
        self._limits, self._width = limits, width
        self._budget = budget_bytes
        self._token_bytes = sum(layer.bytes_per_token for layer in storage.layers)
        self._resident = ResidentBatches()
        self._pieces = OutputPieces(model, width)

    def __call__(self, batch: TreeBatch) -> ForwardResult:
        """Run each prefill stage in as few passes as padding allows."""
        wanted = set(batch.last_slots)
        found = _Found()
        again: list[Segment] = []
        tokens = forwards = 0
        stages = prefill_stages(batch)
        while stages:
            for segments in group_segments(stages.pop(0), self._limits):
                ends = places_of(segments, wanted)
                longest = max(len(segment.tokens) for segment in segments)
                if longest > 1 and len(segments) * longest * self._width > _LOGITS_AT_ONCE:
                    again += [_alone(segments[row], place) for _, row, place in ends]
                    ends = []
                self._run(segments, ends, found)
                tokens += sum(len(segment.tokens) for segment in segments)
                forwards += 1
            if not stages and again:
                stages, again = [again], []
        return ForwardResult(found.logits(batch.last_slots), tokens, forwards)

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
        parts = []
        for first in range(0, count, most):
            part = slice(first, min(first + most, count))
            rows = np.flatnonzero(is_wanted[part])
            logits = self._pass(
                extent_of(batch, part),
                batch.writes[part],
                functools.partial(TablePass, batch, part),
                rows,
                np.zeros(len(rows), np.int64),
            )
            if logits is not None:
                parts.append(as_tensor(logits))
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        places = np.cumsum(is_wanted)[batch.results] - 1
        if not np.array_equal(places, np.arange(len(found))):
            found = found[torch.from_numpy(places)]
        return ForwardResult(found, count, forwards=-(-count // most))

    def scores_in_pieces(self) -> bool:
        """Whether `score` never has the logits of a whole pass in memory."""
        return self._pieces.are_small

    def score(self, batch: TreeBatch, receive: Receive) -> ForwardCounts:
        """Run each prefill stage; apply the output embedding to a few tokens at a time."""
        wanted = set(batch.wanted_slots())
        tokens = forwards = 0
        for stage in prefill_stages(batch):
            for segments in group_segments(stage, self._limits):
                self._score(segments, places_of(segments, wanted), receive)
                tokens += sum(len(segment.tokens) for segment in segments)
                forwards += 1
        return ForwardCounts(tokens, forwards)

    def _score(
        self,
        segments: Sequence[Segment],
        ends: Sequence[tuple[int, int, int]],
        receive: Receive,
    ) -> None:
        """Run one pass; pass on the logits at the given (slot, segment, token) places."""
        batch = SegmentBatch(segments, pad_id=0)
        slot = int(batch.writes.max())
        self._resident.forget_slots(batch.writes)
        self._resident.fit(self._budget - self.storage.slots_with(slot) * self._token_bytes)
        self.storage.make_room(slot)
        caches = slot_caches(self.storage, batch, self._windows)
        ids = mx.array(batch.tokens.astype(np.int32))
        if ends:
            slots = np.array([slot for slot, _, _ in ends], np.int64)
            rows, places = (mx.array([end[i] for end in ends]) for i in (1, 2))
            self._pieces.compute(
                lambda: self._model(ids, cache=caches),
                lambda states: states[rows, places][None],
                self.storage.settle,
                lambda part, logits: receive(slots[part], logits),
            )
        else:
            self.storage.settle(self._model(ids, cache=caches)[:, :1])

    def clear(self) -> None:
        """Free everything computed."""
        self._resident.clear()
        self.storage.reset()

    def _run(
        self,
        segments: Sequence[Segment],
        ends: Sequence[tuple[int, int, int]],
        found: _Found,
    ) -> None:
        """Run one pass and store the logits at the given (slot, segment, token) places."""
        rows, places = (np.array([end[i] for end in ends], np.int64) for i in (1, 2))
        logits = self._pass(
            Extent.of_segments(segments),
            np.concatenate([segment.writes for segment in segments]),
            functools.partial(SegmentBatch, segments, 0),
            rows,
            places,
        )
        if logits is not None:
            found.add([slot for slot, _, _ in ends], logits)

    def _pass(
        self,
        extent: Extent,
        writes: Slots,
        side_by_side: Callable[..., SegmentBatch | TablePass],
        rows: Slots,
        places: Slots,
    ) -> mx.array | None:
        """Run the model over sequences side by side, with pasts that are resident if possible.

        Args:
            extent: Ends of the sequences.
            writes: The slots that take keys and values.
            side_by_side: Lays the pass out, with `past` or more columns of pasts.
            rows: Sequences whose logits are requested.
            places: New token of each after which logits are requested.

        Returns:
            The logits, shape `(len(rows), width)`, float32; None if `rows` is empty.
        """
        # First: a reallocated slot is no longer the end of its earlier sequence.
        self._resident.forget_slots(writes)
        slot = int(writes.max())
        room = self._budget // self._token_bytes - self.storage.slots_with(slot)
        resident, continues, tokens = self._chosen(extent, room)
        self._resident.fit((room - tokens) * self._token_bytes)
        self.storage.make_room(slot)
        batch = side_by_side(past=resident.columns if resident else 0)
        caches = slot_caches(
            self.storage, batch, self._windows, resident=resident, continues=continues
        )
        logits = self._model(mx.array(batch.tokens.astype(np.int32)), cache=caches)
        results = []
        if len(rows):
            results.append(logits[mx.array(rows), mx.array(places)].astype(mx.float32))
        if resident is not None:
            results.append(resident.arrays)
            resident.columns = batch.past + batch.tokens.shape[1]
        self.storage.settle(*results)
        if resident is not None and extent.is_even:
            self._resident.put(resident)
        return results[0] if len(rows) else None

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


class _Found:
    """Logits of the passes of a batch."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def add(self, slots: Sequence[int], logits: mx.array) -> None:
        """Store the logits, `(slots, width)`, of the tokens in some slots."""
        for slot in slots:
            self._places[slot] = len(self._places)
        self._parts.append(as_tensor(logits))

    def logits(self, slots: Sequence[int]) -> torch.Tensor:
        """Return the logits of slots in order, `(slots, width)`."""
        places = [self._places[slot] for slot in slots]
        everything = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        return everything if places == list(range(len(everything))) else everything[places]


def own_logits(model: Any, sequences: Sequence[tuple[int, ...]], piece: int) -> torch.Tensor:
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
        mx.eval([layer.state for layer in cache])
    return as_tensor(model(ids[:, last:], cache=cache)[:, -1].astype(mx.float32))


def own_pieces(
    model: Any,
    pieces: OutputPieces,
    sequences: Sequence[tuple[int, ...]],
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
    for begin in range(0, ids.shape[1], piece):
        end = min(begin + piece, ids.shape[1])
        wanted = [
            (row, place)
            for row, first in enumerate(firsts)
            for place in range(max(first, begin), end)
        ]
        _own_pass(model, pieces, ids[:, begin:end], cache, np.array(wanted), begin, receive)


def _own_pass(  # noqa: PLR0917 - the parts of `own_pieces`
    model: Any,
    pieces: OutputPieces,
    ids: mx.array,
    cache: list[Any],
    wanted: np.ndarray[Any, Any],
    begin: int,
    receive: Callable[[np.ndarray[Any, Any], torch.Tensor], None],
) -> None:
    if not len(wanted):
        model(ids, cache=cache)
        mx.eval([layer.state for layer in cache])
        return
    rows, places = mx.array(wanted[:, 0]), mx.array(wanted[:, 1] - begin)
    pieces.compute(
        lambda: model(ids, cache=cache),
        lambda states: states[rows, places][None],
        lambda states: mx.eval(states, [layer.state for layer in cache]),
        lambda part, logits: receive(wanted[part], logits),
    )


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


def _alone(segment: Segment, place: int) -> Segment:
    """Return a segment of one computed token, to be run again."""
    slots = segment.slots[: segment.past + place + 1]
    return Segment(segment.tokens[place : place + 1], slots, np.array([SCRATCH_SLOT], np.int64))
