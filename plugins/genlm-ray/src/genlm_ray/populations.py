"""`Populations`: the replicas of this driver's populations, and the messages to them.

A population stays with the replica that computed it first, which keeps its generations by
number: a message contains the new columns only. When the replica is lost, its unanswered
groups are recomputed on another one, from all columns.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from genlm.plugin import GroupQuery
from genlm_ray.router import Router
from genlm_ray.wire import PackedGroup, packed_group

__all__ = ["Populations"]


class _Placed:
    """The state of a generation: its replica and its number there.

    It is dropped on any thread, when the last population that refers to it is.
    """

    __slots__ = ("_dropped", "number", "replica")

    def __init__(self, replica: int, number: int, dropped: deque[int]) -> None:
        self.replica, self.number, self._dropped = replica, number, dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)


class _Sent(NamedTuple):
    group: GroupQuery
    replica: int


class Populations:
    """The group queries that are unanswered, by replica.

    Args:
        router: Names the replica with the least work, and counts groups as work.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._waiting: dict[int, GroupQuery] = {}
        self._sent: dict[int, _Sent] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Number of unanswered groups."""
        return len(self._waiting) + len(self._sent)

    def submit(self, group: GroupQuery) -> None:
        """Accept a group, which `take` assigns to a replica."""
        self._waiting[group.query_id] = group

    def take(self, dropped: Mapping[int, deque[int]]) -> dict[int, list[PackedGroup]]:
        """Choose a replica for each waiting group; they count as sent.

        Args:
            dropped: For each replica that takes groups, the collection of numbers of dropped
                generations.

        Returns:
            The messages by replica.
        """
        taken: dict[int, list[PackedGroup]] = {}
        for query_id, group in list(self._waiting.items()):
            replica = self._holder(group)
            if replica is None:
                replica = self._router.idlest()
            if replica is None or replica not in dropped:
                continue
            del self._waiting[query_id]
            self._sent[query_id] = _Sent(group, replica)
            self._router.charge(replica, len(group.wanted))
            packed = self._packed(group, replica, dropped[replica])
            taken.setdefault(replica, []).append(packed)
        return taken

    def finished(self, query_id: int, replica: int | None = None) -> bool:
        """Forget a group that a replica has answered, or that is aborted.

        Returns:
            Whether it was unanswered and assigned to that replica.
        """
        if replica is None and self._waiting.pop(query_id, None) is not None:
            return True
        sent = self._sent.get(query_id)
        if sent is None or (replica is not None and sent.replica != replica):
            return False
        del self._sent[query_id]
        self._router.charge(sent.replica, -len(sent.group.wanted))
        return True

    def refused(self, query_id: int, replica: int) -> bool:
        """Forget a group whose message failed: the replica does not know the generation."""
        sent = self._sent.get(query_id)
        if not self.finished(query_id, replica):
            return False
        assert sent is not None  # noqa: S101 - it was unanswered
        state = sent.group.generation.state
        if isinstance(state, _Placed):
            state.replica = -1
        return True

    def sent_to(self, query_id: int) -> int | None:
        """The replica that computes a group, None if it waits or is unknown."""
        sent = self._sent.get(query_id)
        return None if sent is None else sent.replica

    def in_flight(self, replica: int) -> int:
        """Number of groups that a replica computes."""
        return sum(sent.replica == replica for sent in self._sent.values())

    def reassign_from(self, replica: int) -> None:
        """Move a replica's groups to others, which get all columns; oldest first."""
        lost = {key: each.group for key, each in self._sent.items() if each.replica == replica}
        for query_id in lost:
            del self._sent[query_id]
        self._waiting = {**lost, **self._waiting}

    def _holder(self, group: GroupQuery) -> int | None:
        """The replica that has the generation or one that it extends, if it is not lost."""
        base = group.generation.with_state()
        state = None if base is None else base.state
        is_placed = isinstance(state, _Placed) and state.replica in self._router.replicas
        return state.replica if is_placed and state is not None else None

    def _packed(self, group: GroupQuery, replica: int, dropped: deque[int]) -> PackedGroup:
        """Pack a group, whose generation the replica then knows by its number."""
        generation, known, lineage = group.generation, -1, None
        base = generation.with_state()
        state = None if base is None else base.state
        if base is not None and isinstance(state, _Placed) and state.replica == replica:
            known, lineage = state.number, base.lineage
            if base is generation:
                return packed_group(group, known, known, lineage)
        number = next(self._numbers)
        packed = packed_group(group, number, known, lineage)
        generation.keep(_Placed(replica, number, dropped))
        return packed
