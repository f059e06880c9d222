"""Which contexts a query continues, and which end first; without vLLM."""

from __future__ import annotations

import itertools

import pytest

from genlm import Query
from genlm_vllm.residents import MOST_ADDED, Resident, ResidentTable

_ids = itertools.count()


def query(*token_ids: int, adapter: str | None = None) -> Query:
    return Query(next(_ids), token_ids, adapter)


def begun(table: ResidentTable, asked: Query) -> Resident:
    number = next(_ids)
    resident = Resident(f"r{number}", number, None, asked)
    table.begin(resident)
    return resident


def idle(table: ResidentTable, *token_ids: int, adapter: str | None = None) -> Resident:
    resident = begun(table, query(*token_ids, adapter=adapter))
    assert table.answered(resident.name) is resident
    assert table.rest(resident) is None
    return resident


@pytest.fixture
def table() -> ResidentTable:
    return ResidentTable()


def test_the_longest_context_is_continued(table: ResidentTable) -> None:
    short, long = idle(table, 1, 2), idle(table, 1, 2, 3)
    for tokens, resident, added in (
        ((1, 2, 3, 4), long, (4,)),
        ((1, 2, 3), short, (3,)),
        ((1, 2, 4), short, (4,)),
        ((1, 2, 4, 5, 6), short, (4, 5, 6)),
    ):
        parent = table.parent(query(*tokens))
        assert parent is not None
        assert (parent.resident, parent.added) == (resident, added)
        assert parent.length + len(added) == len(tokens)
        assert table.can_resume(parent)
    for tokens in ((1, 2), (1,), (2, 2, 3)):
        assert table.parent(query(*tokens)) is None
    assert table.parent(query(1, 2, 4, adapter="red")) is None


def test_up_to_eight_tokens_are_added(table: ResidentTable) -> None:
    assert MOST_ADDED == 8
    idle(table, 1)
    assert table.parent(query(1, *range(8))) is not None
    assert table.parent(query(1, *range(9))) is None


def test_a_resident_has_its_last_two_contexts(table: ResidentTable) -> None:
    resident = idle(table, 1, 2)
    for token in (3, 4):
        asked = query(*resident.query.token_ids, token)
        parent = table.parent(asked)
        assert parent is not None
        table.resume(parent, asked)
        assert (table.idle, table.busy, resident.added) == (0, 1, 1)
        again = table.parent(query(*asked.token_ids[:-1], 9))  # a sibling
        assert again is not None
        assert again.resident is resident
        assert not table.can_resume(again)
        table.answered(resident.name)
        table.rest(resident)
    assert table.parent(query(1, 2, 9)) is None
    parent = table.parent(query(1, 2, 3, 9))
    assert parent is not None
    assert not table.can_resume(parent)


def test_a_context_has_one_idle_resident(table: ResidentTable) -> None:
    first = idle(table, 1, 2)
    second = begun(table, query(1, 2))
    table.answered(second.name)
    assert table.rest(second) is first
    parent = table.parent(query(1, 2, 3))
    assert parent is not None
    assert parent.resident is second
    assert len(table) == 1


def test_the_least_recently_used_end_first(table: ResidentTable) -> None:
    residents = [idle(table, number) for number in range(4)]
    asked = query(0, 5)
    parent = table.parent(asked)
    assert parent is not None
    table.resume(parent, asked)
    table.answered(residents[0].name)
    table.rest(residents[0])
    assert table.end_oldest(-1) == []
    assert table.end_oldest(2) == residents[1:3]
    assert table.end_oldest(9) == [residents[3], residents[0]]
    assert len(table) == 0
    assert table.parent(query(0, 5, 6)) is None


def test_what_ends_is_not_found_any_more(table: ResidentTable) -> None:
    red, base = idle(table, 1, adapter="red"), idle(table, 1)
    busy = begun(table, query(7, 8))
    assert table.end_context("blue", base.query.sequence.key) is None
    assert table.end_context(None, busy.query.sequence.key) is None
    assert table.end_idle(lambda resident: resident.query.adapter == "red") == [red]
    assert table.end_context(None, base.query.sequence.key) is base
    assert table.end_query(busy.query.query_id) is busy
    assert table.end_query(busy.query.query_id) is None
    assert table.answered(busy.name) is None
    assert len(table) == 0
    for asked in (query(1, 2, adapter="red"), query(1, 2), query(7, 8, 9)):
        assert table.parent(asked) is None


def test_only_residents_that_continue_a_context_begin_anew(table: ResidentTable) -> None:
    begun(table, query(9))
    resumed = [idle(table, number) for number in range(3)]
    for number, resident in enumerate(resumed):
        asked = query(number, 5)
        parent = table.parent(asked)
        assert parent is not None
        assert parent.resident is resident
        table.resume(parent, asked)
    assert table.end_youngest_resumed() == resumed[1:]
    assert table.end_youngest_resumed() == resumed[:1]
    assert table.end_youngest_resumed() == []
    assert [each.token_ids for each in table.unanswered()] == [(9,)]
