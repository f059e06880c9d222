"""The engine's thread: takes the requests that arrived, steps the engine, delivers answers.

The worker drives an engine with `submit`, `step`, `abort` and `close`. `request_table` does
the bookkeeping, `batching` decides when a batch is dispatched, `results` checks and stores what
was computed, and `delivery` wakes the callers. One lock guards what several threads use; the
module is longer than others so that everything under that lock can be read together.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from genlm.core.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    described,
)
from genlm.core.forking import renew_in_forks
from genlm.core.query import Completion, Reduced
from genlm.core.scheduler.background import run_in_background
from genlm.core.scheduler.batching import BatchingPolicy, IdleFlush, Limits
from genlm.core.scheduler.delivery import Delivery, Waiter
from genlm.core.scheduler.observation import StepObserver
from genlm.core.scheduler.request_table import Identified, PendingRequest, RequestTable
from genlm.core.scheduler.results import ResultHandler, checked, reduced, stored
from genlm.core.statistics import SchedulerStatistics

__all__ = ["Worker"]

logger = logging.getLogger("genlm")

RELEASE_DELAY_S = 0.01
"""How long an idle engine waits for more items to release before it is woken for them."""


@dataclass
class Call:
    """A function to run on the engine's thread and the future of its result.

    If it has `blocks`, it waits until no unfinished query is one that blocks it, and until
    the engine was told of all aborts.
    """

    function: Callable[[Any], Any]
    blocks: Callable[[Any], bool] | None = None
    future: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)

    def run(self, engine: Any) -> None:
        """Run it and finish the future, with its exception if it raises."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function(engine))
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise


def _log_failure(future: concurrent.futures.Future[Any]) -> None:
    error = future.exception()
    if error is not None and not isinstance(error, EngineError):
        logger.error("a call on the engine's thread failed", exc_info=error)


class Worker:
    """Runs one engine on one thread; see `Scheduler` for the arguments."""

    def __init__(
        self,
        build_engine: Callable[[], Any],
        *,
        results: ResultHandler,
        limits: Limits,
        name: str,
    ) -> None:
        self._results = results
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._table = RequestTable(limits.max_pending)
        self._policy = BatchingPolicy(limits)
        self._observer = StepObserver(name)
        self._max_batch_size = limits.max_batch_size
        self._aborts: list[int] = []
        self._calls: deque[Call] = deque()
        self._released: deque[Any] = deque()
        self._release_scheduled = self._release_due = False
        self._stopped: EngineError | None = None  # why nothing is accepted any more
        self._wake_engine: Callable[[], None] | None = None
        self._idle_flush = IdleFlush(self.flush, lambda: len(self._table.inbox))
        self._built: concurrent.futures.Future[Any] = concurrent.futures.Future()
        # Arguments, not attributes: a model's memory must not wait for the garbage collector.
        arguments = (build_engine, self._built)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name=name, daemon=True
        )
        self._thread.start()
        renew_in_forks(self)

    # -- the callers' side: any thread ------------------------------------------------

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is the engine's own."""
        return threading.current_thread() is self._thread

    @property
    def stopped(self) -> bool:
        """Whether it refuses requests, for good."""
        return self._stopped is not None

    def wait_until_built(self) -> Any:
        """Return the engine once it is built, or raise what its construction raised; once."""
        try:
            return self._built.result()
        finally:
            del self._built

    def enqueue(
        self, query: Identified, key: Hashable, waiter: Waiter, output: Hashable = None
    ) -> PendingRequest:
        """Accept a request; raises the error that stopped the worker, if it is.

        A request of a coroutine is dispatched once its event loop has run what is ready,
        one of a thread at the next `flush`.
        """
        with self._lock:
            self._raise_if_stopped()
            request = self._table.enqueue(query, key, waiter, time.perf_counter(), output)
        if not isinstance(waiter, concurrent.futures.Future):
            self._idle_flush.schedule(waiter.get_loop())
        return request

    def leave(self, request: PendingRequest, waiter: Waiter) -> None:
        """Forget a caller; the evaluation is dropped when it was the last one."""
        with self._lock:
            if self._table.leave(request, waiter):
                self._aborts.append(request.query.query_id)
            if self._aborts or self._calls or self._table.admitted_late:
                self._notify()

    def flush(self) -> None:
        """Dispatch the requests that have arrived."""
        with self._lock:
            self._policy.flush(self._table)
            if self._table.inbox:
                self._notify()

    def call(self, function: Callable[[Any], Any]) -> concurrent.futures.Future[Any]:
        """Run `function(engine)` on the engine's thread, between two steps."""
        return self._add_call(Call(function))

    def call_after(
        self, blocks: Callable[[Any], bool], function: Callable[[Any], object]
    ) -> None:
        """Run `function(engine)` as `call` does, once no query and no abort blocks it."""
        self._add_call(Call(function, blocks)).add_done_callback(_log_failure)

    def _add_call(self, call: Call) -> concurrent.futures.Future[Any]:
        with self._lock:
            self._raise_if_stopped()
            self._calls.append(call)
            self._notify()
        return call.future

    def release(self, item: Any) -> None:
        """Pass an item to `ResultHandler.release` between two steps; safe in finalizers.

        An idle engine is woken once for all items of a short time.
        """
        if self._stopped is not None:
            return
        self._released.append(item)
        if not self._release_scheduled:
            self._release_scheduled = True
            run_in_background(self._wake_for_release)

    def _wake_for_release(self) -> None:
        time.sleep(RELEASE_DELAY_S)
        with self._lock:
            self._release_due = True
            self._changed.notify()

    def reset(self, error: EngineError) -> None:
        """Fail all unanswered requests; the engine drops them and stays usable."""
        with self._lock:
            delivery = self._fail_all(error)
            self._notify()
        delivery.send()

    def stop(self, error: EngineError) -> None:
        """Fail all unanswered requests and end the thread after its current step."""
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = error
            delivery = self._fail_all(error)
            calls, self._calls = self._calls, deque()
            self._notify()
        delivery.send()
        for call in calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)

    def _after_fork(self) -> None:
        """Refuse all requests in a forked process, which lacks the engine's thread."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stopped = EngineClosedError(
            "this process was forked from the one that loaded the model, and the engine's "
            "thread stayed there; load the model here, after the fork or in a spawned process"
        )

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended; returns at once on that thread itself."""
        if not self.runs_here:
            self._thread.join(timeout_s)

    def statistics(self) -> SchedulerStatistics:
        """A snapshot of the counters."""
        with self._lock:
            return self._table.statistics()

    def _notify(self) -> None:
        """Wake the engine's thread, also from a step that waits for other processes."""
        self._changed.notify()
        if self._wake_engine is not None:
            try:
                self._wake_engine()
            except Exception:  # no request must depend on it
                logger.exception("waking the engine raised")

    def _raise_if_stopped(self) -> None:
        if self._stopped is not None:
            error = type(self._stopped)(*self._stopped.args)
            raise error from self._stopped.__cause__

    def _fail_all(self, error: EngineError) -> Delivery:
        self._aborts.extend(self._table.in_engine)
        delivery = Delivery()
        delivery.add_error(self._table.clear(), error)
        return delivery

    # -- the engine's side: the worker's thread only ----------------------------------

    def _run(
        self, build_engine: Callable[[], Any], built: concurrent.futures.Future[Any]
    ) -> None:
        try:
            engine = build_engine()
        except BaseException as error:  # noqa: BLE001 - raised by `wait_until_built`
            self._stopped = EngineDiedError("the engine could not be built")
            built.set_exception(error)
            del built  # else the error, whose traceback has this frame, would hold itself
            return
        self._wake_engine = getattr(engine, "wake", None)
        built.set_result(engine)
        try:
            self._serve(engine)
        except BaseException as error:  # noqa: BLE001 - every waiter gets it
            self._die(error)
        with self._lock:
            self._wake_engine = None
        try:
            engine.close()
        except Exception:
            logger.exception("closing %s raised", type(engine).__name__)

    def _die(self, cause: BaseException) -> None:
        logger.error("the engine's thread ended", exc_info=cause)
        error = EngineDiedError(
            f"the engine's thread ended: {described(cause)}. Load the model again"
        )
        error.__cause__ = cause
        self.stop(error)

    def _serve(self, engine: Any) -> None:
        while self._wait_for_work():
            self._work(engine)  # a call of its own, so that no row outlives it here

    def _work(self, engine: Any) -> None:
        """Run aborts, calls and submissions, and one step if queries are in the engine."""
        with self._lock:
            aborts, self._aborts = self._aborts, []
            requests = self._take_requests()
        for query_id in aborts:
            engine.abort(query_id)
        self._run_calls(engine)
        refused = self._submit(engine, requests)
        if refused:
            self._hand_over(refused)
        # After the submissions, which may use what would be released.
        if self._released or self._release_due:
            self._release(engine)
        if self._table.in_engine:
            queries = len(self._table.in_engine)
            completions, step_s = self._observer.observe(self._complete, engine, queries)
            self._hand_over(completions, step_s=step_s)

    def _complete(self, engine: Any) -> list[Completion]:
        completions = checked(self._results, engine, self._step(engine))
        return reduced(self._results, self._table.in_engine.get, completions)

    def _release(self, engine: Any) -> None:
        self._release_scheduled = self._release_due = False
        items = [self._released.popleft() for _ in range(len(self._released))]
        try:
            self._results.release(engine, items)
        except Exception:
            logger.exception("releasing what %s keeps raised", type(engine).__name__)

    def _run_calls(self, engine: Any) -> None:
        # One at a time: should the thread die, `stop` finds and fails the rest.
        for _ in range(len(self._calls)):
            with self._lock:
                call = self._calls.popleft() if self._calls else None
                if call is not None and self._is_blocked(call):
                    self._calls.append(call)
                    call = None
            if call is not None:
                call.run(engine)

    def _is_blocked(self, call: Call) -> bool:
        # The table no longer has the queries that the engine is yet to be told to abort.
        return call.blocks is not None and (
            bool(self._aborts) or self._table.has_query(call.blocks)
        )

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False once the worker is stopped."""
        with self._lock:
            while self._stopped is None:
                if self._aborts or self._table.in_engine or self._release_due:
                    return True
                if not all(map(self._is_blocked, self._calls)):
                    return True
                wait_s = self._policy.seconds_to_dispatch(self._table)
                if wait_s is not None and wait_s <= 0:
                    return True
                self._changed.wait(wait_s)
            return False

    def _take_requests(self) -> list[PendingRequest]:
        if self._table.in_engine:
            # A running batch is joined at any time; one that only waits, by whole batches.
            if self._wake_engine and not self._policy.joins_running_batch(self._table):
                return []
        else:
            wait_s = self._policy.seconds_to_dispatch(self._table)
            if wait_s is None or wait_s > 0:
                return []
        room = None
        if self._max_batch_size is not None:
            room = self._max_batch_size - len(self._table.in_engine)
        requests = self._table.take(room, time.perf_counter())
        if not self._table.inbox:
            self._policy.hold()
        return requests

    def _submit(self, engine: Any, requests: list[PendingRequest]) -> list[Completion]:
        """Give the requests to the engine; returns the answers of those it refused."""
        refused = []
        for request in requests:
            query = request.query
            if not request.is_whole:
                query = query.replace(outputs=tuple(request.outputs))
            try:
                engine.submit(query)
            except Exception as error:  # noqa: BLE001 - it fails this query alone
                refused.append(Completion(request.query.query_id, error=error))
        return refused

    def _step(self, engine: Any) -> list[Completion]:
        try:
            return list(engine.step())
        except Exception as error:  # noqa: BLE001 - every query in the engine gets it
            with self._lock:
                query_ids = list(self._table.in_engine)
            for query_id in query_ids:
                engine.abort(query_id)
            return [Completion(query_id, error=error) for query_id in query_ids]

    def _hand_over(self, completions: list[Completion], *, step_s: float = 0.0) -> None:
        """Store the results, remove their requests from the table and wake the callers."""
        # Stored before the requests end: a repeated request in between would find neither
        # the row nor the request, and be evaluated again.
        find = self._table.in_engine.get
        completions = [stored(self._results, find, each) for each in completions]
        with self._lock:
            finished = [
                (answer, self._table.finish(answer.query_id, failed=answer.error is not None))
                for answer in completions
            ]
            size = sum(1 for _, waiters in finished if waiters)
            if step_s and size:
                self._table.count_batch(size)
        delivery = Delivery()
        for completion, waiters in finished:
            if completion.error is not None:
                delivery.add_error([waiter for waiter, _ in waiters], completion.error)
            else:
                self._add_results(delivery, waiters, completion.result)
        with self._lock:
            idle = delivery.reaches_loops and not self._table.in_engine
            waits = idle and self._policy.begin_grace_period(step_s)
        delivery.send(afterwards=self._idle_flush.schedule if waits else None)

    def _add_results(
        self, delivery: Delivery, waiters: list[tuple[Waiter, int]], result: Any
    ) -> None:
        values = result.values if isinstance(result, Reduced) else (result,)
        wanting: list[list[Waiter]] = [[] for _ in values]
        for waiter, place in waiters:
            wanting[place].append(waiter)
        for value, its_waiters in zip(values, wanting, strict=True):
            if isinstance(value, Exception):
                delivery.add_error(its_waiters, value)
            else:
                delivery.add_result(its_waiters, value, self._results.copy)
