"""The plan of one packed forward pass: its tokens, their order, and their attention groups.

The pass is one sequence of tokens for the model, `[1, tokens]`: first single query tokens,
group by group, then prefill chunks. A query token attends to its whole past. Query tokens
whose paths through the tree have a prefix in common form a group: attention reads the shared
prefix once, as one matrix, and gathers their suffixes. The plan holds numbers only;
`packed.device_plan` copies it to devices.

Shapes of a pass of two groups and one chunk::

    tokens, positions, writes  (t,)    q0 q1 q2 | q3 q4 | c0 c1 c2 c3
                                       group 0    group    chunk
    results                    (r,)    indices into these t tokens

    QueryGroup of q0, q1, q2
        prefix    (p,)     p p p p p p      read once for all three
        suffixes  (3, s)   a a a 0          one row per query token; its last slot, here 0, 1
                           b 1 1 1          or 2, is the query token's slot, which also pads
                           c c 2 2          the row

    chunk
        slots     (past + 4,)   x x x x x | c0 c1 c2 c3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genlm.prefix import (
    SCRATCH_SLOT,
    BatchLimits,
    Slots,
    TokenBatch,
    plan_batches,
)

# In slots read, measured on two CPU cores: a group costs as much as reading 2,000
# slots, and gathering a slot as much as reading three.
_GROUP_COST = 2000
_GATHER_COST = 3

# Maximum slots gathered at once: 128 MiB a layer at 2 KiB a slot.
_MAX_GATHERED_SLOTS = 2**16

# Maximum scores of a head between the tokens of a group and the prefix that they share.
_MAX_SCORES = 2**22

# Segments of up to this many tokens run faster as query tokens than as a chunk.
_MAX_QUERY_TOKENS = 8

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Query tokens with a shared prefix.

    Attributes:
        members: Indices into all query tokens, at least one.
        prefix: Slots of the first tokens of every sequence, without those of query tokens.
        suffixes: The slots after the prefix, up to and including the query token's, shape
            (members, longest suffix), int32 or int64; shorter suffixes are padded with the
            query token's slot.
    """

    members: Integers
    prefix: Slots
    suffixes: NDArray[np.integer]


class Chunk(NamedTuple):
    """A prefill chunk: consecutive tokens of one sequence.

    Attributes:
        slots: Slots of the past and of these tokens.
        length: Number of these tokens.
    """

    slots: Slots
    length: int

    @property
    def past(self) -> int:
        """Number of tokens before these."""
        return len(self.slots) - self.length


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """One packed forward pass of `len(tokens)` tokens.

    Attributes:
        tokens: Token ids, in the order of the pass.
        positions: Positions of the tokens in their sequences.
        writes: Slots for the tokens' keys and values.
        groups: Groups of the first tokens of the pass.
        chunks: Prefill chunks of the tokens after the groups.
        results: Indices in the pass of the tokens whose logits are requested.
    """

    tokens: Integers
    positions: Integers
    writes: Slots
    groups: Sequence[QueryGroup]
    chunks: Sequence[Chunk]
    results: Integers


class SharedLengths:
    """Lengths of the prefixes that the query tokens of a pass share.

    The lengths of a pass are valid for the next pass if each of its tokens follows the token
    with the same index, because then the sequences share no additional slots. Lengths that are
    too small never change results: groups with shorter prefixes only gather more slots.
    """

    def __init__(self) -> None:
        self._lengths = self._shared = np.empty(0, np.int64)
        self._ends = np.empty(0, np.int32)

    def of(self, batch: TokenBatch, rows: Integers, lengths: Integers) -> Integers:
        """Return how many slots after the trunk the group of each query token shares.

        Args:
            batch: The pass.
            rows: Index of each query token's sequence.
            lengths: Number of slots after the trunk of each query token's sequence.
        """
        slots = batch.slots
        is_continued = (
            len(rows) > 1  # a single sequence may have a longer prefix in every pass
            and np.array_equal(lengths, self._lengths + 1)
            and np.array_equal(slots[rows, lengths - 2], self._ends)
        )
        if not is_continued:
            self._shared = _shared_lengths(slots, rows, lengths, len(batch.trunk))
        self._lengths, self._ends = lengths, slots[rows, lengths - 1]
        return self._shared


def plan_pass(batch: TokenBatch, shared_lengths: SharedLengths) -> PackedPlan:
    """Plan the pass that computes a batch.

    Args:
        batch: The tokens.
        shared_lengths: Lengths that are kept from the pass before.
    """
    segments = batch.segments
    is_chunk = segments.counts > _MAX_QUERY_TOKENS
    chunks, queries = segments.of(is_chunk), segments.of(~is_chunk).tokens
    rows, groups = batch.rows[queries], []
    lengths = batch.positions[queries] + 1 - len(batch.trunk)
    if len(queries):
        shared = shared_lengths.of(batch, rows, lengths)
        groups = list(_groups(batch.trunk, batch.slots, rows, lengths, shared))
    order = np.concatenate([*(queries[group.members] for group in groups), chunks.tokens])
    indices = np.empty(len(order), np.int64)
    indices[order] = np.arange(len(order))
    ends = batch.positions[chunks.firsts] + chunks.counts
    return PackedPlan(
        tokens=batch.tokens[order],
        positions=batch.positions[order],
        writes=batch.writes[order],
        groups=groups,
        chunks=[
            Chunk(batch.path(row, end), length)
            for row, end, length in zip(
                batch.rows[chunks.firsts].tolist(),
                ends.tolist(),
                chunks.counts.tolist(),
                strict=True,
            )
        ],
        results=indices[batch.results],
    )


def _groups(
    trunk: Slots,
    slots: NDArray[np.integer],
    rows: Integers,
    lengths: Integers,
    shared: Integers,
) -> Iterator[QueryGroup]:
    """Divide query tokens into groups: one for the trunk, and others with longer prefixes.

    Args:
        trunk: First slots of all sequences.
        slots: The slots after the trunk, shape `(sequences, longest)`; entries after the end of
            a sequence are undefined.
        rows: Index of each query token's sequence.
        lengths: Number of slots after the trunk of each query token's sequence.
        shared: How many of them the query tokens of its group share, fewer than all.
    """
    # Sequences with a common slot have the same slots before it.
    last = np.where(shared > 0, slots[rows, shared - 1], SCRATCH_SLOT)
    order, bounds = _equal_keys(last)
    firsts, rows, lengths = bounds[:-1], rows[order], (lengths - shared)[order]
    longest = np.maximum.reduceat(lengths, firsts)
    shortest = np.minimum.reduceat(lengths, firsts)
    numbers = firsts, bounds[1:], shared[order[firsts]], longest, shortest
    for first, end, count, most, least in zip(*(n.tolist() for n in numbers), strict=True):
        prefix = np.concatenate([trunk, slots[rows[first], :count]])
        max_rows = max(1, _MAX_SCORES // max(1, len(prefix)))
        limits = BatchLimits(max_tokens=_MAX_GATHERED_SLOTS, max_rows=max_rows)
        parts: Sequence[slice | Integers] = [slice(first, end)]
        if end - first > limits.rows(most) or least < limits.shortest(most):
            batches = plan_batches(lengths[first:end], limits)
            parts = [first + np.array(batch) for batch in batches]
        for part in parts:
            suffixes = slots[rows[part], count : count + int(lengths[part].max())]
            if least < most:
                suffixes = _padded(suffixes, lengths[part])
            yield QueryGroup(order[part], prefix, suffixes)


def _shared_lengths(
    slots: NDArray[np.integer], rows: Integers, lengths: Integers, trunk: int
) -> Integers:
    """Return how many slots after the trunk the group of each query token shares.

    The sequences form a tree of slots. The query tokens below one of its nodes become a group
    if the longer prefix saves more gathering than it costs. One node on every path is compared
    at once, since populations that are resampled have many nodes; nodes that have too few
    slots to save anything are passed over.

    Args:
        slots: As for `_groups`.
        rows: As for `_groups`.
        lengths: Number of slots after the trunk of each query token's sequence.
        trunk: Number of slots of the trunk.
    """
    limits = lengths - 1  # no group shares the last slot, which is the query token's
    paths = _Paths(slots, rows, limits)
    members, shared = np.arange(len(lengths)), np.zeros_like(lengths)
    columns = shared + _least_saving(len(lengths), trunk) - 1
    while len(members := members[columns[members] < limits[members]]):
        order, bounds = _equal_keys(paths.slots(members, columns[members]))
        members, counts, leaders = members[order], np.diff(bounds), members[order[bounds[:-1]]]
        before = shared[leaders]
        least = before + _least_saving(counts, trunk + before)
        may_save = least <= np.maximum.reduceat(limits[members], bounds[:-1])
        members = members[np.repeat(may_save, counts)]
        counts, leaders, before = counts[may_save], leaders[may_save], before[may_save]
        ends = paths.common_lengths(members, np.cumsum(counts) - counts, columns)
        span = paths.slots(leaders, ends - 1) - paths.slots(leaders, before)
        is_contiguous = span == ends - 1 - before
        saves = _saves_gathering(counts, trunk + before, ends - before, is_contiguous)
        before = np.where(saves, ends, before)
        shared[members] = np.repeat(before, counts)
        least = before + _least_saving(counts, trunk + before)
        columns[members] = np.repeat(np.maximum(ends, least - 1), counts)
    return shared


class _Paths:
    """The slots of query tokens' sequences, and what neighbours in an order have in common.

    Most query tokens have the same neighbour below a node and below the nodes after it. Only
    new neighbours are compared.

    Args:
        slots: As for `_groups`.
        rows: As for `_groups`.
        limits: Number of slots of each query token's sequence that others may share.
    """

    def __init__(self, slots: NDArray[np.integer], rows: Integers, limits: Integers) -> None:
        self._slots, self._starts, self._limits = slots.ravel(), rows * slots.shape[1], limits
        self._neighbours, self._common = np.full_like(rows, -1), np.zeros_like(rows)

    def slots(self, members: Integers, columns: Integers) -> NDArray[np.integer]:
        """Return the slot of each member in its column."""
        slots: NDArray[np.integer] = self._slots.take(self._starts[members] + columns)
        return slots

    def common_lengths(
        self, members: Integers, firsts: Integers, columns: Integers
    ) -> Integers:
        """Return how many first slots the members below each node have in common.

        Args:
            members: Members below the nodes, node by node.
            firsts: Index of the first member below each node.
            columns: A column of each query token in which members below a node are equal.
        """
        neighbours, known = members[np.arange(len(members)) - 1], self._neighbours[members]
        neighbours[firsts] = known[firsts]
        self._neighbours[members] = neighbours
        self._compare(changed := members[neighbours != known], columns[changed] + 1)
        common = self._common[members]
        common[firsts] = self._limits[members[firsts]]
        lengths: Integers = np.minimum.reduceat(common, firsts)
        return lengths

    def _compare(self, members: Integers, least: Integers) -> None:
        """Compute what members have in common with their neighbours, `least` slots or more."""
        others = self._neighbours[members]
        most = np.minimum(self._limits[members], self._limits[others])
        step = 1 << int((most - least).max(initial=0)).bit_length()
        while step := step // 2:
            middle = np.minimum(least + step, most)
            is_equal = self.slots(members, middle - 1) == self.slots(others, middle - 1)
            least = np.where(is_equal, middle, least)
        self._common[members] = least


def _equal_keys(keys: NDArray[np.integer]) -> tuple[Integers, Integers]:
    """Return an order with equal keys side by side, and the bounds of equal keys in it."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    changes = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    return order, np.concatenate([[0], changes, [len(keys)]])


def _saves_gathering(
    members: Integers | int,
    shared: Integers | int,
    added: Integers | int,
    is_contiguous: NDArray[np.bool_] | bool = True,
) -> NDArray[np.bool_]:
    """Whether separate groups save more gathering than they cost.

    Args:
        members: Number of query tokens of each group.
        shared: Number of slots that they share with other query tokens.
        added: Number of further slots that they share.
        is_contiguous: Whether the further slots are contiguous, which cost less.
    """
    saved, prefix = _GATHER_COST * members * added, shared + added
    return saved > _GROUP_COST + np.where(is_contiguous, 1, _GATHER_COST) * prefix


def _least_saving(members: Integers | int, shared: Integers | int) -> Integers | int:
    """Return the least number of further slots with which a separate group may save.

    The arguments are those of `_saves_gathering`.
    """
    return (_GROUP_COST + shared) // (_GATHER_COST * members - 1) + 1


def _padded(suffixes: NDArray[np.integer], lengths: Integers) -> NDArray[np.integer]:
    """Pad suffixes of these lengths with their last slot."""
    last = suffixes[np.arange(len(lengths)), lengths - 1]
    return np.where(np.arange(suffixes.shape[1]) < lengths[:, None], suffixes, last[:, None])
