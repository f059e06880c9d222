"""The plan of one packed forward pass: its tokens, their order, and their attention groups.

The pass is one sequence of tokens for the model, `[1, tokens]`: first single query tokens,
group by group, then prefill chunks. A query token attends to its whole past. Query tokens
whose paths through the tree have a prefix in common form a group: attention reads the shared
prefix once, as one matrix, and gathers the suffix of each. The plan holds numbers only;
`packed.device_plan` copies it to devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    "PackedPlan",
    "PrefillChunk",
    "QueryGroup",
    "QueryToken",
    "group_tokens",
    "plan_forward",
]

# In slots read, measured on two CPU cores: a group costs as much as reading 2,000
# slots, and gathering a slot as much as reading three.
_GROUP_COST = 2000
_GATHER_COST = 3

# Most slots gathered at once: 128 MiB a layer at 2 KiB a slot.
_GATHERED_AT_ONCE = 2**16

# Most scores of a head between the tokens of a group and the prefix that they share.
_SCORES_AT_ONCE = 2**22

# Nodes of up to this many uncached tokens run faster as query tokens than as a chunk.
_LONGEST_UNGROUPED = 8

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class QueryToken:
    """One token to run.

    Attributes:
        token: Its id.
        position: Its position in its sequence, from 0.
        write: The slot for its keys and values; the scratch slot if it is cached.
        node: The node of the tree that holds it.
    """

    token: int
    position: int
    write: int
    node: Node


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Query tokens with a shared prefix.

    Attributes:
        tokens: At least one.
        prefix: Slots of the first tokens of every sequence, without the query tokens' own.
        suffixes: The slots after the prefix up to the query token's own, shape (tokens,
            longest suffix); shorter suffixes are padded with the query token's own slot.
    """

    tokens: Sequence[QueryToken]
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
        positions: Position of each in its own sequence.
        writes: The slot that takes the keys and values of each.
        groups: Groups of the first tokens of the pass.
        chunks: Chunks of the tokens after the groups.
        results: Index in the pass of each token whose logits are wanted.
    """

    tokens: Integers
    positions: Integers
    writes: Slots
    groups: Sequence[QueryGroup]
    chunks: Sequence[PrefillChunk]
    results: Integers


def plan_forward(batch: TreeBatch) -> PackedPlan:
    """Plan the pass that computes the uncached tokens of a tree, and all results."""
    queries, runs = _divided(batch.tree.uncached(), batch.cached_runs())
    groups = list(group_tokens([query for query, _ in queries]))
    slots = dict(queries)
    ordered = [query for group in groups for query in group.tokens]
    tokens = [query.token for query in ordered]
    positions = [query.position for query in ordered]
    writes = [query.write for query in ordered]
    places = {slots[query]: place for place, query in enumerate(ordered)}
    for run in runs:
        own = run.own_slots.tolist()
        places.update(zip(own, range(len(tokens), len(tokens) + len(own)), strict=True))
        tokens.extend(run.tokens)
        positions.extend(range(run.first, run.end))
        is_cached = run.first < run.node.start + run.node.computed
        writes.extend([SCRATCH_SLOT] * len(own) if is_cached else own)
    return PackedPlan(
        tokens=np.array(tokens, np.int64),
        positions=np.array(positions, np.int64),
        writes=np.array(writes, np.int64),
        groups=groups,
        chunks=[PrefillChunk(run.first, run.node.path_slots(0, run.end)) for run in runs],
        results=np.array([places[slot] for slot in batch.wanted_slots()], np.int64),
    )


def _divided(
    uncached: Sequence[Node], cached: Sequence[TokenRun]
) -> tuple[list[tuple[QueryToken, int]], list[TokenRun]]:
    """Divide tokens into query tokens with their slots, and runs that are prefill chunks."""
    queries: list[tuple[QueryToken, int]] = []
    long: list[TokenRun] = []
    new = [TokenRun(node, node.start + node.computed, node.end) for node in uncached]
    for runs, is_cached in ((new, False), (cached, True)):
        for run in runs:
            if run.end - run.first > _LONGEST_UNGROUPED:
                long.append(run)
                continue
            for place, (token, slot) in enumerate(
                zip(run.tokens, run.own_slots.tolist(), strict=True), run.first
            ):
                write = SCRATCH_SLOT if is_cached else slot
                queries.append((QueryToken(token, place, write, run.node), slot))
    return queries, long


def group_tokens(queries: Sequence[QueryToken]) -> Iterator[QueryGroup]:
    """Divide query tokens into groups, each token into exactly one.

    From the leaves upwards, query tokens move to the parent node until a group of their
    own, with a longer shared prefix, saves more gathering than it costs.
    """
    waiting: dict[Node, list[QueryToken]] = {}
    shortest: dict[Node, int] = {}
    for query in queries:
        waiting.setdefault(query.node, []).append(query)
        known = shortest.get(query.node, query.position)
        shortest[query.node] = min(known, query.position)
    # Descendants end after their ancestors; a root has length 0.
    for node in sorted(_nodes_above(waiting), key=lambda node: node.end, reverse=True):
        members = waiting.pop(node, [])
        prefix = shortest.get(node, node.end)
        if node.parent is None or _is_worth_a_group(node, len(members), prefix):
            yield from _cut_to_size(members, prefix)
        else:
            waiting.setdefault(node.parent, []).extend(members)


def _nodes_above(nodes: dict[Node, list[QueryToken]]) -> set[Node]:
    found: set[Node] = set()
    for start in nodes:
        node: Node | None = start
        while node is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


def _is_worth_a_group(node: Node, members: int, prefix: int) -> bool:
    """Whether a prefix of that length saves more than the parent's does."""
    saved = _GATHER_COST * members * (prefix - node.start)
    if saved <= _GROUP_COST + prefix:
        return False
    is_contiguous = bool((np.diff(node.slots) == 1).all())
    return saved > _GROUP_COST + (1 if is_contiguous else _GATHER_COST) * prefix


def _cut_to_size(members: Sequence[QueryToken], prefix: int) -> Iterator[QueryGroup]:
    """Group similar lengths and bound the slots gathered and the scores computed at once."""
    most = max(1, min(len(members), _SCORES_AT_ONCE // max(1, prefix)))
    limits = BatchLimits(max_tokens=_GATHERED_AT_ONCE, max_rows=most)
    for chosen in plan_batches([query.position + 1 - prefix for query in members], limits):
        yield _group([members[i] for i in chosen], prefix)


def _group(queries: Sequence[QueryToken], prefix: int) -> QueryGroup:
    longest = max(query.position for query in queries) + 1 - prefix
    suffixes = np.empty((len(queries), longest), np.int64)
    for suffix, query in zip(suffixes, queries, strict=True):
        end = query.position + 1
        query.node.write_path_slots(suffix, prefix, end)
        if end - prefix < longest:
            suffix[end - prefix :] = suffix[end - prefix - 1]
    return QueryGroup(queries, queries[0].node.path_slots(0, prefix), suffixes)
