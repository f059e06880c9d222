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

import numpy as np
from numpy.typing import NDArray

from genlm.prefix import (
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
    groups = list(_segment_groups(table, queries)) if queries else []
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


def _segment_groups(batch: TableBatch, queries: int) -> Iterator[QueryGroup]:
    """Divide the first tokens of segments into groups, with a trunk if that saves gathering."""
    rows, positions = batch.rows[:queries], batch.positions[:queries]
    shared = _shared_columns(batch.slots[: rows[-1] + 1, : int(positions.min())])
    trunk = batch.slots[0, :shared].astype(np.int64)
    if not _saves_gathering(queries, 0, trunk):
        trunk = trunk[:0]
    begin = shared - len(trunk)
    return _groups(trunk, batch.slots[:, len(trunk) :], rows, positions, begin=begin)


def _groups(
    trunk: Slots,
    slots: NDArray[np.integer],
    rows: Integers,
    positions: Integers,
    *,
    begin: int = 0,
) -> Iterator[QueryGroup]:
    """Divide query tokens into groups: one for the trunk, and clusters with longer prefixes.

    Args:
        trunk: First slots of all sequences.
        slots: The slots after the trunk, shape `(sequences, longest)`; entries after the end of
            a sequence are undefined.
        rows: Index of each query token's sequence.
        positions: Position of each query token in its sequence.
        begin: Number of slots after the trunk that all sequences share, too few for a prefix.
    """
    lengths = positions + 1 - len(trunk)
    waiting = [(np.arange(len(lengths)), begin)]
    while waiting:
        members, shared = waiting.pop()
        clusters = list(_clusters(slots, rows, lengths, members, shared, len(trunk)))
        waiting += clusters
        if clusters:
            members = np.setdiff1d(
                members, np.concatenate([cluster for cluster, _ in clusters])
            )
        if len(members):
            shared = 0 if shared == begin else shared
            prefix = np.concatenate([trunk, slots[rows[members[0]], :shared].astype(np.int64)])
            suffix_lengths = lengths[members] - shared
            for part in _similar_lengths(suffix_lengths, len(prefix)):
                suffixes = _suffixes(slots, rows[members[part]], shared, suffix_lengths[part])
                yield QueryGroup(members[part], prefix, suffixes)


def _clusters(  # noqa: PLR0917 - the state of `_groups`
    slots: NDArray[np.integer],
    rows: Integers,
    lengths: Integers,
    members: Integers,
    shared: int,
    trunk: int,
) -> Iterator[tuple[Integers, int]]:
    """Yield query tokens whose longer shared prefix justifies a separate group.

    Yields:
        A subset of the members, which share `shared` slots after the trunk, and the number of
        slots after the trunk that the subset shares.
    """
    candidates = members[lengths[members] > shared + 1]  # the last slot is the query token's
    longest = int(lengths[members].max()) - shared
    min_saved = (_GROUP_COST + trunk + shared) // _GATHER_COST  # in slots
    if not len(candidates) or len(candidates) * longest <= min_saved:
        return
    keys = slots[rows[candidates], shared]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    bounds = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    bounds = np.concatenate([[0], bounds, [len(keys)]])
    counts = bounds[1:] - bounds[:-1]
    # Only contiguous slots of a single token save gathering.
    singles = candidates[order[bounds[:-1]]]
    spans = slots[rows[singles], lengths[singles] - 2] - keys[bounds[:-1]]
    may_save = (counts > 1) | (spans == lengths[singles] - 2 - shared)
    for index in np.flatnonzero(may_save & (counts * longest > min_saved)).tolist():
        cluster = candidates[order[bounds[index] : bounds[index + 1]]]
        end = int(lengths[cluster].min()) - 1
        cluster_slots = slots[rows[cluster], shared:end]
        added = _shared_columns(cluster_slots)
        if _saves_gathering(len(cluster), trunk + shared, cluster_slots[0, :added]):
            yield cluster, shared + added


def _shared_columns(slots: NDArray[np.integer]) -> int:
    """Return the number of leading columns in which all rows are equal."""
    same = (slots == slots[0]).all(axis=0)
    return len(same) if same.all() else int(same.argmin())


def _saves_gathering(members: int, shared: int, added: NDArray[np.integer]) -> bool:
    """Whether a separate group saves more gathering than it costs.

    Args:
        members: Number of its query tokens.
        shared: Number of slots that they share with other query tokens.
        added: Further slots that they share; contiguous slots cost less.
    """
    saved, prefix = _GATHER_COST * members * len(added), shared + len(added)
    is_contiguous = bool((added[1:] - added[:-1] == 1).all())
    return saved > _GROUP_COST + (1 if is_contiguous else _GATHER_COST) * prefix


def _similar_lengths(lengths: Integers, prefix: int) -> Iterator[Integers]:
    """Divide tokens with suffixes of these lengths into groups of limited size."""
    max_rows = max(1, min(len(lengths), _MAX_SCORES // max(1, prefix)))
    limits = BatchLimits(max_tokens=_MAX_GATHERED_SLOTS, max_rows=max_rows)
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
