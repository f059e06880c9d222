"""`GroupTurns`: the order of populations if the cache is too small for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from genlm.core.queries.query import GroupQuery

_MAX_DEFERRALS = 64
"""Maximum number of choices of other groups for which a group waits while room is scarce."""


class GroupTurns:
    """Order of populations whose cached state does not fit into the cache together.

    The oldest populations are computed first, so that few populations alternate. The others
    wait, at most for 64 choices of other groups.
    """

    def __init__(self) -> None:
        # Number of choices that a pending group has waited for, by query id.
        self._deferrals: dict[int, int] = {}

    def order(
        self,
        groups: Sequence[GroupQuery],
        fits: Callable[[GroupQuery], bool] = lambda group: True,  # noqa: ARG005
    ) -> list[GroupQuery]:
        """Return groups in the order in which they should be chosen.

        The first group is the oldest one that has waited for too long, or else the oldest one
        that fits, or else the oldest one. The others follow by age.

        Args:
            groups: At least one group.
            fits: Returns whether the cache has room for a group without the eviction of
                older populations; by default, it has.
        """
        by_age = oldest_first(groups)
        overdue = [group for group in by_age if self.is_overdue(group)]
        first = next(iter(overdue or filter(fits, by_age)), by_age[0])
        return [first, *(group for group in by_age if group is not first)]

    def is_overdue(self, group: GroupQuery) -> bool:
        """Whether a group has waited for too long."""
        return self._deferrals.get(group.query_id, 0) > _MAX_DEFERRALS

    def record(
        self, pending: Sequence[GroupQuery], chosen: Sequence[GroupQuery], *, is_short: bool
    ) -> None:
        """Count a choice for the groups that were not chosen, if room was scarce."""
        waiting = {group.query_id for group in pending} - {group.query_id for group in chosen}
        self._deferrals = {
            query_id: self._deferrals.get(query_id, 0) + is_short for query_id in waiting
        }


def oldest_first(groups: Sequence[GroupQuery]) -> list[GroupQuery]:
    """Return groups by the age of their populations."""
    return sorted(groups, key=lambda group: group.generation.lineage.number)
