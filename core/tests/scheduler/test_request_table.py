"""The bookkeeping of requests: what Ctrl-C interrupts, and what nobody waits for."""

from __future__ import annotations

import concurrent.futures
import weakref
from random import Random
from typing import Any

import pytest

from genlm import Query
from genlm.core.scheduler.request_table import (
    Evaluation,
    EvaluationQueue,
    Request,
    RequestTable,
)


class Interrupted(EvaluationQueue):
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
    table = RequestTable()
    table.inbox = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        enqueued(table, 0)
    table.inbox = EvaluationQueue()
    second = enqueued(table, 1)
    (evaluation,) = table.take(None, 0.0)
    assert consumers_of(evaluation) == [(second, 0)]


def test_outputs_are_added_to_one_table_of_their_evaluation() -> None:
    """Otherwise the time of a batch for one context is quadratic in its number of draws."""
    table = RequestTable()
    for query_id, output in enumerate([None, "a", None, "b"]):
        enqueued(table, query_id, output)
        (evaluation,) = table.inbox.values()
        if output == "a":
            outputs = evaluation.outputs
    assert evaluation.outputs is outputs
    assert evaluation.outputs == {None: 0, "a": 1, "b": 2}
    assert [output for _, output in consumers_of(evaluation)] == [0, 1, 0, 2]
    other = RequestTable()
    enqueued(other, 0)
    (whole,) = other.inbox.values()
    assert whole.is_whole
    assert whole.outputs == {None: 0}


def test_a_request_ends_with_the_last_of_its_evaluations() -> None:
    table = RequestTable()
    request = Request(concurrent.futures.Future(), 3)
    for place, key in enumerate(["a", "b", "a"]):  # the third one joins the first
        table.enqueue(request, place, Query(place, (1,)), key, None, 0.0)
    first, second = table.take(None, 0.0)
    assert table.finish(first) == []
    assert table.finish(first) == []  # a completion that comes twice
    assert table.finish(second) == [request]


def test_a_caller_that_leaves_twice_leaves_once() -> None:
    table = RequestTable()
    leaving, waiting = enqueued(table, 0), enqueued(table, 1)
    (evaluation,) = table.take(None, 0.0)
    assert table.leave(leaving) == table.leave(leaving) == []
    assert table.finish(evaluation) == [waiting]


def test_the_last_caller_to_leave_aborts_what_is_in_the_engine_and_nothing_that_ended() -> None:
    table = RequestTable()
    request = Request(concurrent.futures.Future(), 2)
    for place in range(2):
        table.enqueue(request, place, Query(place, (place,)), str(place), None, 0.0)
    first, _ = table.take(None, 0.0)
    table.finish(first)
    assert table.leave(request) == [1]
    assert table.leave(request) == []
    assert table.statistics(None).abandoned == 1


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_request_that_its_caller_has_left_is_freed_without_a_garbage_collection() -> None:
    def then(values: list[Any]) -> None: ...

    table, kept = RequestTable(), weakref.ref(then)
    request = Request(concurrent.futures.Future(), 2, then)
    del then
    for place in range(2):
        table.enqueue(request, place, Query(place, (place,)), None, None, 0.0)
    table.take(1, 0.0)
    table.leave(request)
    del request
    assert kept() is None


def enqueue_batch(table: RequestTable, query_ids: range) -> Request:
    request = Request(concurrent.futures.Future(), len(query_ids))
    for place, query_id in enumerate(query_ids):
        table.enqueue(request, place, Query(query_id, (1,)), None, None, 0.0)
    return request


def taken(table: RequestTable, limit: int) -> list[int]:
    evaluations = table.take(limit, 0.0)
    for evaluation in evaluations:
        table.finish(evaluation)
    return [evaluation.query.query_id for evaluation in evaluations]


def test_what_was_cleared_during_a_step_is_not_answered_by_it() -> None:
    table = RequestTable()
    leaving, request = enqueued(table, 0), enqueued(table, 1)
    (evaluation,) = table.take(None, 0.0)
    table.leave(leaving)
    assert table.clear() == [request]
    assert table.leave(request) == []
    assert table.finish(evaluation) == []
    statistics = table.statistics(None)
    assert (statistics.answered, statistics.failed, statistics.abandoned) == (0, 1, 0)


def test_a_long_batch_takes_turns_with_later_requests() -> None:
    table = RequestTable()
    enqueue_batch(table, range(6))
    assert taken(table, 2) == [0, 1]
    enqueue_batch(table, range(6, 7))
    enqueue_batch(table, range(7, 9))
    order = [query_id for _ in range(4) for query_id in taken(table, 2)]
    assert order == [6, 7, 2, 8, 3, 4, 5]


def test_evaluations_leave_a_queue_by_turn_then_by_age() -> None:
    random, queue = Random(0), EvaluationQueue()
    pending: set[tuple[int, int]] = set()
    for query_id in range(400):
        turn = random.randrange(9)
        queue.add(Evaluation(Query(query_id, (1,)), turn, None, None, 0.0))
        pending.add((turn, query_id))
        if random.random() < 0.3:
            removed = random.choice(sorted(pending))
            pending.remove(removed)
            del queue[removed[1]]
            queue.compact()
        if pending and query_id > 50 and random.random() < 0.7:
            first = min(pending)
            pending.remove(first)
            assert queue.pop_first().query.query_id == first[1]
    assert [queue.pop_first().query.query_id for _ in pending] == [
        i for _, i in sorted(pending)
    ]
    assert not queue


def test_batches_that_are_cancelled_leave_nothing_in_the_queue() -> None:
    table = RequestTable()
    enqueue_batch(table, range(4))
    assert taken(table, 1) == [0]
    for first in range(10, 100, 10):
        assert table.leave(enqueue_batch(table, range(first, first + 10))) == []
        assert len(table.inbox._heap or []) <= 2 * 3
    assert taken(table, 2) + taken(table, 2) == [1, 2, 3]


def test_requests_after_an_exclusive_call_come_after_all_earlier_ones() -> None:
    table = RequestTable()
    enqueue_batch(table, range(3))
    assert table.separate_later_requests() == {0, 1, 2}
    enqueue_batch(table, range(3, 4))
    assert [taken(table, 1) for _ in range(4)] == [[0], [1], [2], [3]]
