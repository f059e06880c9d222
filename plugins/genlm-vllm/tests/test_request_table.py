"""Which contexts a query continues, and which end first; without vLLM."""

from __future__ import annotations

import itertools

import pytest

from genlm import Query
from genlm_vllm.request_table import MOST_ADDED, Request, RequestTable

_ids = itertools.count()


def query(*token_ids: int, adapter: str | None = None) -> Query:
    return Query(next(_ids), token_ids, adapter)


def begun(table: RequestTable, asked: Query) -> Request:
    number = next(_ids)
    request = Request(f"r{number}", number, None, asked)
    table.begin(request)
    return request


def idle(table: RequestTable, *token_ids: int, adapter: str | None = None) -> Request:
    request = begun(table, query(*token_ids, adapter=adapter))
    assert table.answered(request.name) is request
    assert table.rest(request) is None
    return request


@pytest.fixture
def table() -> RequestTable:
    return RequestTable()


def test_the_longest_context_is_continued(table: RequestTable) -> None:
    short, long = idle(table, 1, 2), idle(table, 1, 2, 3)
    for tokens, request, added in (
        ((1, 2, 3, 4), long, (4,)),
        ((1, 2, 3), short, (3,)),
        ((1, 2, 4), short, (4,)),
        ((1, 2, 4, 5, 6), short, (4, 5, 6)),
    ):
        parent = table.parent(query(*tokens))
        assert parent is not None
        assert (parent.request, parent.added) == (request, added)
        assert parent.length + len(added) == len(tokens)
        assert table.can_resume(parent)
    for tokens in ((1, 2), (1,), (2, 2, 3)):
        assert table.parent(query(*tokens)) is None
    assert table.parent(query(1, 2, 4, adapter="red")) is None


def test_up_to_eight_tokens_are_added(table: RequestTable) -> None:
    assert MOST_ADDED == 8
    idle(table, 1)
    assert table.parent(query(1, *range(8))) is not None
    assert table.parent(query(1, *range(9))) is None


def test_a_request_has_its_last_two_contexts(table: RequestTable) -> None:
    request = idle(table, 1, 2)
    for token in (3, 4):
        asked = query(*request.query.token_ids, token)
        parent = table.parent(asked)
        assert parent is not None
        table.resume(parent, asked)
        assert (table.idle, table.busy, request.added) == (0, 1, 1)
        again = table.parent(query(*asked.token_ids[:-1], 9))  # a sibling
        assert again is not None
        assert again.request is request
        assert not table.can_resume(again)
        table.answered(request.name)
        table.rest(request)
    assert table.parent(query(1, 2, 9)) is None
    parent = table.parent(query(1, 2, 3, 9))
    assert parent is not None
    assert not table.can_resume(parent)


def test_a_context_has_one_idle_request(table: RequestTable) -> None:
    first = idle(table, 1, 2)
    second = begun(table, query(1, 2))
    table.answered(second.name)
    assert table.rest(second) is first
    parent = table.parent(query(1, 2, 3))
    assert parent is not None
    assert parent.request is second
    assert table.idle + table.busy == 1


def test_the_least_recently_used_end_first(table: RequestTable) -> None:
    requests = [idle(table, number) for number in range(4)]
    asked = query(0, 5)
    parent = table.parent(asked)
    assert parent is not None
    table.resume(parent, asked)
    table.answered(requests[0].name)
    table.rest(requests[0])
    assert table.end_oldest(-1) == []
    assert table.end_oldest(2) == requests[1:3]
    assert table.end_oldest(9) == [requests[3], requests[0]]
    assert table.idle + table.busy == 0
    assert table.parent(query(0, 5, 6)) is None


def test_what_ends_is_not_found_any_more(table: RequestTable) -> None:
    red, base = idle(table, 1, adapter="red"), idle(table, 1)
    busy = begun(table, query(7, 8))
    assert table.end_context("blue", base.query.sequence.key) is None
    assert table.end_context(None, busy.query.sequence.key) is None
    assert table.end_idle(lambda request: request.query.adapter == "red") == [red]
    assert table.end_context(None, base.query.sequence.key) is base
    assert table.end_query(busy.query.query_id) is busy
    assert table.end_query(busy.query.query_id) is None
    assert table.answered(busy.name) is None
    assert table.idle + table.busy == 0
    for asked in (query(1, 2, adapter="red"), query(1, 2), query(7, 8, 9)):
        assert table.parent(asked) is None


def test_only_requests_that_continue_a_context_begin_anew(table: RequestTable) -> None:
    begun(table, query(9))
    resumed = [idle(table, number) for number in range(3)]
    for number, request in enumerate(resumed):
        asked = query(number, 5)
        parent = table.parent(asked)
        assert parent is not None
        assert parent.request is request
        table.resume(parent, asked)
    assert table.end_youngest_resumed() == resumed[1:]
    assert table.end_youngest_resumed() == resumed[:1]
    assert table.end_youngest_resumed() == []
    assert [each.token_ids for each in table.unanswered()] == [(9,)]
