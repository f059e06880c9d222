"""The bookkeeping of requests: what Ctrl-C interrupts, and what nobody waits for."""

from __future__ import annotations

import concurrent.futures
from collections import OrderedDict
from typing import Any

import pytest

from genlm import Query
from genlm.core.scheduler.request_table import Evaluation, Request, RequestTable


class Interrupted(OrderedDict[int, Any]):
    """Is interrupted before it takes anything."""

    def __setitem__(self, key: int, value: Any) -> None:
        raise KeyboardInterrupt


def enqueued(table: RequestTable, query_id: int, output: Any = None) -> Request:
    request = Request(concurrent.futures.Future(), 1)
    table.enqueue(request, 0, Query(query_id, (1,)), "key", output, 0.0)
    return request


def consumers_of(evaluation: Evaluation) -> list[tuple[Request, int]]:
    return [(request, output) for request, _, output in evaluation.consumers]


def test_a_request_that_was_interrupted_on_its_way_in_cannot_be_joined() -> None:
    table = RequestTable(max_pending=None)
    table.inbox = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        enqueued(table, 0)
    table.inbox = OrderedDict()
    second = enqueued(table, 1)
    (evaluation,) = table.take(None, 0.0)
    assert consumers_of(evaluation) == [(second, 0)]


def test_a_request_ends_with_the_last_of_its_evaluations() -> None:
    table = RequestTable(max_pending=None)
    request = Request(concurrent.futures.Future(), 3)
    for place, key in enumerate(["a", "b", "a"]):  # the third one joins the first
        table.enqueue(request, place, Query(place, (1,)), key, None, 0.0)
    first, second = table.take(None, 0.0)
    assert table.finish(first) == []
    assert table.finish(first) == []  # a completion that comes twice
    assert table.finish(second) == [request]


def test_a_caller_that_leaves_twice_leaves_once() -> None:
    table = RequestTable(max_pending=None)
    leaving, waiting = enqueued(table, 0), enqueued(table, 1)
    (evaluation,) = table.take(None, 0.0)
    assert table.leave(leaving) == table.leave(leaving) == []
    assert table.finish(evaluation) == [waiting]


def test_the_last_caller_to_leave_aborts_what_is_in_the_engine_and_nothing_that_ended() -> None:
    table = RequestTable(max_pending=None)
    request = Request(concurrent.futures.Future(), 2)
    for place in range(2):
        table.enqueue(request, place, Query(place, (place,)), str(place), None, 0.0)
    first, _ = table.take(None, 0.0)
    table.finish(first)
    assert table.leave(request) == [1]
    assert table.leave(request) == []
    assert table.statistics().abandoned == 1
