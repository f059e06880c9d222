"""Chooses populations whose sequences llama.cpp's memory can hold together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from genlm.plugin import GroupQuery, GroupTurns, oldest_first
from genlm_llamacpp.sequences import Sequences


class Populations:
    """Chooses the populations of a step.

    Args:
        sequences: The sequences of the context.
        max_rows: Maximum number of rows of a step.
    """

    def __init__(self, sequences: Sequences, max_rows: int) -> None:
        self._sequences, self._max_rows = sequences, max_rows
        self._turns = GroupTurns()

    def choose(self, pending: Sequence[GroupQuery]) -> Sequence[GroupQuery]:
        """Choose groups of one adapter that are computed together.

        If there are too few sequences for all groups, the oldest populations are computed
        first, and the sequences of the youngest ones are evicted for them. The others wait; see
        `GroupTurns`.
        """
        if len(pending) == 1:
            return pending
        groups = oldest_first(pending)
        needs = [self._needs(group) for group in groups]
        costs = {group.query_id: need.cost for group, need in zip(groups, needs, strict=True)}
        available = self._sequences.available
        is_short = sum(costs.values()) > available
        if is_short:
            groups = self._turns.order(groups, lambda g: costs[g.query_id] <= available)
            continued = [seq_id for need in reversed(needs) for seq_id in need.continued]
            unused = set().union(*(need.unused for need in needs)).difference(continued)
            self._sequences.sort_for_eviction(unused, continued)
        else:
            groups = list(pending)
        chosen: list[GroupQuery] = []
        rows = needed = 0
        for group in groups:
            is_excess = rows + len(group.wanted) > self._max_rows or (
                is_short and needed + costs[group.query_id] > available
            )
            if chosen and (is_excess or group.adapter != chosen[0].adapter):
                continue
            chosen.append(group)
            rows += len(group.wanted)
            needed += costs[group.query_id]
        self._turns.record(groups, chosen, is_short=is_short)
        return chosen

    def defers(self, pending: Sequence[GroupQuery]) -> bool:
        """Whether groups should wait for the next requests of other populations.

        This is the case if there are too few sequences for any of them: their computation would
        evict sequences that these requests continue.
        """
        return min(self._needs(group).cost for group in pending) > self._sequences.available

    def _needs(self, group: GroupQuery) -> _Needs:
        base = group.generation.root
        if base.state is None:
            return _Needs([], set(), len(group.wanted))
        places = group.generation.lineage.origins(group.wanted, base.lineage)
        sequences = base.lineage.sequences(np.arange(len(base.lineage)))
        keys = [sequence.key for sequence in sequences]
        cached = self._sequences.idle_by_key(group.adapter, keys)
        continued = dict.fromkeys(
            cached[keys[place]] for place in places.tolist() if keys[place] in cached
        )
        seq_ids = set(cached.values())
        cost = max(0, len(group.wanted) - len(seq_ids))
        return _Needs(list(continued), seq_ids.difference(continued), cost)


class _Needs(NamedTuple):
    """What a group needs of the cache.

    Attributes:
        continued: Sequences that its members continue.
        unused: Sequences of its population that no member continues.
        cost: Number of further sequences for its members.
    """

    continued: list[int]
    unused: set[int]
    cost: int
