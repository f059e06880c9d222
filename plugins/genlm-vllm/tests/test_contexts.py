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
    parent = table.parent(query(10))
    assert parent is not None
    assert (parent.resident, parent.length, parent.added) == (second, 8, list(IDS[8:10]))
    assert table.parent(query(12)).resident is second  # type: ignore[union-attr]
    assert table.parent(query(17)) is None
    assert table.parent(query(10, "red")) is None
    assert table.parent(query(8)).added == []  # type: ignore[union-attr]


def test_a_request_is_known_by_its_last_two_contexts() -> None:
    table, request = ContextTable(), resident("a")
    for length in (4, 5, 5, 5, 6):
        table.put(query(length), request)
    assert table.find((None, query(6).sequence.key)) is request
    assert table.find((None, query(5).sequence.key)) is None  # the previous context
    assert table.parent(query(5)).resident is request  # type: ignore[union-attr]
    assert table.parent(query(4)) is None
    table.put(query(5), resident("b"))
    assert table.find((None, query(6).sequence.key)) is request
    assert len(table) == 2


def test_another_request_takes_the_place_of_a_context() -> None:
    table, first, second = ContextTable(), resident("a"), resident("b")
    table.put(query(4), first)
    table.put(query(4), second)
    assert len(table) == 1
    assert table.remove(["a"]) == 0
    assert table.remove(["a", "b"]) == 1
    assert table.parent(query(5)) is None
