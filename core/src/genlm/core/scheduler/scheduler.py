"""`Scheduler`: batches concurrent requests of coroutines and threads on one engine thread.

Queries may be of any class: both `AsyncLM` and `AsyncTokenCharacterTrie` use it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from genlm.core.base.blocking import is_blocking, wait_for
from genlm.core.base.errors import EngineError, QueryResetError
from genlm.core.base.statistics import SchedulerStatistics
from genlm.core.base.validation import checked_builder, checked_integer
from genlm.core.rows.output_cache import OutputCache
from genlm.core.scheduler.background import run_in_background, start_background_thread
from genlm.core.scheduler.request_table import Identified, Request
from genlm.core.scheduler.worker import Submission, Worker, closed_error

logger = logging.getLogger("genlm")

EngineT = TypeVar("EngineT")
T = TypeVar("T")


class Scheduler(Generic[EngineT]):
    """Computes requests with an engine on a dedicated thread, batching without timers.

    If the engine is idle, a batch is dispatched as soon as the caller's event loop has run its
    ready callbacks; while the engine steps, requests are collected for the next step. Requests
    with equal keys share one unfinished evaluation. The cancellation of one caller does not
    affect others; an evaluation whose callers are all cancelled is aborted. Methods may be
    called from any thread and from several event loops of one process; in a forked process
    they raise `EngineClosedError`.

    Args:
        build_engine: Function that returns the engine; called on the engine's thread. The
            engine has `submit`, `step`, `abort` and `close` as in `genlm.Engine`, for queries
            of any class with a `query_id`.
        cache: Cache for the results of queries with a key; None for no cache.
        release: Function of the engine and a list of items that were passed to
            `Scheduler.release`; its errors are logged.
        max_batch_size: Maximum number of queries in the engine, None for no limit.
        max_pending: Maximum number of accepted queries, None for no limit; further requests
            wait in order of arrival.
        name: Name of the engine's thread.

    Attributes:
        release: Function that schedules the release of an item on the engine's thread. It may
            be called in finalizers, and does not refer to the scheduler.

    Raises:
        TypeError: `build_engine` is not callable, or a limit is not a number.
        ValueError: A limit is below 1.
        Exception: The error that `build_engine` raised.
    """

    def __init__(
        self,
        build_engine: Callable[[], EngineT],
        *,
        cache: OutputCache | None = None,
        release: Callable[[Any, list[Any]], object] | None = None,
        max_batch_size: int | None = None,
        max_pending: int | None = None,
        name: str = "genlm-engine",
    ) -> None:
        self._worker = Worker(
            checked_builder(build_engine),
            cache=OutputCache(0) if cache is None else cache,
            release=release or (lambda _engine, _items: None),
            max_batch_size=_checked_limit("max_batch_size", max_batch_size),
            max_pending=_checked_limit("max_pending", max_pending),
            name=name,
        )
        start_background_thread()  # not possible in a finalizer
        try:
            self._worker.wait_until_built()
        except BaseException:  # interrupted: the engine is closed once it is built
            self._worker.stop(closed_error())
            raise
        self.release: Callable[[Any], None] = self._worker.release
        # If the scheduler is dropped without `close`, the thread must end.
        stop = functools.partial(self._worker.stop, closed_error())
        weakref.finalize(self, run_in_background, stop).atexit = False

    def __repr__(self) -> str:
        if self.closed:
            return "<Scheduler; closed>"
        return f"<Scheduler of {type(self.engine).__name__}>"

    @property
    def engine(self) -> EngineT:
        """The engine; the reference is dropped when it is closed.

        Raises:
            EngineClosedError: The engine was closed.
            EngineDiedError: The engine's thread ended.
        """
        engine: EngineT = self._worker.engine
        return engine

    def engine_statistics(self) -> Mapping[str, Any]:
        """Return the engine's statistics; after closing, the last statistics."""
        return self._worker.engine_statistics()

    async def answer(self, query: Identified) -> Any:
        """Compute the result of a query, which no other request shares.

        Returns:
            The engine's result, which belongs to the caller.

        Raises:
            EvaluationError: The engine raised for this query; a `GenlmError` of the engine is
                raised unchanged.
            EngineClosedError: The engine was closed before the result.
            EngineDiedError: The engine's thread ended before the result.
            QueryResetError: `reset` was called before the result.
            ValueError: An unfinished query has the same `query_id`.
        """
        request = self.submit([(query, None, None)])
        [value] = await self.results(request)
        if isinstance(value, Exception):
            raise value
        return value

    def submit(
        self,
        submissions: Sequence[Submission],
        then: Callable[[list[Any]], Any] | None = None,
    ) -> Request:
        """Submit several queries; the caller must await `results`, or call `abandon`.

        Args:
            submissions: Triples of a query, whose `query_id` is unique within this scheduler;
                the key of its evaluation, which requests with equal keys share, None if none
                does; and the requested output, such as a `Reduction`, None for the whole
                result. Equal outputs of one evaluation are computed once.
            then: Function of the results, whose result `results` returns as the only one. It is
                not called on an event loop: see `Request`.
        """
        if is_blocking():
            self._reject_engine_thread()
            request = Request(concurrent.futures.Future(), len(submissions), then)
        else:
            request = Request(_new_future(), len(submissions), then)
        try:
            self._worker.enqueue(request, submissions)
        except BaseException:
            self.abandon(request)
            raise
        return request

    async def results(self, request: Request) -> list[Any]:
        """Wait until all queries of a request have ended.

        Returns:
            The results in order; exception objects for failed queries.

        Raises:
            EngineError: An error of `answer` that ends all requests.
        """
        if not request.values:
            return []
        future = request.future
        try:
            if isinstance(future, concurrent.futures.Future):
                self._worker.flush()
                values: list[Any] = wait_for(future)
                if request.then is not None:
                    values = [request.then(values)]
            else:
                values = await future
        except GeneratorExit:
            # Garbage collection may raise it on a thread that holds the worker's lock, so the
            # evaluations are not abandoned.
            raise
        except BaseException:
            self.abandon(request)
            raise
        return values

    def abandon(self, request: Request) -> None:
        """Abandon a request unless it has ended."""
        self._worker.leave(request)
        request.future.cancel()  # asyncio then does not log an error that the future has

    def run(self, function: Callable[[EngineT], T], *, exclusively: bool = False) -> T:
        """Call `function(engine)` on the engine's thread between two steps, and wait.

        Args:
            function: The function.
            exclusively: Whether to call it after all earlier queries have ended. The engine
                then receives later queries after the call, and these share no evaluation with
                earlier ones.

        Raises:
            EngineClosedError: The engine was closed before the call.
            RuntimeError: This method was called on the engine's thread.
            Exception: The error that the function raised.
        """
        self._reject_engine_thread()
        result: T = wait_for(self._worker.call(function, exclusively=exclusively))
        return result

    def end(self, error: EngineError) -> None:
        """Fail all unfinished and later requests with an error, and close the engine."""
        self._worker.stop(error)

    def has_query(self, matches: Callable[[Any], bool]) -> bool:
        """Whether an unfinished query satisfies a predicate, which is called under a lock."""
        return self._worker.has_query(matches)

    def run_after(
        self, wait_for: Callable[[Any], bool], function: Callable[[EngineT], object]
    ) -> None:
        """Schedule `function(engine)` for when no unfinished query satisfies `wait_for`.

        This method returns at once; the function is called on the engine's thread between two
        steps, and its errors are logged. It is not called if the engine is closed before.

        Args:
            wait_for: Predicate of queries that must end before the call; called under a lock.
            function: Function of the engine.
        """
        self._worker.call(function, wait_for).add_done_callback(_log_failure)

    def reset(self) -> None:
        """Fail all unfinished requests with `QueryResetError`; the engine stays usable."""
        self._worker.reset(QueryResetError("cancel_all dropped the request; repeat it"))

    def close(self) -> None:
        """Fail all unfinished requests with `EngineClosedError` and close the engine.

        The call waits for the engine's current step. Closing twice is allowed.
        """
        self._worker.stop(closed_error())
        self._worker.join()

    def check_open(self) -> None:
        """Raise the error of requests if they are rejected.

        Raises:
            EngineClosedError: The engine was closed.
            EngineDiedError: The engine's thread ended.
        """
        self._worker.check_open()

    @property
    def closed(self) -> bool:
        """Whether requests are rejected: after `close`, or because the thread has ended."""
        return self._worker.stopped is not None

    def statistics(self) -> SchedulerStatistics:
        """Return the counters since the start."""
        return self._worker.statistics()

    def _reject_engine_thread(self) -> None:
        """Raise `RuntimeError` on the engine's thread, where the call would deadlock."""
        if self._worker.runs_here:
            raise RuntimeError(
                "called on the engine's own thread, which would wait for itself; "
                "call it on another thread"
            )


def _new_future() -> asyncio.Future[list[Any]]:
    try:
        return asyncio.get_running_loop().create_future()
    except RuntimeError:
        raise RuntimeError(
            "coroutines of genlm need a running event loop of asyncio; with trio, call the "
            "methods with the suffix _sync on another thread, as by trio.to_thread.run_sync"
        ) from None


def _checked_limit(name: str, value: int | None) -> int | None:
    return None if value is None else checked_integer(name, value, 1)


def _log_failure(future: concurrent.futures.Future[Any]) -> None:
    error = future.exception()
    if error is not None and not isinstance(error, EngineError):
        logger.error("a call on the engine's thread failed", exc_info=error)
