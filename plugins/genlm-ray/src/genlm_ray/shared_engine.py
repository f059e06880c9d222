"""`SharedEngine`: an engine on the core's scheduler that computes for several clients.

Clients share the engine by requested tokens: while several of them have queries, few rows are
in the engine at a time, and the next query is that of the client with the fewest tokens so far.
Used on one event loop.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from genlm import EngineError
from genlm.plugin import Completion, Engine, GroupQuery, Query, Reduced, Scheduler, with_groups
from genlm_ray.router import AnyQuery

__all__ = ["SHARED_ROWS", "Share", "SharedEngine"]

logger = logging.getLogger("genlm.ray")

SHARED_ROWS = 64
"""Maximum number of queries in the engine while several clients have queries."""

OnDone = Callable[[Completion], None]


class Share:
    """The queries of a client.

    Attributes:
        waiting: Queries that the scheduler does not have yet, by the client's id.
        running: Functions that abort the other ones, by the client's id.
        tokens: Tokens computed for it, normalised to its fair share.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[AnyQuery, OnDone]] = {}
        self.running: dict[int, Callable[[], None]] = {}
        self.tokens = 0.0


class SharedEngine:
    """Builds an engine on its thread and gives it the queries of several clients.

    Args:
        build: Builds the engine; called on that thread.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.scheduler: Scheduler[Any] = Scheduler(
            lambda: _Timed(with_groups(build())), release=_release, name="genlm-replica"
        )
        self._query_ids = itertools.count()
        self._busy: dict[Share, None] = {}  # those with queries

    @property
    def engine(self) -> Any:
        """The engine."""
        return self.scheduler.engine

    @property
    def step_seconds(self) -> float:
        """Elapsed time of the engine's current step."""
        began_s = self.engine.step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def submit(self, share: Share, queries: Iterable[tuple[AnyQuery, OnDone]]) -> None:
        """Queue queries of a client; the completions have their ids."""
        if share not in self._busy:  # an idle client accumulates no share
            share.tokens = max(share.tokens, min((s.tokens for s in self._busy), default=0.0))
        for query, on_done in queries:
            share.waiting[query.query_id] = query, on_done
            self._busy[share] = None
        self._fill()

    def abort(self, share: Share, query_ids: Iterable[int]) -> None:
        """Drop queries of a client."""
        for query_id in query_ids:
            if share.waiting.pop(query_id, None) is None and query_id in share.running:
                share.running.pop(query_id)()
        if not (share.waiting or share.running):
            self._busy.pop(share, None)
        self._fill()

    def _fill(self) -> None:
        """Pass queries to the scheduler, in fair shares if several clients have any."""
        room = None
        if len(self._busy) > 1:
            room = SHARED_ROWS - sum(len(each.running) for each in self._busy)
        asking = [share for share in self._busy if share.waiting]
        while asking and (room is None or room > 0):
            share = min(asking, key=lambda each: each.tokens)
            self._pass_on(share)
            if not share.waiting:
                asking.remove(share)
            if room is not None:
                room -= 1

    def _pass_on(self, share: Share) -> None:
        query_id = next(iter(share.waiting))
        query, on_done = share.waiting.pop(query_id)
        share.tokens += _tokens_of(query)
        own_id = next(self._query_ids)
        try:
            request = self.scheduler.submit(_submissions(query, own_id))
        except EngineError as error:  # the engine's thread has ended
            on_done(Completion(query_id, error=error))
            return
        share.running[query_id] = functools.partial(self.scheduler.abandon, request)
        done = functools.partial(self._done, share, query, on_done)
        request.future.add_done_callback(done)

    def _done(self, share: Share, query: AnyQuery, on_done: OnDone, future: Any) -> None:
        query_id = query.query_id
        if future.cancelled() or share.running.pop(query_id, None) is None:
            return  # it was aborted
        if not (share.waiting or share.running):
            self._busy.pop(share, None)
        error = future.exception()
        if error is not None:
            on_done(Completion(query_id, error=error))
        elif isinstance(query, Query) and query.outputs != (None,):
            on_done(Completion(query_id, Reduced(tuple(future.result()))))
        else:
            [result] = future.result()
            failed = isinstance(result, Exception)
            on_done(
                Completion(query_id, error=result) if failed else Completion(query_id, result)
            )
        if share.waiting or len(self._busy) > 1:
            self._fill()


def _submissions(query: AnyQuery, own_id: int) -> list[tuple[AnyQuery, Any, Any]]:
    """Return what the scheduler computes for a query: each output, under an id of its own."""
    if isinstance(query, GroupQuery):
        return [(dataclasses.replace(query, query_id=own_id), None, None)]
    own = query.replace(query_id=own_id)
    if query.outputs == (None,):
        return [(own, None, None)]
    return [(own, own_id, output) for output in query.outputs]


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


class _Timed:
    """An engine whose steps are timed; its other attributes are those of the engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.step_began_s: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        """Step the engine."""
        self.step_began_s = time.monotonic()
        try:
            return list(self._engine.step())
        finally:
            self.step_began_s = None
