"""The bookkeeping stays whole when Ctrl-C interrupts it."""

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
