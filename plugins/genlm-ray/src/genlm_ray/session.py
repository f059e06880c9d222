"""`Session`: the queries, adapters and prefixes of one driver in a replica.

`SharedEngine` is the core's scheduler with the replica's engine. Sessions share it by requested
rows: while several sessions have queries, few queries are in the engine at a time, and the
next query is that of the session with the fewest rows so far. Queries of a session are ordered
by turn, in the session and in the engine. Sessions run on the replica's event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from genlm import EngineError
from genlm.plugin import (
    Completion,
    ContextLease,
    Engine,
    EvaluationError,
    GroupQuery,
    Query,
    Reduced,
    Scheduler,
    call_each,
    query_ids,
    with_groups,
)
from genlm_ray.client_reductions import SHARED_ROWS, ClientEngine, has_client_code
from genlm_ray.spec import ServingLimits
from genlm_ray.wire import (
    AnyQuery,
    Generations,
    Prefix,
    ReplicaRequest,
    row_count,
    unpack_queries,
)

Running = dict[int, Callable[[], None]]
"""Functions that abort queries, by the driver's query ids."""


class SharedEngine(Scheduler[Any]):
    """The scheduler of a replica's engine, which receives the queries of several sessions.

    Args:
        build: Function that builds the engine; called on the engine's thread.
        step_timeout_s: Maximum duration of a step, after which the process ends.

    Attributes:
        lease: `GroupQuery.lease` of the populations of all sessions.
    """

    def __init__(self, build: Callable[[], Engine], step_timeout_s: float) -> None:
        super().__init__(
            lambda: _with_step_limit(with_groups(build()), step_timeout_s),
            release=_release,
            name="genlm-replica",
        )
        self.lease = functools.partial(ContextLease, on_drop=self.release)
        self._busy: dict[Session, None] = {}  # sessions with queries

    async def compute(self, queries: Sequence[AnyQuery]) -> list[Any]:
        """Return the results or exceptions of queries."""
        submitted = [_submissions(query, next(query_ids)) for query in queries]
        request = self.submit(list(itertools.chain(*submitted)))
        return await self.results(request)

    def submit_waiting(self, session: Session) -> None:
        """Submit waiting queries after the queries of a session have changed."""
        if not session.unanswered:
            self._busy.pop(session, None)
        elif session not in self._busy:  # idle sessions accumulate no share
            least = min((other.rows for other in self._busy), default=0)
            session.rows = max(session.rows, least)
            self._busy[session] = None
        room = math.inf
        if len(self._busy) > 1:
            room = SHARED_ROWS - sum(len(other.running) for other in self._busy)
        waiting_sessions = [other for other in self._busy if other.waiting]
        while waiting_sessions and room > 0:
            first = min(waiting_sessions, key=lambda other: other.rows)
            first.submit_next()
            room -= 1
            if not first.waiting:
                waiting_sessions.remove(first)


class Session:
    """Connection of a driver. After the replica or the connection was lost, a new one begins.

    Args:
        driver: Name of the driver, which may have several consecutive sessions.
        shared: The engine.
        limits: Resource limits of the driver.

    Attributes:
        generations: Generations of the driver's populations, by number.
        adapters: Names of the driver's adapters.
        prefixes: Cached prefixes of the driver.
        finished: Completions that were not sent yet.
        changed: Set when a message to the driver may be due.
        seen_s: `time.monotonic()` of the driver's last call; infinite while it attaches.
        waiting: Queries that were not submitted to the engine's scheduler, with their turns, by
            id, in the order of the turns.
        running: Queries that were submitted.
        rows: Number of rows computed for the session; at least the minimum of the other
            sessions when it became busy.
    """

    def __init__(self, driver: str, shared: SharedEngine, limits: ServingLimits) -> None:
        self.driver = driver
        self.generations = Generations()
        self.adapters: set[str] = set()
        self.prefixes: dict[Prefix, None] = {}
        self.finished: list[Completion] = []
        self.changed = asyncio.Event()
        self.seen_s = math.inf
        self.waiting: dict[int, tuple[int, AnyQuery]] = {}
        self.running: Running = {}
        self.rows = 0
        self._turn = 0
        self._shared = shared
        self._limits = limits
        self._reducer: Scheduler[Any] | None = None  # of user-defined reductions
        self._running_reductions: Running = {}

    @property
    def unanswered(self) -> int:
        """Number of the driver's unfinished queries."""
        return len(self.waiting) + len(self.running) + len(self._running_reductions)

    def engine_adapter(self, name: str | None) -> str | None:
        """Return the engine's name of a driver's adapter, which is unique among drivers."""
        if name is None or name in getattr(self._shared.engine, "adapters", ()):
            return name
        return f"{name}-{self.driver}"

    def accept(self, message: ReplicaRequest) -> None:
        """Drop what a message drops, submit its new queries, release contexts.

        Raises:
            EvaluationError: The driver would exceed its limits. No query was accepted.
        """
        if message.dropped:
            self.drop(message.dropped)
        try:
            self.submit(self._unpack(message), message.turn)
        finally:
            if message.released is not None:
                names, sequences = message.released
                self._shared.release(
                    [
                        (self.engine_adapter(name), sequence.key)
                        for name, sequence in zip(names, sequences.unpack(), strict=True)
                    ]
                )

    def _unpack(self, message: ReplicaRequest) -> list[AnyQuery]:
        """Return the queries of a message, if they are within the driver's limits."""
        sequences = sum(group.size for group in message.groups)
        self._limits.check(
            EvaluationError,
            sequences=self.generations.sequences + sequences if sequences else 0,
        )
        adapters = list(map(self.engine_adapter, message.queries.adapters))
        queries: list[AnyQuery] = []
        queries += unpack_queries(message.queries._replace(adapters=adapters))
        for packed in message.groups:
            adapter = self.engine_adapter(packed.query.adapter)
            group = self.generations.group(packed, adapter, self._shared.lease)
            if group is not None:
                queries.append(group)
        return queries

    def submit(self, queries: Sequence[AnyQuery], turn: int = 0) -> None:
        """Accept queries.

        Args:
            queries: The queries; `Query.turn` is the turn in the program.
            turn: The program's current turn, which is that of queries of populations.
        """
        self._turn = max(self._turn, turn)
        for query in queries:
            if has_client_code(query):
                self._reduce(query)
            else:
                query_turn = query.turn if isinstance(query, Query) else turn
                self.waiting[query.query_id] = query_turn, query
        self.waiting = dict(sorted(self.waiting.items(), key=lambda item: item[1][0]))
        self._shared.submit_waiting(self)

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop generations, and abort the queries that were sent with them or have these ids.

        A query that arrives later is computed, and its result is ignored.
        """
        for number in numbers:
            self.generations.drop(number)
            self.waiting.pop(number, None)
            for running in (self.running, self._running_reductions):
                if number in running:
                    running.pop(number)()
        self._shared.submit_waiting(self)
        self.changed.set()  # otherwise a poll without queries would not return

    def end(self) -> None:
        """Drop all queries and end the session's thread."""
        self.drop([*self.waiting, *self.running, *self._running_reductions])
        self._reducer = None  # ends its thread

    def submit_next(self) -> None:
        """Submit the first waiting query to the scheduler."""
        _, query = self.waiting.pop(next(iter(self.waiting)))
        self._start(query, self._shared, next(query_ids), self.running)

    def _start(
        self, query: AnyQuery, scheduler: Scheduler[Any], scheduler_id: int, running: Running
    ) -> None:
        """Submit a query to a scheduler under the scheduler's id of it."""
        self.rows += row_count(query)
        if isinstance(query, Query):
            query.turn = max(0, query.turn - self._turn)
        try:
            request = scheduler.submit(_submissions(query, scheduler_id))
        except EngineError as error:  # the engine's thread has ended
            self._finish(query.query_id, error)
            return
        running[query.query_id] = functools.partial(scheduler.abandon, request)
        request.future.add_done_callback(functools.partial(self._on_done, query, running))

    def _on_done(self, query: AnyQuery, running: Running, future: asyncio.Future[Any]) -> None:
        if future.cancelled() or running.pop(query.query_id, None) is None:
            return  # the query was aborted
        result: Any = future.exception()
        if result is None:
            is_reduced = isinstance(query, Query) and query.outputs != (None,)
            result = Reduced(tuple(future.result())) if is_reduced else future.result()[0]
        self._finish(query.query_id, result)
        self._shared.submit_waiting(self)

    def _finish(self, query_id: int, result: Any) -> None:
        """Deliver a result or an exception."""
        result = self.generations.finish(query_id, result)
        if isinstance(result, Exception):
            completion = Completion(query_id, error=result)
        else:  # the scheduler has checked rows
            completion = Completion(query_id, result, is_checked=True)
        self.finished.append(completion)
        self.changed.set()

    # -- user-defined reductions ------------------------------------------------------

    def _reduce(self, query: AnyQuery) -> None:
        """Compute a query with a user-defined reduction on the session's thread."""
        if self._reducer is None:
            shared, active = self._shared, self._running_reductions
            self._reducer = Scheduler(
                lambda: with_groups(ClientEngine(shared.engine, shared.compute, active)),
                name="genlm-reductions",
            )
        self._start(query, self._reducer, query.query_id, self._running_reductions)
        self.time_out_reductions()

    def time_out_reductions(self) -> None:
        """Fail the user-defined reductions of the session if one of them takes too long."""
        reducer, limit_s = self._reducer, self._limits.reduction_s
        if reducer is None or reducer.closed or reducer.engine.reduction_s <= limit_s:
            return
        for query_id in list(self._running_reductions):
            self._running_reductions.pop(query_id)()
            error = EvaluationError(
                f"a reduction of this program has run for more than {limit_s:g} s in a "
                f"replica; until it returns, the replica computes no other user-defined "
                f"reduction of this program"
            )
            self._finish(query_id, error)


def _submissions(query: AnyQuery, query_id: int) -> list[tuple[AnyQuery, Any, Any]]:
    """Return the arguments of `Scheduler.submit` for a query, one for each output."""
    if isinstance(query, GroupQuery):
        return [(dataclasses.replace(query, query_id=query_id), None, None)]
    renumbered = query.replace(query_id=query_id)
    if query.outputs == (None,):
        return [(renumbered, None, None)]
    return [(renumbered, query_id, output) for output in query.outputs]


def _release(engine: Any, leases: list[Sequence[tuple[str | None, bytes]]]) -> None:
    if hasattr(engine, "release_context"):
        call_each(engine.release_context, itertools.chain.from_iterable(leases))


def _with_step_limit(engine: Any, step_timeout_s: float) -> Any:
    """Make an engine end its process when a step takes too long, even if Python is blocked.

    `faulthandler` ends the process from a thread without the GIL.
    """
    step = engine.step

    def limited_step() -> list[Completion]:
        faulthandler.dump_traceback_later(step_timeout_s, exit=True, file=2)
        try:
            return list(step())
        finally:
            faulthandler.cancel_dump_traceback_later()

    engine.step = limited_step
    return engine
