"""`WaitingGroups`: group queries before vLLM has room for their sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from genlm.plugin import Generation, GroupQuery, GroupTurns
from genlm_vllm.idle_requests import IdleRequests
from genlm_vllm.member_requests import MemberRequests
from genlm_vllm.pending_query import PendingQuery
from genlm_vllm.running_requests import Room, RunningRequests

_CANDIDATES = 4
"""Maximum number of sequences of the groups among which a step chooses, as a multiple of the
number of requests that vLLM can run. The costs of all of them are computed at each step."""


class WaitingGroups:
    """Group queries that are not computed yet.

    If vLLM has too few places or KV blocks for the requests of all populations, the oldest
    populations are computed first. For them, requests of the youngest ones end, which are begun
    again when there is room.

    Args:
        requests: The requests in vLLM.
        idle: Ends those that no query in progress needs.
        in_progress: The queries in progress, by id.
    """

    def __init__(
        self,
        requests: RunningRequests,
        idle: IdleRequests,
        in_progress: Mapping[int, PendingQuery],
    ) -> None:
        self._requests = requests
        self._idle = idle
        self._in_progress = in_progress
        self._turns = GroupTurns()
        self._groups: dict[int, GroupQuery] = {}
        self._ancestries: dict[int, _Ancestry] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def query_ids(self) -> list[int]:
        """Ids of the groups."""
        return list(self._groups)

    def add(self, group: GroupQuery) -> None:
        """Add a group."""
        self._groups[group.query_id] = group

    def drop(self, query_id: int) -> None:
        """Remove a group, if it waits."""
        self._groups.pop(query_id, None)
        self._ancestries.pop(query_id, None)

    def take(self) -> list[GroupQuery]:
        """Remove and return the groups that the next step computes.

        At least one group is returned if there is one and no other group is computed.
        """
        if not self._groups:
            return []
        available = self._idle.free_room
        chosen = groups = self._candidates(available)
        total = sum(map(self._max_cost, groups), np.zeros(2, np.int64))
        costs: Mapping[int, Room] = {}
        names: Mapping[int, list[str]] = {}
        if is_short := not _fits(total, available):
            costs = {group.query_id: self._cost(group) for group in groups}
            total = sum(costs.values(), np.zeros(2, np.int64))
            is_short = not _fits(total, available)
        if is_short:
            names = {group.query_id: self._names(group) for group in groups}
            pending = set().union(*names.values())
            unused = self._requests.unused()
            self._idle.make_room(
                total, [name for name in unused if name not in pending], partly=True
            )
            is_short = not _fits(total, self._idle.free_room)
        if is_short:
            chosen = self._choose(groups, costs, names)
        self._turns.record([*self._groups.values()], chosen, is_short=is_short)
        for group in chosen:
            self.drop(group.query_id)
        return chosen

    def _candidates(self, available: Room) -> list[GroupQuery]:
        """Return all groups, or the oldest ones if they have many sequences."""
        groups = list(self._groups.values())
        places = len(self._requests.by_name) + int(available[0])
        limit = _CANDIDATES * places
        if sum(len(group.wanted) for group in groups) <= limit:
            return groups
        groups = self._turns.order(groups)
        counts = np.cumsum([len(group.wanted) for group in groups])
        return groups[: 1 + int(np.searchsorted(counts, limit))]

    def _choose(
        self,
        groups: Sequence[GroupQuery],
        costs: Mapping[int, Room],
        names: Mapping[int, list[str]],
    ) -> list[GroupQuery]:
        """Choose groups if there is too little room for all, and end requests of others.

        The oldest populations are chosen, and the requests of the youngest ones end for them.
        """
        younger = self._turns.order(groups)
        first = younger[0]
        is_overdue = self._turns.is_overdue(first)
        chosen: list[GroupQuery] = []
        kept: set[str] = set()
        available, needed = self._idle.free_room, np.zeros(2, np.int64)
        sequences, may_end = 0, True
        while younger:
            group, *younger = younger
            cost = costs[group.query_id]
            kept.update(names[group.query_id])
            if may_end and not _fits(cost, available - needed):
                others = [name for each in reversed(younger) for name in names[each.query_id]]
                ended = self._idle.make_room(
                    needed + cost, [name for name in others if name not in kept]
                )
                younger = [each for each in younger if ended.isdisjoint(names[each.query_id])]
                available, may_end = self._idle.free_room, bool(ended)
            # A population that begins would end again as soon as older ones need a block.
            margin = np.array([0, sequences + len(group.wanted) if chosen and cost[0] else 0])
            if _fits(cost, available - needed - margin):
                chosen.append(group)
                needed += cost
                sequences += len(group.wanted)
            elif is_overdue and group is first:
                break
        if not chosen and (is_overdue or not self._computes_groups):
            others = [
                name for name in self._requests.by_name if name not in names[first.query_id]
            ]
            self._idle.make_room(costs[first.query_id], others, partly=True)
            chosen.append(first)
        return chosen

    @property
    def _computes_groups(self) -> bool:
        """Whether groups are in progress."""
        queries = (pending.query for pending in self._in_progress.values())
        return any(isinstance(query, GroupQuery) for query in queries)

    @property
    def lacks_room(self) -> bool:
        """Whether there is too little room for any of the groups."""
        available = self._idle.free_room
        groups = self._candidates(available)
        return not any(_fits(self._cost(group), available) for group in groups)

    def _max_cost(self, group: GroupQuery) -> Room:
        """Return the room that a group would need without its requests and shared blocks."""
        lengths = group.generation.lineage.lengths[group.wanted]
        size = self._requests.block_tokens
        return np.array([len(lengths), 0 if size is None else (-(-lengths // size)).sum()])

    def _cost(self, group: GroupQuery) -> Room:
        """Return the room that a group needs in addition to that of its population."""
        lineage, wanted = group.generation.lineage, group.wanted
        ancestry = self._ancestry(group)
        residents, lengths, *_ = MemberRequests.of(ancestry.root, ancestry.sources)
        lengths = np.where(lengths, lengths, ancestry.root.lineage.lengths)
        names, size = self._requests.by_name, self._requests.block_tokens
        living = [resident is not None and resident.name in names for resident in residents]
        is_living = np.array(living, bool)
        parents = ancestry.parents
        # The requests of other members stay; those without a member end.
        is_free = is_living.copy()
        is_free[ancestry.others] = False
        is_free[parents] = is_living[parents]
        places = max(0, len(wanted) - np.count_nonzero(is_free))
        if size is None:
            return np.array([places, 0])
        full, rest = np.divmod(lengths, size)
        # Sequences share the full blocks of their parents; a parent's last block is freed or
        # continued.
        blocks = int((-(-lineage.lengths[wanted] // size) - full[parents]).sum())
        blocks -= int(np.count_nonzero(rest[is_free]))
        ended = np.unique(parents[~is_living[parents]]).tolist()
        if ended:
            blocks += self._requests.missing_blocks(
                (getattr(residents[place], "request", None), int(full[place]))
                for place in ended
            )
        return np.array([places, max(0, blocks)])

    def _names(self, group: GroupQuery) -> list[str]:
        """Return the names of the requests that a group continues."""
        ancestry = self._ancestry(group)
        residents = MemberRequests.of(ancestry.root, ancestry.sources).states
        chosen = residents[np.unique(ancestry.parents)]
        return [resident.name for resident in chosen if resident is not None]

    def _ancestry(self, group: GroupQuery) -> _Ancestry:
        """Return the ancestry of a group, which is computed again if its root has changed."""
        root, known = group.generation.root, self._ancestries.get(group.query_id)
        if known is None or known.root is not root or known.joined is not root.joined:
            known = self._ancestries[group.query_id] = _Ancestry.of(group, root)
        return known


class _Ancestry(NamedTuple):
    """The sequences that a group extends. It is the same for all choices while a group waits.

    Attributes:
        root: The nearest generation that was computed, or the first one.
        joined: Its attribute `joined`, a new list after it was computed.
        sources: Its sources.
        parents: Index in it of the sequence that each wanted sequence extends.
        others: Indices in it of those that the other sequences of the group extend.
    """

    root: Generation
    joined: list[Any]
    sources: list[Any]
    parents: npt.NDArray[np.int64]
    others: npt.NDArray[np.int64]

    @classmethod
    def of(cls, group: GroupQuery, root: Generation) -> _Ancestry:
        """Return the ancestry of a group with this root."""
        lineage, wanted = group.generation.lineage, group.wanted
        others = np.delete(np.arange(len(lineage)), wanted)
        parents, of_others = (lineage.origins(each, root.lineage) for each in (wanted, others))
        return cls(root, root.joined, root.sources(), parents, of_others)


def _fits(cost: Room, available: Room) -> bool:
    """Whether there is room; what needs no further room always fits."""
    return bool((cost <= np.maximum(available, 0)).all())
