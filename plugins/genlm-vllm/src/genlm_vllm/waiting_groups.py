"""`WaitingGroups`: group queries before vLLM has places for their sequences."""

from __future__ import annotations

from genlm.plugin import GroupQuery, GroupTurns
from genlm_vllm.running_requests import RunningRequests

__all__ = ["WaitingGroups"]


class WaitingGroups:
    """Group queries that are not computed yet.

    If vLLM has too few places for the requests of all populations, those that continue their
    requests are computed first: beginning a request ends an idle one, which is begun again at
    the next step of its population.

    Args:
        requests: The requests in vLLM.
    """

    def __init__(self, requests: RunningRequests) -> None:
        self._requests = requests
        self._turns = GroupTurns()
        self._groups: dict[int, GroupQuery] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: GroupQuery) -> bool:
        """Add a group, unless there are places for it; return whether it waits."""
        cost = self._cost(group)
        if cost:
            self._requests.end_dropped()
        waits = bool(cost) and (bool(self._groups) or cost > self._requests.unused_places)
        if waits:
            self._groups[group.query_id] = group
        return waits

    def drop(self, query_id: int) -> None:
        """Remove a group, if it waits."""
        self._groups.pop(query_id, None)

    def drop_all(self) -> list[int]:
        """Remove all groups and return their ids."""
        dropped = list(self._groups)
        self._groups.clear()
        return dropped

    def take(self, *, is_idle: bool) -> list[GroupQuery]:
        """Remove the groups that the next step computes.

        Args:
            is_idle: Whether no other group is computed; at least one is then returned.
        """
        if not self._groups:
            return []
        self._requests.end_dropped()
        groups = list(self._groups.values())
        costs = {group.query_id: self._cost(group) for group in groups}
        available = self._requests.unused_places
        is_short = sum(costs.values()) > available
        if is_short:
            first, *others = self._turns.order(groups, costs, available)
            begins = is_idle or not costs[first.query_id] or self._turns.is_overdue(first)
            chosen = [first] if begins else []
            available -= costs[first.query_id] if begins else 0
            for group in others:
                if costs[group.query_id] <= (available if is_idle else 0):
                    available -= costs[group.query_id]
                    chosen.append(group)
        else:
            chosen = groups
        self._turns.record(groups, chosen, is_short=is_short)
        for group in chosen:
            del self._groups[group.query_id]
        return chosen

    @property
    def lacks_places(self) -> bool:
        """Whether there are too few places for any of the groups."""
        self._requests.end_dropped()
        available = self._requests.unused_places
        return all(self._cost(group) > available for group in self._groups.values())

    def _cost(self, group: GroupQuery) -> int:
        """Return the number of places that a group needs beside those of its population."""
        base = group.generation.with_state()
        state = base.state if base is not None and isinstance(base.state, list) else []
        names = self._requests.by_name
        living = sum(resident is not None and resident.name in names for resident in state)
        return max(0, len(group.wanted) - living)
