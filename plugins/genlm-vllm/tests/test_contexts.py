"""The table of resident contexts, without vLLM."""

from __future__ import annotations

from typing import Any

from genlm.plugin import Query
from genlm_vllm.contexts import ContextTable

IDS = tuple(range(5, 25))


class Resident:
    def __init__(self, name: str) -> None:
        self.name = name


def resident(name: str) -> Any:
    return Resident(name)


def query(length: int, adapter: str | None = None) -> Query:
    return Query(0, IDS[:length], adapter)


def test_the_longest_context_within_reach_is_found() -> None:
    table, first, second = ContextTable(), resident("a"), resident("b")
    table.put(query(4), first)
    table.put(query(8), second)
    assert table.parent(query(10), 10) == (second, 8, list(IDS[8:10]))
    assert table.parent(query(10), 7) == (first, 4, list(IDS[4:10]))
    assert table.parent(query(16), 16).resident is second  # type: ignore[union-attr]
    assert table.parent(query(17), 17) is None
    assert table.parent(query(10, "red"), 10) is None
    assert table.parent(query(8), 8) == (second, 8, [])


def test_a_request_is_found_by_all_of_its_contexts_until_they_are_released() -> None:
    table, request = ContextTable(), resident("a")
    for length in (4, 5, 5, 5, 6):
        table.put(query(length), request)
    for length in (4, 5, 6):
        assert table.parent(query(length), length) == (request, length, [])
    table.release((None, query(5).sequence.key))
    assert table.parent(query(5), 5) == (request, 4, [IDS[4]])
    table.put(query(6), resident("b"))
    assert table.parent(query(5), 5) == (request, 4, [IDS[4]])
    assert (len(table), table.removed) == (2, 0)
    table.release((None, query(4).sequence.key))
    assert (len(table), table.removed) == (1, 1)
    assert table.parent(query(5), 5) is None


def test_a_program_that_passes_lists_adds_a_bounded_number_of_contexts() -> None:
    table, request = ContextTable(), resident("a")
    ids = tuple(range(100))
    for length in range(1, 101):
        table.put(Query(0, ids[:length], None), request)
    oldest = Query(0, ids[:36], None)
    assert table.parent(oldest, 36) is None
    assert table.parent(Query(0, ids[:37], None), 37) == (request, 37, [])
    assert len(table) == 1


def test_another_request_takes_the_place_of_a_context() -> None:
    table, first, second = ContextTable(), resident("a"), resident("b")
    table.put(query(4), first)
    table.put(query(4), second)
    assert len(table) == 1
    assert table.removed == 1
    table.remove(["a"])
    assert table.removed == 1
    table.remove(["a", "b"])
    assert (len(table), table.removed) == (0, 2)
    assert table.parent(query(5), 5) is None
