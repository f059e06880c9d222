"""`Session`: the queries, adapters and prefixes of one driver in a replica.

`SharedEngine` is the replica's engine on the core's scheduler. Sessions share it by requested
tokens: while several of them have queries, few are in the engine at a time, and the next one is
that of the session with the fewest tokens so far. All is used on the replica's event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genlm import EngineError
from genlm.plugin import (
    Completion,
    Engine,
    EvaluationError,
    GroupQuery,
    Query,
    Reduced,
    Scheduler,
    with_groups,
)
from genlm_ray.client_reductions import SHARED_ROWS, ClientEngine, has_client_code
from genlm_ray.router import AnyQuery
from genlm_ray.wire import Generations

__all__ = ["Prefix", "Session", "SharedEngine"]

logger = logging.getLogger("genlm.ray")

Prefix = tuple[tuple[int, ...], str | None]
"""Token ids and the driver's name of the adapter."""

Running = dict[int, Callable[[], None]]
"""Functions that abort queries, by the driver's ids of these."""


class SharedEngine:
    """Builds an engine on its thread and gives it the queries of several sessions.

    Args:
        build: Builds the engine; called on that thread.
        step_timeout_s: Longest step, after which the process ends; None for no limit.
    """

    def __init__(self, build: Callable[[], Engine], step_timeout_s: float | None) -> None:
        def built() -> Any:
            engine = with_groups(build())
            return engine if step_timeout_s is None else _Guarded(engine, step_timeout_s)

        self.scheduler: Scheduler[Any] = Scheduler(
            built, release=_release, name="genlm-replica"
        )
        self._query_ids = itertools.count()
        self._busy: dict[Session, None] = {}  # those with queries

    @property
    def engine(self) -> Any:
        """The engine."""
        return self.scheduler.engine

    def next_id(self) -> int:
        """Return a new id of a query for the scheduler."""
        return next(self._query_ids)

    async def compute(self, queries: Sequence[AnyQuery]) -> list[Any]:
        """Return the results or exceptions of queries; on any event loop."""
        submitted = [_submissions(each, self.next_id()) for each in queries]
        request = self.scheduler.submit(list(itertools.chain(*submitted)))
        return await self.scheduler.results(request)

    def fill(self, session: Session) -> None:
        """Pass on waiting queries after the queries of a session have changed."""
        if not session.unanswered:
            self._busy.pop(session, None)
        elif session not in self._busy:  # an idle session accumulates no share
            least = min((each.tokens for each in self._busy), default=0.0)
            session.tokens = max(session.tokens, least)
            self._busy[session] = None
        room = math.inf
        if len(self._busy) > 1:
            room = SHARED_ROWS - sum(len(each.running) for each in self._busy)
        asking = [each for each in self._busy if each.waiting]
        while asking and room > 0:
            first = min(asking, key=lambda each: each.tokens)
            first.pass_on()
            room -= 1
            if not first.waiting:
                asking.remove(first)


class Session:
    """A driver's connection: it begins anew when the replica or the connection was lost.

    Args:
        driver: Name of the driver, which may have several sessions, one after the other.
        shared: The engine.
        reduction_s: Maximum time of the driver's own reductions of a batch.

    Attributes:
        generations: Populations that the driver names by number.
        adapters: Paths of its adapters, by its own names.
        prefixes: Prefixes that are kept for it.
        finished: Completions that were not sent yet.
        changed: Set when there may be something to send.
        seen_s: `time.monotonic()` of the driver's last call; infinite while it attaches.
        waiting: Queries that the engine's scheduler does not have yet, by id.
        running: The other ones.
        tokens: Tokens computed for it, normalised to its fair share.
    """

    def __init__(self, driver: str, shared: SharedEngine, reduction_s: float) -> None:
        self.driver = driver
        self.generations = Generations()
        self.adapters: dict[str, str] = {}
        self.prefixes: dict[Prefix, None] = {}
        self.finished: list[Completion] = []
        self.changed = asyncio.Event()
        self.seen_s = math.inf
        self.waiting: dict[int, AnyQuery] = {}
        self.running: Running = {}
        self.tokens = 0.0
        self._shared = shared
        self._reduction_s = reduction_s
        self._reducer: Scheduler[Any] | None = None  # has the driver's own reductions
        self._reducing: Running = {}
        self._limiting: asyncio.Task[None] | None = None

    @property
    def unanswered(self) -> int:
        """Number of the driver's queries that are not finished."""
        return len(self.waiting) + len(self.running) + len(self._reducing)

    def submit(self, queries: Sequence[AnyQuery]) -> None:
        """Accept queries."""
        for query in queries:
            if has_client_code(query):
                self._reduce(query)
            else:
                self.waiting[query.query_id] = query
        self._shared.fill(self)

    def abort(self, query_ids: Sequence[int]) -> None:
        """Drop queries."""
        for query_id in query_ids:
            self.generations.finish(query_id)
            if self.waiting.pop(query_id, None) is None:
                for running in (self.running, self._reducing):
                    if query_id in running:
                        running.pop(query_id)()
        self._shared.fill(self)
        self.changed.set()  # else a poll for the last of them would wait for ever

    def end(self) -> None:
        """Drop all queries, and end what waits for them."""
        self.abort([*self.waiting, *self.running, *self._reducing])
        if self._limiting is not None:
            self._limiting.cancel()
        self._reducer = None  # its thread ends

    def pass_on(self) -> None:
        """Give the first waiting query to the scheduler."""
        query = self.waiting.pop(next(iter(self.waiting)))
        self._start(query, self._shared.scheduler, self._shared.next_id(), self.running)

    def _start(
        self, query: AnyQuery, scheduler: Scheduler[Any], own_id: int, running: Running
    ) -> None:
        """Give a query to a scheduler, which knows it by an id of its own."""
        self.tokens += _tokens_of(query)
        try:
            request = scheduler.submit(_submissions(query, own_id))
        except EngineError as error:  # the engine's thread has ended
            self._finish(query.query_id, error)
            return
        running[query.query_id] = functools.partial(scheduler.abandon, request)
        request.future.add_done_callback(functools.partial(self._done, query, running))

    def _done(self, query: AnyQuery, running: Running, future: asyncio.Future[Any]) -> None:
        if future.cancelled() or running.pop(query.query_id, None) is None:
            return  # it was aborted
        result: Any = future.exception()
        if result is None:
            is_reduced = isinstance(query, Query) and query.outputs != (None,)
            result = Reduced(tuple(future.result())) if is_reduced else future.result()[0]
        self._finish(query.query_id, result)
        self._shared.fill(self)

    def _finish(self, query_id: int, result: Any) -> None:
        """Deliver a result or an exception."""
        result = self.generations.finish(query_id, result)
        has_failed = isinstance(result, Exception)
        self.finished.append(
            Completion(query_id, error=result) if has_failed else Completion(query_id, result)
        )
        self.changed.set()

    # -- the driver's own reductions --------------------------------------------------

    def _reduce(self, query: AnyQuery) -> None:
        """Compute a query with a reduction that is the driver's code, on its thread."""
        if self._reducer is None:
            shared, wanted = self._shared, self._reducing
            self._reducer = Scheduler(
                lambda: with_groups(ClientEngine(shared.engine, shared.compute, wanted)),
                name="genlm-reductions",
            )
            if self._reduction_s < math.inf:
                self._limiting = asyncio.create_task(self._limit_reductions())
        if self._is_overdue:
            self._finish(query.query_id, self._overdue())
        else:
            self._start(query, self._reducer, query.query_id, self._reducing)

    @property
    def _is_overdue(self) -> bool:
        reducer = self._reducer
        return reducer is not None and reducer.engine.reduction_s > self._reduction_s

    async def _limit_reductions(self) -> None:
        """Fail the driver's own reductions when one of them takes too long."""
        while True:
            await asyncio.sleep(self._reduction_s / 4)
            for query_id in list(self._reducing) if self._is_overdue else ():
                self._reducing.pop(query_id)()
                self._finish(query_id, self._overdue())

    def _overdue(self) -> EvaluationError:
        return EvaluationError(
            f"a reduction of this program has run for more than {self._reduction_s:g} s in a "
            f"replica; until it returns, no other reduction of its own is computed there"
        )


def _submissions(query: AnyQuery, query_id: int) -> list[tuple[AnyQuery, Any, Any]]:
    """Return what a scheduler computes for a query: each output, under an id of its own."""
    if isinstance(query, GroupQuery):
        return [(dataclasses.replace(query, query_id=query_id), None, None)]
    own = query.replace(query_id=query_id)
    if query.outputs == (None,):
        return [(own, None, None)]
    return [(own, query_id, output) for output in query.outputs]


def _tokens_of(query: AnyQuery) -> int:
    """Cost of a query in tokens: rows, targets or continuations."""
    if isinstance(query, GroupQuery):
        most = 1 if query.sampling is None else int(np.max(query.sampling.max_tokens))
        return len(query.wanted) * most
    return 1 + len(query.targets)


def _release(engine: Any, contexts: list[tuple[str | None, bytes]]) -> None:
    if hasattr(engine, "release_context"):
        for adapter, key in contexts:
            try:
                engine.release_context(adapter, key)
            except Exception:  # the engine then keeps that state
                logger.exception("release_context of the engine raised")


class _Guarded:
    """An engine whose process ends when a step takes too long, also if Python is blocked.

    Other attributes are those of the engine.
    """

    def __init__(self, engine: Any, step_timeout_s: float) -> None:
        self._engine = engine
        self._step_timeout_s = step_timeout_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        """Step the engine; `faulthandler` ends the process from a thread without the GIL."""
        faulthandler.dump_traceback_later(self._step_timeout_s, exit=True, file=2)
        try:
            return list(self._engine.step())
        finally:
            faulthandler.cancel_dump_traceback_later()
