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

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genlm.prefix import (
    SCRATCH_SLOT,
    BatchLimits,
    Segment,
    Slots,
    TableBatch,
    TreeBatch,
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

# Nodes of up to this many uncached tokens run faster as query tokens than as a chunk.
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


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """One packed forward pass of `len(tokens)` tokens.

    Attributes:
        tokens: Token ids, in the order of the pass.
        positions: Positions of the tokens in their sequences.
        writes: Slots for the tokens' keys and values.
        groups: Groups of the first tokens of the pass.
        chunks: Prefill chunks: segments of the tokens after the groups.
        results: Indices in the pass of the tokens whose logits are requested.
    """

    tokens: Integers
    positions: Integers
    writes: Slots
    groups: Sequence[QueryGroup]
    chunks: Sequence[Segment]
    results: Integers


def plan_forward(batch: TreeBatch) -> PackedPlan:
    """Plan the pass that computes the uncached tokens of a tree, and all results."""
    segments = [segment for stage in batch.stages for segment in stage]
    segments.sort(key=_is_chunk)
    chunks = [segment for segment in segments if _is_chunk(segment)]
    table = TableBatch.of_segments(segments)
    queries = len(table.tokens) - sum(len(chunk.tokens) for chunk in chunks)
    rows, positions = table.rows[:queries], table.positions[:queries]
    groups = list(_groups(table.trunk, table.slots, rows, positions)) if queries else []
    members = [group.members for group in groups]
    order = np.concatenate([*members, np.arange(queries, len(table.tokens))])
    slots = table.slots[table.rows, table.positions][order]
    by_slot = np.argsort(slots)
    return PackedPlan(
        tokens=table.tokens[order],
        positions=table.positions[order],
        writes=table.writes[order],
        groups=groups,
        chunks=chunks,
        results=by_slot[np.searchsorted(slots, batch.wanted, sorter=by_slot)],
    )


def plan_table(batch: TableBatch) -> PackedPlan:
    """Plan the pass over tokens that continue rows of a block table."""
    groups = list(_groups(batch.trunk, batch.slots, batch.rows, batch.positions))
    order = np.concatenate([group.members for group in groups])
    indices = np.empty(len(order), np.int64)
    indices[order] = np.arange(len(order))
    return PackedPlan(
        tokens=batch.tokens[order],
        positions=batch.positions[order],
        writes=batch.writes[order],
        groups=groups,
        chunks=[],
        results=indices[batch.results],
    )


def _is_chunk(segment: Segment) -> bool:
    return len(segment.tokens) > _MAX_QUERY_TOKENS


def _groups(
    trunk: Slots, slots: NDArray[np.integer], rows: Integers, positions: Integers
) -> Iterator[QueryGroup]:
    """Divide query tokens into groups: one for the trunk, and others with longer prefixes.

    Args:
        trunk: First slots of all sequences.
        slots: The slots after the trunk, shape `(sequences, longest)`; entries after the end of
            a sequence are undefined.
        rows: Index of each query token's sequence.
        positions: Position of each query token in its sequence.
    """
    lengths = positions + 1 - len(trunk)
    shared = _shared_lengths(slots, rows, lengths, len(trunk))
    # Sequences with a common slot have the same slots before it.
    last = np.where(shared > 0, slots[rows, shared - 1], SCRATCH_SLOT)
    order, bounds = _equal_keys(last)
    for first, end in itertools.pairwise(bounds.tolist()):
        members = order[first:end]
        count = int(shared[members[0]])
        prefix = np.concatenate([trunk, slots[rows[members[0]], :count].astype(np.int64)])
        suffix_lengths = lengths[members] - count
        for part in _similar_lengths(suffix_lengths, len(prefix)):
            suffixes = _suffixes(slots, rows[members[part]], count, suffix_lengths[part])
            yield QueryGroup(members[part], prefix, suffixes)


def _shared_lengths(
    slots: NDArray[np.integer], rows: Integers, lengths: Integers, trunk: int
) -> Integers:
    """Return how many slots after the trunk the group of each query token shares.

    The sequences form a tree of slots. The query tokens below one of its nodes become a group
    if the longer prefix saves more gathering than it costs. The nodes after equally many
    branches are compared at once, since populations that are resampled have many nodes.

    Args:
        slots: As for `_groups`.
        rows: As for `_groups`.
        lengths: Number of slots after the trunk of each query token's sequence.
        trunk: Number of slots of the trunk.
    """
    shared, walked = np.zeros_like(lengths), np.zeros_like(lengths)
    members = np.arange(len(lengths))
    if not _saves_gathering(len(members), trunk, int(lengths.max()) - 1):
        return shared
    # The last slot of a sequence is the query token's, which no group shares.
    while len(members := members[walked[members] < lengths[members] - 1]):
        order, bounds = _equal_keys(slots[rows[members], walked[members]])
        members, firsts, counts = members[order], bounds[:-1], bounds[1:] - bounds[:-1]
        limits = np.minimum.reduceat(lengths[members], firsts) - 1
        leaders = members[firsts]
        before = shared[leaders]
        may_save = _saves_gathering(counts, trunk + before, limits - before)
        members = members[np.repeat(may_save, counts)]
        leaders, before = leaders[may_save], before[may_save]
        counts, limits = counts[may_save], limits[may_save]
        ends = _common_lengths(slots, rows[members], counts, walked[leaders] + 1, limits)
        walked[members] = np.repeat(ends, counts)
        span = slots[rows[leaders], ends - 1] - slots[rows[leaders], before]
        is_contiguous = span == ends - 1 - before
        saves = _saves_gathering(counts, trunk + before, ends - before, is_contiguous)
        shared[members] = np.repeat(np.where(saves, ends, before), counts)
    return shared


def _common_lengths(
    slots: NDArray[np.integer],
    rows: Integers,
    counts: Integers,
    least: Integers,
    most: Integers,
) -> Integers:
    """Return the number of first slots that the rows below each node have in common.

    Args:
        slots: As for `_groups`.
        rows: Rows below the nodes, node by node.
        counts: Number of rows below each node.
        least: Smallest possible number for each node.
        most: Largest possible number for each node.
    """
    firsts = np.cumsum(counts) - counts
    flat, before = slots.reshape(-1), rows * slots.shape[1] - 1
    leaders = before[firsts]
    while (least < most).any():
        middle = (least + most + 1) // 2
        column = flat[before + np.repeat(middle, counts)]
        is_equal = column == np.repeat(flat[leaders + middle], counts)
        are_equal = np.logical_and.reduceat(is_equal, firsts)
        least, most = np.where(are_equal, middle, least), np.where(are_equal, most, middle - 1)
    return least


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


def _similar_lengths(lengths: Integers, prefix: int) -> Iterator[Integers | slice]:
    """Divide tokens with suffixes of these lengths into groups of limited size."""
    longest = int(lengths.max())
    max_rows = max(1, min(len(lengths), _MAX_SCORES // max(1, prefix)))
    limits = BatchLimits(max_tokens=_MAX_GATHERED_SLOTS, max_rows=max_rows)
    if len(lengths) <= limits.rows(longest) and lengths.min() >= limits.shortest(longest):
        yield slice(None)
        return
    for indices in plan_batches(lengths, limits):
        yield np.array(indices)


def _suffixes(
    slots: NDArray[np.integer], rows: Integers, shared: int, lengths: Integers
) -> NDArray[np.integer]:
    """Return the slots after a prefix; see `QueryGroup`."""
    longest = int(lengths.max())
    suffixes = slots[rows, shared : shared + longest]
    if lengths.min() < longest:
        last = suffixes[np.arange(len(rows)), lengths - 1]
        after = np.arange(longest) >= lengths[:, None]
        suffixes = np.where(after, last[:, None], suffixes)
    return suffixes
