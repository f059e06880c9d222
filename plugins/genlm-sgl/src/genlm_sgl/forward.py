"""`SGLangForward`: forward passes of SGLang over the slots of a prefix tree or a block table.

A pass is a decode or an extend. In a *decode* each token is a sequence of its own, which reads
the slots of a row of SGLang's table up to its position; on a GPU, SGLang has graphs of decodes.
An *extend* computes the new tokens of prompts side by side. Segments of few tokens are decoded,
because SGLang's attention on a CPU computes an extend as if the whole sequence were new.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from genlm.plugin import device_index
from genlm.prefix import (
    SCRATCH_SLOT,
    ForwardCounts,
    ForwardResult,
    Receive,
    Segment,
    Slots,
    TableBatch,
    TreeBatch,
    places_of,
    prefill_stages,
)
from genlm_sgl.adapters import Adapters
from genlm_sgl.served_model import ComputeLogits, ReadStates, ServedModel

__all__ = ["SGLangForward"]

_MOST_DECODED = 8
"""Maximum number of new tokens of a segment that is decoded."""

_VALUES = 2**24
"""Maximum number of logits of texts that are computed at once: 64 MiB in float32."""

_NO_TRUNK: Slots = np.empty(0, np.int64)


class SGLangForward:
    """Runs a model over uncached tokens of a tree, or over tokens that continue a table.

    A `ScoringForward` and a `TableForward` of `genlm.prefix`.

    Args:
        served: The model.
        adapters: The loaded adapters.
        width: Number of logits of a token.
    """

    def __init__(self, served: ServedModel, adapters: Adapters, *, width: int) -> None:
        self._served, self._adapters = served, adapters
        self._piece = max(1, _VALUES // width)

    def __call__(self, batch: TreeBatch) -> ForwardResult:
        """Run each prefill stage: short segments as a decode, the others as an extend."""
        wanted = set(batch.last_slots)
        adapter_id = self._adapters.id_of(batch.adapter)
        found = _Logits(wanted)
        tokens = forwards = 0
        again: list[Segment] = []  # tokens within extends, whose logits SGLang does not compute
        stages = prefill_stages(batch)
        while stages:
            stage = stages.pop(0)
            short = [segment for segment in stage if len(segment.tokens) <= _MOST_DECODED]
            if short:
                table = _table_of(short)
                logits, passes = self._decode(table, adapter_id)
                found.add(np.concatenate([each.slots[each.past :] for each in short]), logits)
                tokens, forwards = tokens + len(table.tokens), forwards + passes
            long = [segment for segment in stage if len(segment.tokens) > _MOST_DECODED]
            for segments in self._extends(long):
                logits = self._served.extend(segments, adapter_id)
                found.add(np.array([each.slots[-1] for each in segments]), logits)
                again += [
                    _alone(segments[row], place)
                    for _, row, place in places_of(segments, wanted)
                    if place < len(segments[row].tokens) - 1
                ]
                tokens += sum(len(segment.tokens) for segment in segments)
                forwards += 1
            if not stages and again:
                stages, again = [again], []
        return ForwardResult(found.of(batch.last_slots), tokens, forwards)

    def run_table(self, batch: TableBatch, adapter: str | None) -> ForwardResult:
        """Decode tokens that continue rows of a table."""
        logits, passes = self._decode(batch, self._adapters.id_of(adapter))
        if not np.array_equal(batch.results, np.arange(len(logits))):
            logits = logits[device_index(batch.results.tolist(), logits.device)]
        return ForwardResult(logits, len(batch.tokens), passes)

    def scores_in_pieces(self) -> bool:
        """Whether `score` never has the logits of a whole pass in memory."""
        return True

    def score(self, batch: TreeBatch, receive: Receive) -> ForwardCounts:
        """Run each prefill stage as extends; compute the logits of a few tokens at a time."""
        wanted = set(batch.wanted_slots())
        adapter_id = self._adapters.id_of(batch.adapter)
        tokens = forwards = 0
        for stage in prefill_stages(batch):
            for segments in self._extends(stage):
                ends = places_of(segments, wanted)
                begins = np.cumsum([0, *(len(segment.tokens) for segment in segments)])
                slots = np.array([slot for slot, _, _ in ends], np.int64)
                states = [int(begins[row]) + place for _, row, place in ends]
                self._served.extend(segments, adapter_id, self._reading(slots, states, receive))
                tokens += int(begins[-1])
                forwards += 1
        return ForwardCounts(tokens, forwards)

    def _reading(self, slots: Slots, wanted: Sequence[int], receive: Receive) -> ReadStates:
        """Return a function that passes on the logits of some of the hidden states."""

        def read(states: torch.Tensor, compute_logits: ComputeLogits) -> None:
            for first in range(0, len(wanted), self._piece):
                part = slice(first, first + self._piece)
                index = device_index(wanted[part], states.device)
                receive(slots[part], compute_logits(states[index]))

        return read

    def _decode(self, batch: TableBatch, adapter_id: str | None) -> tuple[torch.Tensor, int]:
        """Return the logits of all tokens, and the number of passes."""
        served, count = self._served, len(batch.tokens)
        served.write_rows(batch.trunk, batch.slots)
        logits = []
        for first in range(0, count, served.max_rows):
            part = slice(first, first + served.max_rows)
            logits.append(
                served.decode(
                    batch.tokens[part],
                    batch.positions[part],
                    batch.writes[part],
                    batch.rows[part],
                    adapter_id,
                )
            )
        return (logits[0] if len(logits) == 1 else torch.cat(logits)), len(logits)

    def _extends(self, segments: Sequence[Segment]) -> Iterator[Sequence[Segment]]:
        """Divide segments into passes, and write the slots of each pass to the table."""
        most = self._served.max_rows
        for first in range(0, len(segments), most):
            part = segments[first : first + most]
            self._served.write_rows(_NO_TRUNK, _padded(part))
            yield part


class _Logits:
    """The requested logits of several passes.

    Args:
        wanted: Slots of the tokens whose logits are requested.
    """

    def __init__(self, wanted: set[int]) -> None:
        self._wanted = wanted
        self._places: dict[int, int] = {}
        self._parts: list[torch.Tensor] = []

    def add(self, slots: Slots, logits: torch.Tensor) -> None:
        """Keep those logits of a pass that are requested."""
        kept = [row for row, slot in enumerate(slots.tolist()) if slot in self._wanted]
        if not kept:
            return
        for slot in slots[kept].tolist():
            self._places[slot] = len(self._places)
        if len(kept) < len(logits):
            logits = logits[device_index(kept, logits.device)]
        self._parts.append(logits)

    def of(self, slots: Sequence[int]) -> torch.Tensor:
        """Return the logits of some slots, shape `(len(slots), width)`."""
        logits = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        order = [self._places[slot] for slot in slots]
        if order == list(range(len(logits))):
            return logits
        return logits[device_index(order, logits.device)]


def _table_of(segments: Sequence[Segment]) -> TableBatch:
    """Return the tokens of segments as tokens that continue rows of a table."""
    counts = np.array([len(segment.tokens) for segment in segments])
    rows = np.repeat(np.arange(len(segments)), counts)
    begins = np.cumsum(counts) - counts
    pasts = np.array([segment.past for segment in segments])
    return TableBatch(
        tokens=np.concatenate([np.array(each.tokens, np.int64) for each in segments]),
        positions=pasts[rows] + np.arange(len(rows)) - begins[rows],
        writes=np.concatenate([segment.writes for segment in segments]),
        trunk=_NO_TRUNK,
        slots=_padded(segments),
        rows=rows,
        results=begins + counts - 1,
    )


def _padded(segments: Sequence[Segment]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Return the slots of segments, shape `(segments, longest)`."""
    longest = max(len(segment.slots) for segment in segments)
    slots = np.zeros((len(segments), longest), np.int32)
    for row, segment in enumerate(segments):
        slots[row, : len(segment.slots)] = segment.slots
    return slots


def _alone(segment: Segment, place: int) -> Segment:
    """Return a computed token of a segment as a segment that computes it again."""
    end = segment.past + place + 1
    scratch = np.full(1, SCRATCH_SLOT, np.int64)
    return Segment(segment.tokens[place : place + 1], segment.slots[:end], scratch)
