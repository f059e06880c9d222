"""Which tokens run together through a model's own attention, and what they see.

A segment is consecutive tokens of one sequence with their past. Segments whose past is
known run together, padded, in a few batches; those that follow them wait for the next
wave. Numbers only; nothing of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genlm.prefix.computing import TreeBatch
from genlm.prefix.node import Node
from genlm.prefix.slots import SCRATCH_SLOT, Slots

__all__ = [
    "Segment",
    "SegmentBatch",
    "SegmentLimits",
    "group_segments",
    "places_of",
    "waves_of",
]

# Padding of this many tokens costs less than another pass over the weights.
_CHEAP_PADDING_TOKENS = 64

# Most slots gathered at once: 128 MiB a layer at 2 KiB a slot.
_GATHERED_AT_ONCE = 2**16

# Gathering this many slots in vain costs less than another pass over the weights.
_CHEAP_GATHERING = 4096

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens of one sequence, computed together.

    Attributes:
        tokens: Ids, at least one.
        slots: Of the past and of these tokens.
        writes: Where the keys and values of these tokens go: their slots, or the
            scratch slot if they are known.
    """

    tokens: tuple[int, ...]
    slots: Slots
    writes: Slots

    @property
    def past(self) -> int:
        """Number of tokens before these."""
        return len(self.slots) - len(self.tokens)


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """What one padded batch of segments may hold.

    Attributes:
        max_tokens: The most new positions, padding included. A longer segment is a
            batch of its own.
        max_context: The most positions that past and new tokens take together,
            padding included; None without such a limit.
    """

    max_tokens: int
    max_context: int | None

    def admit(self, batch: Sequence[Segment], segment: Segment) -> bool:
        """Whether a segment may join others, none of which has more new tokens."""
        rows = len(batch) + 1
        longest = len(segment.tokens)
        past = max(segment.past, *(other.past for other in batch))
        width = longest + past
        new = sum(len(other.tokens) for other in batch) + longest
        seen = sum(other.past for other in batch) + segment.past
        return (
            rows * longest <= self.max_tokens
            and rows * width <= _GATHERED_AT_ONCE
            and (self.max_context is None or width <= self.max_context)
            and rows * longest - new <= _CHEAP_PADDING_TOKENS
            and rows * past - seen <= max(seen, _CHEAP_GATHERING)
        )


class SegmentBatch:
    """Segments side by side: pasts padded on the left, new tokens on the right.

    Attributes:
        tokens: Ids, shape (segments, longest); padding holds `pad_id`.
        positions: Of each in its own sequence; padding counts on.
        writes: The slot that takes each token's keys and values, same shape; padding
            writes into the scratch slot.
        reads: The slots of past and new tokens, shape (segments, longest past +
            longest); padding reads what its segment has just written.
        is_token: Which of `reads` are none of padding.
        past: How many columns the pasts take, the longest one's tokens at least.
    """

    def __init__(self, segments: Sequence[Segment], pad_id: int, *, past: int = 0) -> None:
        longest = max(len(segment.tokens) for segment in segments)
        self.past = max(past, *(segment.past for segment in segments))
        shape, width = (len(segments), longest), self.past + longest
        self.tokens = np.full(shape, pad_id, np.int64)
        self.positions = np.empty(shape, np.int64)
        self.writes = np.full(shape, SCRATCH_SLOT, np.int64)
        self.reads = np.empty((len(segments), width), np.int64)
        self.is_token = np.zeros((len(segments), width), bool)
        for row, segment in enumerate(segments):
            count, first = len(segment.tokens), self.past - segment.past
            end = first + len(segment.slots)
            self.tokens[row, :count] = segment.tokens
            self.writes[row, :count] = segment.writes
            self.positions[row] = segment.past + np.arange(longest)
            self.reads[row] = segment.slots[-1]
            self.reads[row, first:end] = segment.slots
            self.is_token[row, first:end] = True


def places_of(
    segments: Sequence[Segment], wanted: Collection[int]
) -> list[tuple[int, int, int]]:
    """Return the slot, the row and the place in the row of new tokens, if wanted by slot."""
    return [
        (slot, row, place)
        for row, segment in enumerate(segments)
        for place, slot in enumerate(segment.slots[segment.past :].tolist())
        if slot in wanted
    ]


def waves_of(batch: TreeBatch) -> list[list[Segment]]:
    """Divide what a batch computes into waves, each of which needs the ones before it.

    Among the first are the last tokens of sequences that are in the tree already:
    they are run again for their logits.
    """
    depths: dict[Node, int] = {}
    waves: list[list[Segment]] = [[]]
    fresh: set[int] = set()
    for node in batch.tree.fresh():  # ancestors before descendants
        above = depths.get(node.parent) if node.parent is not None else None
        depth = depths[node] = 0 if above is None else above + 1
        if depth == len(waves):
            waves.append([])
        writes = node.slots[node.computed :]
        slots = node.path_slots(0, node.end)
        waves[depth].append(Segment(node.tokens[node.computed :], slots, writes))
        fresh.update(writes.tolist())
    scratch = np.array([SCRATCH_SLOT], np.int64)
    for sequence, slot in zip(batch.sequences, batch.last_slots, strict=True):
        if slot not in fresh:
            node = batch.tree.find(batch.adapter, sequence)
            slots = node.path_slots(0, len(sequence))
            waves[0].append(Segment(sequence[-1:], slots, scratch))
            fresh.add(slot)
    return waves


def group_segments(
    segments: Sequence[Segment], limits: SegmentLimits
) -> Iterator[list[Segment]]:
    """Divide segments into batches that pad little, each segment into exactly one."""
    batch: list[Segment] = []
    for segment in sorted(segments, key=lambda s: (len(s.tokens), s.past)):
        if batch and not limits.admit(batch, segment):
            yield batch
            batch = []
        batch.append(segment)
    if batch:
        yield batch
