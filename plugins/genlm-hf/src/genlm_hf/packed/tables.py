"""The plan of a packed forward pass over tokens that continue rows of a block table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from genlm.prefix import TableBatch
from genlm_hf.packed.plan import (
    GATHER_COST,
    GROUP_COST,
    Integers,
    PackedPlan,
    QueryGroup,
    saves_gathering,
    similar_lengths,
)

__all__ = ["plan_table"]


def plan_table(batch: TableBatch) -> PackedPlan:
    """Plan the pass: query tokens, in groups that share a prefix."""
    groups = list(_groups(batch))
    order = np.concatenate([group.members for group in groups])
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return PackedPlan(
        tokens=batch.tokens[order],
        positions=batch.positions[order],
        writes=batch.writes[order],
        groups=groups,
        chunks=[],
        results=places[batch.results],
    )


def _groups(batch: TableBatch) -> Iterator[QueryGroup]:
    """Divide query tokens into groups: those of the trunk, and clusters that share more."""
    lengths = batch.positions + 1 - len(batch.trunk)
    waiting = [(np.arange(len(lengths)), 0)]
    while waiting:
        members, shared = waiting.pop()
        row = batch.slots[batch.rows[members[0]]]
        prefix = np.concatenate([batch.trunk, row[:shared].astype(np.int64)])
        clusters = list(_clusters(batch, lengths, members, shared))
        waiting += clusters
        if clusters:
            members = np.setdiff1d(members, np.concatenate([each for each, _ in clusters]))
        if len(members):
            suffixes = lengths[members] - shared
            for part in similar_lengths(suffixes, len(prefix)):
                own, longest = members[part], suffixes[part]
                yield QueryGroup(own, prefix, _suffixes(batch, own, shared, longest))


def _clusters(
    batch: TableBatch, lengths: Integers, members: Integers, shared: int
) -> Iterator[tuple[Integers, int]]:
    """Yield query tokens whose longer shared prefix justifies a separate group.

    Args:
        batch: The pass.
        lengths: Slots of each query token after the trunk.
        members: The query tokens to divide.
        shared: Number of slots after the trunk that all of them share.

    Yields:
        A subset of the members, and the number of slots after the trunk that these share.
    """
    others = members[lengths[members] > shared + 1]  # the last slot is a token's own
    longest = int(lengths[members].max()) - shared
    least = (GROUP_COST + len(batch.trunk) + shared) // GATHER_COST  # slots to be saved
    if len(others) * longest <= least:
        return
    keys = batch.slots[batch.rows[others], shared]
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order], prepend=-1, append=-1))
    counts = np.diff(bounds)
    for place in np.flatnonzero(counts * longest > least).tolist():
        cluster = others[order[bounds[place] : bounds[place + 1]]]
        most = int(lengths[cluster].min()) - 1
        slots = batch.slots[batch.rows[cluster], :most]
        same = (slots[:, shared:] == slots[0, shared:]).all(axis=0)
        added = most - shared if same.all() else int(same.argmin())
        prefix = len(batch.trunk) + shared + added
        if saves_gathering(len(cluster), added, prefix, slots[0, shared : shared + added]):
            yield cluster, shared + added


def _suffixes(batch: TableBatch, queries: Integers, shared: int, lengths: Integers) -> Integers:
    """Return the slots after a prefix, padded with the last of each; see `QueryGroup`."""
    rows, longest = batch.rows[queries], int(lengths.max())
    suffixes = batch.slots[rows, shared : shared + longest].astype(np.int64)
    if lengths.min() < longest:
        last = suffixes[np.arange(len(rows)), lengths - 1]
        after = np.arange(longest) >= lengths[:, None]
        suffixes = np.where(after, last[:, None], suffixes)
    return suffixes
