"""The bookkeeping of requests: what Ctrl-C interrupts, and what nobody waits for."""

from __future__ import annotations

import concurrent.futures
from collections import OrderedDict
from typing import Any

import pytest

from genlm import Query
from genlm.core.scheduler.request_table import RequestTable


class Interrupted(OrderedDict[int, Any]):
    """Is interrupted before it takes anything."""

    def __setitem__(self, key: int, value: Any) -> None:
        raise KeyboardInterrupt


def test_a_request_that_was_interrupted_on_its_way_in_cannot_be_joined() -> None:
    table = RequestTable(max_pending=None)
    first, second = concurrent.futures.Future[Any](), concurrent.futures.Future[Any]()
    table.inbox = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        table.enqueue(Query(0, (1,)), "key", first, 0.0)
    table.inbox = OrderedDict()
    table.enqueue(Query(1, (1,)), "key", second, 0.0)
    (request,) = table.take(None, 0.0)
    assert request.take_waiters() == [(second, 0)]


def test_what_only_callers_wanted_who_left_is_not_asked_for() -> None:
    table = RequestTable(max_pending=None)
    waiters = [concurrent.futures.Future[Any]() for _ in range(5)]
    outputs = ["draw", None, "mass", "draw", "top"]
    for place, (waiter, output) in enumerate(zip(waiters, outputs, strict=True)):
        request = table.enqueue(Query(place, (1,)), "key", waiter, 0.0, output)
    for place in (0, 1, 4):
        assert not table.leave(request, waiters[place])
    table.take(None, 0.0)
    assert request.outputs == {"draw": 0, "mass": 1}
    assert not request.is_whole
    # The engine works on it: what it was asked for is fixed, and can be joined.
    assert not table.leave(request, waiters[2])
    assert request.outputs == {"draw": 0, "mass": 1}
    late = concurrent.futures.Future[Any]()
    assert table.enqueue(Query(9, (1,)), "key", late, 0.0, "mass") is request
    assert table.finish(0, failed=False) == [(waiters[3], 0), (late, 1)]


def test_a_request_becomes_one_for_a_row_when_nobody_else_waits() -> None:
    table = RequestTable(max_pending=None)
    first, second = concurrent.futures.Future[Any](), concurrent.futures.Future[Any]()
    request = table.enqueue(Query(0, (1,)), "key", first, 0.0, "draw")
    table.enqueue(Query(1, (1,)), "key", second, 0.0)
    table.leave(request, first)
    table.take(None, 0.0)
    assert request.is_whole
    assert table.finish(0, failed=False) == [(second, 0)]
