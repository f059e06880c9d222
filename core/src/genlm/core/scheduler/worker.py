"""The engine's thread: submits arrived requests, steps the engine, delivers results.

Callers add work to shared state, which one lock guards, except that finalizers add releases
without it. Each call of `_work` takes work in this order::

    callers, any thread     shared state                     the engine's thread

    leave, reset            ids of abandoned queries   --->  engine.abort
    call                    calls                      --->  function(engine)
    enqueue, flush          RequestTable.inbox         --->  engine.submit
    release                 ReleaseQueue               --->  release(engine, items)
                            RequestTable.in_engine     --->  engine.step
    future of a request     Delivery                   <---  check_results, store_results

`BatchingPolicy` decides when the inbox is submitted and when the engine is stepped.

An evaluation is removed from the table together with its delivery: an exception between a step
and the delivery becomes the result of the evaluations concerned.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from genlm.core.base.blocking import wait_for
from genlm.core.base.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    describe_error,
)
from genlm.core.base.forking import renew_in_forks
from genlm.core.base.loop_batches import LoopBatches
from genlm.core.base.statistics import SchedulerStatistics
from genlm.core.engine.engine import call_each
from genlm.core.queries.query import GroupQuery
from genlm.core.rows.output_cache import OutputCache
from genlm.core.scheduler.batching import BatchingPolicy
from genlm.core.scheduler.calls import Call, ReleaseQueue
from genlm.core.scheduler.delivery import Delivery, distribute
from genlm.core.scheduler.observation import StepObserver
from genlm.core.scheduler.request_table import Evaluation, Identified, Request, RequestTable
from genlm.core.scheduler.results import check_results, store_results
from genlm.core.scheduler.steps import step_engine, submit_evaluations

logger = logging.getLogger("genlm")

Submission = tuple[Identified, Hashable, Hashable]
"""A query, its key, and the requested output."""

EXIT_TIMEOUT_S = 10.0
"""Maximum time for which the interpreter's exit waits for an engine to close."""


class Worker:
    """Runs one engine on one thread; see `Scheduler` for the arguments.

    Attributes:
        stopped: The error with which requests are rejected; None while they are accepted.
        ended: Event that is set when the engine is closed.
    """

    def __init__(
        self,
        build_engine: Callable[[], Any],
        *,
        cache: OutputCache,
        release: Callable[[Any, list[Any]], object],
        max_batch_size: int | None,
        max_pending: int | None,
        name: str,
    ) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._table = RequestTable()
        self._late: set[Request] = set()  # whose functions `then` returned unfinished futures
        limits = [limit for limit in (max_batch_size, max_pending) if limit is not None]
        self._max_in_engine = min(limits, default=None)
        self._max_pending = max_pending
        self._policy = BatchingPolicy(self._max_in_engine)
        self._observer = StepObserver(name)
        self._aborts: list[int] = []
        self._calls: deque[Call] = deque()
        self._releases = ReleaseQueue(release, self._wake_for_release)
        self.stopped: EngineError | None = None
        self._engine: Any = None
        self._final_statistics: Mapping[str, Any] = {}
        self._wake_engine: Callable[[], None] | None = None
        self._arrivals: LoopBatches[None] = LoopBatches(lambda _: self.flush())
        self._built: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.ended = threading.Event()
        self._is_exiting = False  # the interpreter exits
        self._remains = False  # the thread waits for the end of the process
        # Arguments, not attributes: a reference cycle would delay freeing the model's memory.
        arguments = (build_engine, self._built)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name=name, daemon=True
        )
        self._thread.start()
        renew_in_forks(self)

    # -- the callers' side: any thread ------------------------------------------------

    @property
    def runs_here(self) -> bool:
        """Whether the engine's thread is the calling thread."""
        return threading.current_thread() is self._thread

    def wait_until_built(self) -> None:
        """Wait until the engine is built, or raise the error of its construction; call once."""
        try:
            wait_for(self._built)
        finally:
            del self._built

    @property
    def engine(self) -> Any:
        """The engine; raises the error that stopped the worker if the engine is closed."""
        engine = self._engine
        if engine is None:
            self.check_open()
        return engine

    def engine_statistics(self) -> Mapping[str, Any]:
        """Return the engine's statistics; after closing, the last statistics."""
        engine = self._engine
        return self._final_statistics if engine is None else engine.statistics()

    def check_open(self) -> None:
        """Raise the error that stopped the worker, if it has stopped."""
        if self.stopped is not None:
            error = type(self.stopped)(*self.stopped.args)
            raise error from self.stopped.__cause__

    def enqueue(self, request: Request, submissions: Iterable[Submission]) -> None:
        """Accept a request; if the worker has stopped, raise the error that stopped it.

        A request of a coroutine is dispatched after its event loop has run its ready callbacks,
        a request of a thread at the next `flush`.
        """
        arrived_s = time.perf_counter()
        with self._lock:
            self.check_open()
            for place, (query, key, output) in enumerate(submissions):
                self._table.enqueue(request, place, query, key, output, arrived_s)
        if not isinstance(request.future, concurrent.futures.Future):
            self._flush_later(request.future.get_loop())

    def leave(self, request: Request) -> None:
        """Remove an abandoned request; abort evaluations without other requests."""
        with self._lock:
            self._aborts += self._table.leave(request)
            if self._aborts or self._calls:
                self._notify()

    def flush(self) -> None:
        """Dispatch the requests that have arrived."""
        with self._lock:
            is_delayed = self._policy.seconds_to_step() > 0
            self._policy.flush(self._table)
            if self._table.inbox or is_delayed:
                self._notify()

    def call(
        self,
        function: Callable[[Any], Any],
        wait_for: Callable[[Any], bool] | None = None,
        *,
        exclusively: bool = False,
    ) -> concurrent.futures.Future[Any]:
        """Run `function(engine)` on the engine's thread, between two steps; see `Call`.

        With `exclusively`, it runs after all earlier queries and before all later ones.
        """
        call = Call(function, wait_for, exclusively)
        with self._lock:
            self.check_open()
            if exclusively:
                earlier = self._table.separate_later_requests()
                call.wait_for = lambda query: query.query_id in earlier
                self._policy.flush(self._table)  # the event loop may be blocked by the caller
            self._calls.append(call)
            self._notify()
        return call.future

    def has_query(self, matches: Callable[[Any], bool]) -> bool:
        """Whether `matches` is true for an unfinished query; called under the lock."""
        with self._lock:
            return self._table.has_query(matches)

    def release(self, item: Any) -> None:
        """Schedule the release of an item between two steps; safe in finalizers."""
        if self.stopped is None:
            self._releases.add(item)

    def _wake_for_release(self) -> None:
        with self._lock:
            self._releases.is_due = True
            self._changed.notify()

    def reset(self, error: EngineError) -> None:
        """Fail all unfinished requests; the engine drops them and stays usable."""
        with self._lock:
            delivery = self._fail_all(error)
            self._notify()
        delivery.send()

    def stop(self, error: EngineError) -> None:
        """Fail all unfinished requests and end the thread after its current step."""
        with self._lock:
            if self.stopped is not None:
                return
            self.stopped = error
            delivery = self._fail_all(error)
            calls, self._calls = self._calls, deque()
            self._notify()
        delivery.send()
        for call in calls:
            call.future.set_exception(error)

    def _after_fork(self) -> None:
        """Reject all requests in a forked process, which lacks the engine's thread."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.stopped = EngineClosedError(
            "this process was forked from the one that loaded the model, and the engine's "
            "thread stayed there; load the model here, after the fork or in a spawned process"
        )
        self.ended = threading.Event()
        self.ended.set()  # or the exit of the forked process would wait for the thread

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, or the engine is closed while the interpreter exits.

        The method returns at once if it is called on that thread.
        """
        if not self.runs_here and self.ended.wait(timeout_s) and not self._remains:
            self._thread.join(timeout_s)

    def _close_at_exit(self) -> None:
        self._is_exiting = True
        self.stop(closed_error())
        self.ended.wait(EXIT_TIMEOUT_S)

    def statistics(self) -> SchedulerStatistics:
        """Return a snapshot of the counters."""
        with self._lock:
            return self._table.statistics(self._max_pending)

    def _notify(self) -> None:
        """Wake the engine's thread, also from a step that waits for other processes."""
        self._changed.notify()
        if self._wake_engine is not None:
            try:
                self._wake_engine()
            except Exception:  # no request depends on it
                logger.exception("waking the engine raised")

    def _fail_all(self, error: EngineError) -> Delivery:
        self._aborts.extend(self._table.in_engine)
        delivery = Delivery()
        for request in (*self._table.clear(), *self._late):
            delivery.fail(request, error)
        self._late.clear()
        return delivery

    # -- the engine's side: the worker's thread only ----------------------------------

    def _run(
        self, build_engine: Callable[[], Any], built: concurrent.futures.Future[Any]
    ) -> None:
        try:
            engine = build_engine()
        except BaseException as error:  # noqa: BLE001 - raised by `wait_until_built`
            built.set_exception(error)
            del built  # breaks the cycle of the error and this frame
            return
        self._wake_engine = getattr(engine, "wake", None)
        self._engine = engine
        # Exit handlers are called in reverse order: those registered later may use the model,
        # and those of libraries that the engine uses, such as Ray's, are called afterwards.
        atexit.register(self._close_at_exit)
        built.set_result(None)
        del built
        try:
            self._serve(engine)
        except BaseException as error:  # noqa: BLE001 - it fails every unfinished request
            self._die(error)
        with self._lock:
            self._wake_engine = None
        try:
            engine.close()
        except BaseException:  # `ended` must be set
            logger.exception("closing the engine raised")
        try:
            self._final_statistics = dict(getattr(engine, "statistics", dict)())
        except BaseException:
            logger.exception("the statistics of the engine raised")
        self._engine = None
        # This frame may stay alive, and with it this object: some libraries store errors of
        # imports, which refer to all frames of the thread.
        self._cache = OutputCache(0)
        del engine  # the error that ended the thread refers to this frame
        atexit.unregister(self._close_at_exit)
        # Destructors of native thread-local variables, for example in MLX, may need the
        # interpreter, and would abort the process during its finalisation.
        self._remains = self._is_exiting
        self.ended.set()
        if self._remains:
            threading.Event().wait()

    def _die(self, cause: BaseException) -> None:
        logger.error("the engine's thread ended", exc_info=cause)
        error = EngineDiedError(
            f"the engine's thread ended: {describe_error(cause)}. Load the model again"
        )
        error.__cause__ = cause
        self.stop(error)
        traceback.clear_frames(cause.__traceback__)  # its frames refer to the engine

    def _serve(self, engine: Any) -> None:
        while self._wait_for_work():
            self._work(engine)  # a separate call, so that this frame keeps no row alive

    def _work(self, engine: Any) -> None:
        """Process aborts, calls and submissions, and step the engine if it has queries."""
        with self._lock:
            aborts, self._aborts = self._aborts, []
            evaluations = self._take()
        if aborts:
            self._abort(engine, aborts)
        self._run_calls(engine)
        rejected = submit_evaluations(engine, evaluations)
        if rejected:
            self._hand_over(rejected)
        # After the submissions, which may use the state to be released.
        if self._releases or self._releases.is_due:
            self._releases.run(engine)
        if self._table.in_engine and not self._policy.seconds_to_step():
            self._step_once(engine)

    @staticmethod
    def _abort(engine: Any, query_ids: Iterable[int]) -> None:
        call_each(engine.abort, ((query_id,) for query_id in query_ids))

    def _step_once(self, engine: Any) -> None:
        finished: list[Evaluation] = []

        def step(engine: Any) -> list[Evaluation]:
            finished.extend(self._step(engine))
            return finished

        step_s = 0.0
        try:
            step_s = self._observer.observe(step, engine, len(self._table.in_engine))
        except Exception:  # `step` raises none
            logger.exception("reporting a step raised")
        self._hand_over(finished, step_s=step_s, is_step=True)

    def _run_calls(self, engine: Any) -> None:
        # One at a time: if the thread dies, `stop` fails the remaining calls.
        for _ in range(len(self._calls)):
            with self._lock:
                call = self._calls.popleft() if self._calls else None
                if call is not None and self._is_blocked(call):
                    self._calls.append(call)
                    call = None
            if call is not None:
                call.run(engine)

    def _is_blocked(self, call: Call) -> bool:
        # Queries with pending aborts are no longer in the table.
        return call.wait_for is not None and (
            bool(self._aborts) or self._table.has_query(call.wait_for)
        )

    def _wait_for_work(self) -> bool:
        """Block until there is work; return False after the worker was stopped."""
        with self._lock:
            while self.stopped is None:
                if self._aborts or self._releases.is_due:
                    return True
                if not all(map(self._is_blocked, self._calls)):
                    return True
                wait_s = self._policy.seconds_to_work(self._table)
                if wait_s is not None and wait_s <= 0:
                    return True
                self._changed.wait(wait_s)
            return False

    def _take(self) -> list[Evaluation]:
        if self._table.in_engine:
            # Between steps, an engine with `wake` receives complete batches only.
            if self._wake_engine and not self._policy.is_flushed:
                return []
        else:
            wait_s = self._policy.seconds_to_dispatch(self._table)
            if wait_s is None or wait_s > 0:
                return []
        limit = None
        if self._max_in_engine is not None:
            limit = self._max_in_engine - len(self._table.in_engine)
        for call in self._calls:
            if call.is_exclusive and call.wait_for is not None:
                earlier = self._table.count_in_inbox(call.wait_for)
                limit = earlier if limit is None else min(limit, earlier)
        evaluations = self._table.take(limit, time.perf_counter())
        if not self._table.inbox:
            self._policy.hold()
        return evaluations

    def _step(self, engine: Any) -> list[Evaluation]:
        """Step the engine; return the finished evaluations, all of them if the step raises."""
        try:
            completed = step_engine(engine, self._table.in_engine)
        except Exception as error:  # noqa: BLE001 - fails every query in the engine
            with self._lock:
                evaluations = list(self._table.in_engine.values())
            self._abort(engine, [evaluation.query.query_id for evaluation in evaluations])
            for evaluation in evaluations:
                evaluation.fail(error)
            return evaluations
        check_results(engine, completed)
        return [evaluation for evaluation, _ in completed]

    def _hand_over(
        self, finished: list[Evaluation], *, step_s: float = 0.0, is_step: bool = False
    ) -> None:
        """Store the results, write them into their requests, and wake the callers."""
        requests: list[Request] = []  # all requests of the evaluations, which must finish here
        try:
            # Results are stored before the evaluations end. Otherwise an equal request that
            # arrives in between would be evaluated again.
            store_results(self._cache, finished)
            with self._lock:
                for evaluation in finished:
                    self._table.close_to_joiners(evaluation)
                    requests += [request for request, _, _ in evaluation.consumers]
            for evaluation in finished:
                distribute(evaluation)
            with self._lock:
                completed = self._finish(finished, is_step=is_step)
            delivery = Delivery()
            late = [request for request in completed if not delivery.add(request)]
            with self._lock:
                self._late.update(late)
                waits_for_callers = delivery.reaches_loops and self._delay(step_s)
            delivery.send(afterwards=self._flush_later if waits_for_callers else None)
            for request in late:
                [future] = request.values
                future.add_done_callback(functools.partial(self._deliver_late, request))
        except BaseException as error:
            self._fail(finished, requests, error)
            if not isinstance(error, Exception):
                raise

    def _deliver_late(self, request: Request, future: concurrent.futures.Future[Any]) -> None:
        """Deliver the result of the future of a function, unless the request has ended."""
        with self._lock:
            if request not in self._late:
                return
            self._late.remove(request)
        delivery = Delivery()
        delivery.add_late(request, future)
        delivery.send()

    def _flush_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """Flush once the running event loop adds no further requests."""
        self._arrivals.add(loop, None)

    def _delay(self, step_s: float) -> bool:
        """Delay the next batch or step; return whether flushes of event loops end the delay."""
        if not self._table.in_engine:
            return self._policy.begin_grace_period(step_s)
        if getattr(self._engine, "is_deferring", False):
            self._policy.pause(step_s)
            return True
        return False

    def _finish(self, finished: list[Evaluation], *, is_step: bool) -> list[Request]:
        """Remove evaluations from the table; return the requests that have all their values."""
        size, completed = 0, []
        for evaluation in finished:
            if evaluation.waiting:
                size += _sequence_count(evaluation.query)
            completed += self._table.finish(evaluation)
        if is_step and size:
            self._table.count_batch(size)
        return completed

    def _fail(
        self, finished: list[Evaluation], requests: list[Request], error: BaseException
    ) -> None:
        """Fail the requests of evaluations whose results could not be delivered."""
        logger.error("results of the engine could not be delivered", exc_info=error)
        delivery = Delivery()
        with self._lock:
            for evaluation in finished:
                requests += [request for request, _, _ in evaluation.consumers]
                self._table.drop(evaluation)
            for request in dict.fromkeys(requests):
                if not request.is_abandoned and not request.future.done():
                    delivery.fail(request, error)
                self._aborts += self._table.leave(request)
        delivery.send()


def _sequence_count(query: Any) -> int:
    return len(query.wanted) if isinstance(query, GroupQuery) else 1


def closed_error() -> EngineClosedError:
    """Return the error of requests to an engine that was closed."""
    return EngineClosedError("the engine was closed; load the model again")
