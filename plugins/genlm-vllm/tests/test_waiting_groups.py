"""Groups that wait for places: which of them begin, and that none waits for ever."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from genlm.plugin import Generation, GroupQuery, Lineage, Rows, TokenSequence
from genlm_vllm.waiting_groups import WaitingGroups


class Places:
    """Counts places; no group has a request yet."""

    by_name: ClassVar[dict[str, Any]] = {}

    def __init__(self, unused_places: int) -> None:
        self.unused_places = unused_places

    def end_dropped(self) -> None:
        """Nothing is dropped."""


def group(query_id: int, count: int) -> GroupQuery:
    members = np.arange(count)
    lineage = Lineage.of_sequences([TokenSequence.of([query_id + 1, i]) for i in range(count)])
    return GroupQuery(query_id, Generation(lineage), members, members, Rows())


def waiting(places: int, *counts: int) -> WaitingGroups:
    requests: Any = Places(places)
    groups = WaitingGroups(requests)
    for query_id, count in enumerate(counts):
        groups.add(group(query_id, count))
    return groups


def ids(groups: list[GroupQuery]) -> list[int]:
    return [one.query_id for one in groups]


def test_a_group_waits_only_if_there_are_too_few_places() -> None:
    requests: Any = Places(4)
    assert not WaitingGroups(requests).add(group(0, 4))
    assert WaitingGroups(requests).add(group(0, 5))


def test_the_oldest_groups_that_fit_begin_when_nothing_else_is_computed() -> None:
    groups = waiting(4, 6, 3, 2, 1)
    assert not groups.take(is_idle=False)
    assert not groups.lacks_places
    assert ids(groups.take(is_idle=True)) == [1, 3]
    assert ids(groups.take(is_idle=True)) == [2]
    assert groups.lacks_places
    assert ids(groups.take(is_idle=True)) == [0]
    assert not groups


def test_a_group_is_not_passed_over_for_ever() -> None:
    groups = waiting(4, 6)
    choices = 0
    while not groups.take(is_idle=False):
        choices += 1
    assert 60 < choices < 70
