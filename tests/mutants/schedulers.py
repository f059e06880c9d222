"""Faults of the scheduler: lost requests, mixed-up callers, missing batching."""

from __future__ import annotations

import concurrent.futures
import threading

import genlm.core.scheduler.delivery as delivery
import genlm.core.scheduler.worker as worker
from genlm import AsyncLM, EngineClosedError
from genlm.core.model.requests import Requests
from genlm.core.scheduler import Scheduler
from genlm.core.scheduler.delivery import Delivery
from genlm.core.scheduler.request_table import Evaluation, RequestTable
from genlm.core.scheduler.worker import Worker

from .mutant import core_fault, core_mutant


@core_mutant(RequestTable, "take", killed_by="concurrent-requests-share-steps")
def one_query_a_step(take):
    """Submits one query at a time to the engine."""
    return lambda self, _limit, now_s: take(self, 1, now_s)


@core_mutant(AsyncLM, "next_token_logprobs", killed_by="concurrent-requests-share-steps")
def event_loop_blocked(_ask):
    """Waits for the engine inside the coroutine and blocks the event loop meanwhile."""

    async def broken(self, token_ids, **options):
        return self.next_token_logprobs_sync(token_ids, **options)

    return broken


@core_mutant(Worker, "flush", killed_by="rows-are-right", shows_as="lost request")
def wake_up_lost(_flush):
    """Flushes the inbox without waking the engine's thread."""

    def broken(self):
        with self._lock:
            self._policy.flush(self._table)

    return broken


@core_fault(
    delivery,
    "_finish_on_loop",
    found_by="scheduler/test_cancellation.py::test_a_request_cancelled_when_its_answer_is_on_the_way_is_no_invalid_state",
    hangs=True,
)
def result_set_on_a_cancelled_future(_finish_on_loop):
    """Sets results without checking whether the future was cancelled."""

    def broken(finished, _loop, _afterwards):
        for request, error in finished:
            delivery._finish(request, error)

    return broken


@core_mutant(
    RequestTable,
    "leave",
    killed_by="cancelled-requests-change-no-other",
    shows_as="lost request",
)
def one_leaves_for_all(leave):
    """A cancelled caller cancels the evaluation for the callers that joined it."""

    def broken(self, request):
        for evaluation in request.values:
            if isinstance(evaluation, Evaluation):
                evaluation.waiting = min(evaluation.waiting, 1)
        return leave(self, request)

    return broken


@core_fault(
    RequestTable,
    "leave",
    found_by="scheduler/test_backpressure.py::test_a_caller_that_leaves_while_held_back_gives_its_place_to_the_next",
)
def cancelled_caller_kept(_leave):
    """Keeps the place of a cancelled caller among those that `max_pending` holds back."""

    def broken(_self, request):
        request.is_abandoned = True
        return []

    return broken


@core_fault(
    Delivery,
    "_append",
    found_by="scheduler/test_threads_and_loops.py::test_threads_with_and_without_event_loops_ask_at_once",
    hangs=True,
)
def one_loop_woken(append):
    """Finishes all callers on the event loop of the first, so that other loops sleep on."""

    def broken(self, request, error):
        if self._by_loop:
            next(iter(self._by_loop.values())).append((request, error))
        else:
            append(self, request, error)

    return broken


@core_fault(Scheduler, "results", found_by="model/test_lm_blocking.py", hangs=True)
def sync_callers_do_not_flush(results):
    """Leaves the requests of threads in the inbox until some event loop asks."""

    async def broken(self, request):
        if isinstance(request.future, concurrent.futures.Future):
            return request.future.result()
        return await results(self, request)

    return broken


@core_fault(
    Delivery,
    "send",
    found_by="scheduler/test_threads_and_loops.py::test_threads_with_and_without_event_loops_ask_at_once",
    hangs=True,
)
def one_loop_a_step(send):
    """Wakes one event loop a step although several have answers."""

    def broken(self, afterwards=lambda: None):
        while len(self._by_loop) > 1:
            self._by_loop.popitem()
        send(self, afterwards)

    return broken


@core_fault(
    Requests,
    "build_query",
    found_by="scheduler/test_threads_and_loops.py::test_threads_with_and_without_event_loops_ask_at_once",
)
def ids_of_each_thread(build_query):
    """Counts query ids from 0 to 7 in each thread: two threads' answers have the same id."""
    counters = threading.local()

    def broken(self, token_ids, lora_name):
        counters.count = (getattr(counters, "count", -1) + 1) % 8
        query, key = build_query(self, token_ids, lora_name)
        return query.replace(query_id=counters.count), key

    return broken


@core_fault(
    worker,
    "submit_evaluations",
    found_by="scheduler/test_failures.py::test_a_request_refused_by_submit_fails_alone",
)
def refusal_fails_the_batch(submit):
    """Fails every query that arrived together with one that the engine refuses."""

    def broken(engine, evaluations):
        refused = submit(engine, evaluations)
        return [(each, refused[0][1]) for each in evaluations] if refused else []

    return broken


def step_unguarded(self, engine):
    """A step of the engine, without what becomes of an exception."""
    in_engine = self._table.in_engine
    return [(in_engine[each.query_id], each) for each in engine.step()]


@core_fault(
    Worker,
    "_step",
    found_by="scheduler/test_failures.py::test_a_step_that_raises_fails_what_is_in_the_engine_and_the_engine_stays_usable",
)
def broken_step_ends_the_thread(_step):
    """Lets an exception of a step end the engine's thread."""
    return step_unguarded


@core_fault(
    Worker,
    "_step",
    found_by="scheduler/test_failures.py::test_a_step_that_raises_fails_what_is_in_the_engine_and_the_engine_stays_usable",
)
def broken_step_is_tried_again(step):
    """Swallows an exception of a step and steps again."""

    def broken(self, engine):
        try:
            return step_unguarded(self, engine)
        except Exception:  # noqa: BLE001 - the fault
            return []

    return broken


@core_fault(Worker, "_die", found_by="scheduler/test_failures.py", hangs=True)
def death_unannounced(_die):
    """Lets the engine's thread end without completing pending requests."""
    return lambda _self, _cause: None


@core_fault(
    Worker,
    "_die",
    found_by="scheduler/test_failures.py::test_an_engine_that_cannot_be_woken_ends_all_requests_with_it",
)
def death_called_closing(die):
    """Reports the death of the engine's thread as if the model had been closed."""

    def broken(self, cause):
        self.stop(EngineClosedError("closed"))

    return broken
