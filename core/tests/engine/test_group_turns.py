"""Laws: the oldest populations come first, and none waits for ever."""

from __future__ import annotations

import numpy as np

from genlm.plugin import (
    Generation,
    GroupQuery,
    GroupTurns,
    Lineage,
    Rows,
    TokenSequence,
    oldest_first,
)


def groups(count: int) -> list[GroupQuery]:
    """Return the queries of populations, oldest first."""
    zero = np.zeros(1, np.int64)
    generations = [
        Generation(Lineage.of_sequences([TokenSequence.of([i])])) for i in range(count)
    ]
    return [
        GroupQuery(number, generation.extended(zero, zero[:, None])[0], zero, zero, Rows())
        for number, generation in enumerate(generations)
    ]


def test_populations_are_sorted_by_the_creation_of_their_first_generation() -> None:
    young = groups(4)
    oldest = young.pop(2)
    extended, _ = oldest.generation.extended(np.zeros(2, np.int64), np.array([[1], [2]]))
    later = GroupQuery(9, extended, np.arange(2), np.arange(2), Rows())
    assert [group.query_id for group in oldest_first([young[2], later, young[0]])] == [0, 9, 3]


def test_the_oldest_population_that_fits_is_the_first() -> None:
    turns, (first, second, third) = GroupTurns(), groups(3)
    pending = [third, second, first]
    for fitting, expected in (
        ({0, 1, 2}, [first, second, third]),
        ({1, 2}, [second, first, third]),
        ({2}, [third, first, second]),
        (set(), [first, second, third]),
    ):
        fits = {group: group.query_id in fitting for group in pending}.__getitem__
        assert turns.order(pending, fits) == expected


def test_a_group_that_has_waited_for_64_choices_is_the_first() -> None:
    turns, (first, second, third) = GroupTurns(), groups(3)

    def fits(group: GroupQuery) -> bool:
        return group is first

    for _ in range(100):  # there is room for all groups
        turns.record([first, second], [first], is_short=False)
    for choice in range(64):
        pending = [first, second] if choice < 10 else [first, second, third]
        assert turns.order(pending, fits)[0] is first
        turns.record(pending, [first], is_short=True)
    turns.record([first, second, third], [first], is_short=True)
    assert turns.order([first, second, third], fits)[0] is second
    turns.record([first, second, third], [second], is_short=True)
    assert turns.order([first, second, third], fits)[0] is first
