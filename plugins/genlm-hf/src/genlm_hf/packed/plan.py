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
        suffixes  (3, s)   a a a 0          one row each; its last slot, here 0, 1 or 2, is
                           b 1 1 1          the query token's own, which also pads the row
                           c c 2 2

    PrefillChunk
        slots     (past + 4,)   x x x x x | c0 c1 c2 c3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genlm.prefix import (
    SCRATCH_SLOT,
    BatchLimits,
    Node,
    Slots,
    TokenRun,
    TreeBatch,
    plan_batches,
)

__all__ = [
    "GATHER_COST",
    "GROUP_COST",
    "PackedPlan",
    "PrefillChunk",
    "QueryGroup",
    "group_tokens",
    "plan_forward",
    "saves_gathering",
    "similar_lengths",
]

# In slots read, measured on two CPU cores: a group costs as much as reading 2,000
# slots, and gathering a slot as much as reading three.
GROUP_COST = 2000
GATHER_COST = 3

# Maximum slots gathered at once: 128 MiB a layer at 2 KiB a slot.
_GATHERED_AT_ONCE = 2**16

# Maximum scores of a head between the tokens of a group and the prefix that they share.
_SCORES_AT_ONCE = 2**22

# Nodes of up to this many uncached tokens run faster as query tokens than as a chunk.
_LONGEST_UNGROUPED = 8

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Query tokens with a shared prefix.

    Attributes:
        members: Indices into all query tokens, at least one.
        prefix: Slots of the first tokens of every sequence, without the query tokens' own.
        suffixes: The slots after the prefix up to the query token's own, shape (members,
            longest suffix); shorter suffixes are padded with the query token's own slot.
    """

    members: Integers
    prefix: Slots
    suffixes: Slots


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence, computed together, or run again for their logits.

    Attributes:
        past: Number of tokens before them.
        slots: Slots of the past and of the chunk.
    """

    past: int
    slots: Slots

    @property
    def length(self) -> int:
        """Number of tokens to compute."""
        return len(self.slots) - self.past


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """One packed forward pass of `len(tokens)` tokens.

    Attributes:
        tokens: Token ids, in the order of the pass.
        positions: Positions of the tokens in their sequences.
        writes: Slots for the tokens' keys and values.
        groups: Groups of the first tokens of the pass.
        chunks: Chunks of the tokens after the groups.
        results: Indices in the pass of the tokens whose logits are requested.
    """

    tokens: Integers
    positions: Integers
    writes: Slots
    groups: Sequence[QueryGroup]
    chunks: Sequence[PrefillChunk]
    results: Integers


def plan_forward(batch: TreeBatch) -> PackedPlan:
    """Plan the pass that computes the uncached tokens of a tree, and all results."""
    uncached = batch.tree.uncached()
    runs = [TokenRun(node, node.start + node.computed, node.end) for node in uncached]
    runs += batch.cached_runs()
    tokens = np.array([token for run in runs for token in run.tokens], np.int64)
    positions = np.array([i for _, first, end in runs for i in range(first, end)], np.int64)
    slots = np.concatenate([run.own_slots for run in runs])
    writes = slots.copy()
    writes[batch.tree.uncached_tokens :] = SCRATCH_SLOT
    lengths = np.array([end - first for _, first, end in runs])
    is_query = np.repeat(lengths <= _LONGEST_UNGROUPED, lengths)
    queries = np.flatnonzero(is_query)
    short = [run for run in runs if run.end - run.first <= _LONGEST_UNGROUPED]
    long = [run for run in runs if run.end - run.first > _LONGEST_UNGROUPED]
    nodes = [node for node, first, end in short for _ in range(first, end)]
    groups = list(group_tokens(nodes, positions[queries]))
    parts = [queries[group.members] for group in groups]
    order = np.concatenate([*parts, np.flatnonzero(~is_query)])
    by_slot = np.argsort(slots[order])
    wanted = np.searchsorted(slots[order], batch.wanted_slots(), sorter=by_slot)
    return PackedPlan(
        tokens=tokens[order],
        positions=positions[order],
        writes=writes[order],
        groups=groups,
        chunks=[PrefillChunk(run.first, run.node.path_slots(0, run.end)) for run in long],
        results=by_slot[wanted],
    )


def group_tokens(nodes: Sequence[Node], positions: Integers) -> Iterator[QueryGroup]:
    """Divide query tokens into groups, each token into exactly one.

    From the leaves upwards, query tokens move to the parent node until a separate
    group with a longer shared prefix saves more gathering than it costs.

    Args:
        nodes: The node of the tree that holds each query token.
        positions: Position of each in its sequence.
    """
    waiting: dict[Node, list[int]] = {}
    places = positions.tolist()
    for index in np.argsort(positions, kind="stable").tolist():
        waiting.setdefault(nodes[index], []).append(index)
    # Descendants end after their ancestors; a root has length 0.
    for node in sorted(_nodes_above(waiting), key=lambda node: node.end, reverse=True):
        members = waiting.pop(node, [])
        if not members:
            continue
        # Tokens of the node itself precede those of its descendants, the shortest first.
        prefix = min(node.end, places[members[0]])
        if node.parent is None or _is_worth_a_group(node, len(members), prefix):
            yield from _cut_to_size(nodes, positions, np.array(members), prefix)
        else:
            waiting.setdefault(node.parent, []).extend(members)


def _nodes_above(nodes: Iterable[Node]) -> Iterable[Node]:
    """Return nodes and all their ancestors, in an order that depends on these nodes only."""
    found: dict[Node, None] = {}
    for start in nodes:
        node: Node | None = start
        while node is not None and node not in found:
            found[node] = None
            node = node.parent
    return found


def _is_worth_a_group(node: Node, members: int, prefix: int) -> bool:
    """Whether a prefix of that length saves more than the parent's does."""
    return saves_gathering(members, prefix - node.start, prefix, node.slots)


def saves_gathering(members: int, added: int, prefix: int, slots: NDArray[np.integer]) -> bool:
    """Whether a separate group saves more gathering than it costs.

    Args:
        members: Its query tokens.
        added: Number of slots that these share in addition to the parent group's.
        prefix: All slots that they share.
        slots: A subset of these slots; a prefix whose slots are contiguous costs less.
    """
    saved = GATHER_COST * members * added
    if saved <= GROUP_COST + prefix:
        return False
    is_contiguous = bool((slots[1:] - slots[:-1] == 1).all())
    return saved > GROUP_COST + (1 if is_contiguous else GATHER_COST) * prefix


def _cut_to_size(
    nodes: Sequence[Node], positions: Integers, members: Integers, prefix: int
) -> Iterator[QueryGroup]:
    """Group similar lengths and bound the slots gathered and the scores computed at once."""
    lengths = positions[members] + 1 - prefix
    for chosen in similar_lengths(lengths, prefix):
        own = members[chosen]
        paths = [nodes[i] for i in own.tolist()]
        suffixes = _suffixes(paths, prefix, lengths[chosen])
        yield QueryGroup(own, paths[0].path_slots(0, prefix), suffixes)


def similar_lengths(lengths: Integers, prefix: int) -> Iterator[Integers]:
    """Divide tokens with suffixes of these lengths into groups that attend at once."""
    most = max(1, min(len(lengths), _SCORES_AT_ONCE // max(1, prefix)))
    limits = BatchLimits(max_tokens=_GATHERED_AT_ONCE, max_rows=most)
    for chosen in plan_batches(lengths, limits):
        yield np.array(chosen)


def _suffixes(nodes: Sequence[Node], prefix: int, lengths: Integers) -> Slots:
    """Return the slots after a prefix, padded with the last of each; see `QueryGroup`."""
    parts = [
        part
        for node, end in zip(nodes, (prefix + lengths).tolist(), strict=True)
        for part in node.path_parts(prefix, end)
    ]
    slots = np.concatenate(parts)
    own = slots[np.cumsum(lengths) - 1]
    suffixes = np.repeat(own[:, None], lengths.max(), axis=1)
    suffixes[np.arange(suffixes.shape[1]) < lengths[:, None]] = slots
    return suffixes
