"""The table of resident contexts, without vLLM."""

from __future__ import annotations

from typing import Any

from genlm.plugin import Query
from genlm_vllm.contexts import ContextTable

IDS = tuple(range(5, 25))


class Living:
    def __init__(self, name: str) -> None:
        self.name = name


def living(name: str) -> Any:
    return Living(name)


def query(length: int, adapter: str | None = None) -> Query:
    return Query(0, IDS[:length], adapter)


def test_the_longest_context_within_reach_is_found() -> None:
    table, first, second = ContextTable(), living("a"), living("b")
    table.put(query(4), first)
    table.put(query(8), second)
    found = table.parent(query(10))
    assert found is not None
    assert (found.living, found.length, found.added) == (second, 8, list(IDS[8:10]))
    assert table.parent(query(12)).living is second  # type: ignore[union-attr]
    assert table.parent(query(17)) is None
    assert table.parent(query(10, "red")) is None
    assert table.parent(query(8)).added == []  # type: ignore[union-attr]


def test_a_request_is_known_by_its_last_two_contexts() -> None:
    table, own = ContextTable(), living("a")
    for length in (4, 5, 5, 5, 6):
        table.put(query(length), own)
    assert table.find((None, query(6).sequence.key)) is own
    assert table.find((None, query(5).sequence.key)) is None  # it has gone on
    assert table.parent(query(5)).living is own  # type: ignore[union-attr]
    assert table.parent(query(4)) is None
    table.put(query(5), living("b"))
    assert table.find((None, query(6).sequence.key)) is own
    assert len(table) == 2


def test_another_request_takes_the_place_of_a_context() -> None:
    table, first, second = ContextTable(), living("a"), living("b")
    table.put(query(4), first)
    table.put(query(4), second)
    assert len(table) == 1
    assert table.remove({"a"}) == 0
    assert table.remove({"a", "b"}) == 1
    assert table.parent(query(5)) is None
