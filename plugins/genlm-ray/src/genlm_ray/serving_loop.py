"""`ServingLoop`: one engine on its thread, stepped for the queries of several drivers.

The Ray-independent part of a replica. Drivers share the engine by requested tokens: the next
query is that of the driver with the fewest tokens so far.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from genlm.plugin import (
    Completion,
    Engine,
    EvaluationError,
    GroupQuery,
    GroupResult,
    Query,
    Reduced,
    with_groups,
)
from genlm_ray.client_reductions import (
    AnyQuery,
    ReductionThread,
    has_client_code,
    reduced_rows,
    rows_only,
)

__all__ = ["ServingLoop"]

logger = logging.getLogger("genlm.ray")

SHARED_ROWS = 64
"""Maximum number of rows in the engine while several drivers have queries."""

_TEXT_VALUES = 2**25
"""Maximum number of entries of the rows of a text that are in memory for a driver's own
reduction: 128 MiB. Fewer rows would cost an engine without a prefix cache more passes."""


_OF_ROWS = (torch.Tensor, GroupResult, Reduced)
"""Results of the queries that `rows_only` returns."""


class _Driver:
    """A driver's unanswered queries."""

    def __init__(self, on_finished: Callable[[], None], served: float) -> None:
        self.waiting: deque[AnyQuery] = deque()
        self.in_engine: dict[int, int] = {}  # the driver's query ids by the engine's
        self.finished: list[Completion] = []
        self.on_finished = on_finished
        self.served = served  # tokens, normalised to its fair share
        self.reducer: ReductionThread | None = None
        # Rows of each of those in the engine, until a reduction of the driver's own has them.
        self.with_own_code: dict[int, int] = {}

    @property
    def unanswered(self) -> int:
        return len(self.waiting) + len(self.in_engine)

    def can_continue(self, text_rows: int) -> bool:
        """Whether it has a query for the engine, and few rows in its reductions."""
        own = self.with_own_code
        is_full = own and (len(own) >= SHARED_ROWS or sum(own.values()) >= 2 * text_rows)
        return bool(self.waiting) and not is_full


class ServingLoop:
    """Steps an engine on a dedicated thread.

    Args:
        build: Builds the engine; called on that thread.
        on_death: Called on that thread with the exception that ended it.
        reduction_timeout_s: Timeout of a driver's custom reductions of a batch of rows or of a
            part of a text.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        on_death: Callable[[BaseException], None],
        *,
        reduction_timeout_s: float = 3600.0,
    ) -> None:
        self.built: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self.built.set_running_or_notify_cancel()  # a driver that leaves must not cancel it
        self._reduction_timeout_s = reduction_timeout_s
        self._changed = threading.Condition()
        self._drivers: dict[str, _Driver] = {}
        self._calls: deque[tuple[Callable[[Engine], Any], concurrent.futures.Future[Any]]]
        self._calls = deque()
        self._aborts: list[int] = []
        self._released: list[tuple[str | None, bytes]] = []
        self._owners: dict[int, tuple[str, AnyQuery]] = {}  # queries in the engine
        self._ids = itertools.count()
        self._rows = 0  # of those, the ones that ask for rows
        self._text_rows = SHARED_ROWS  # of a part of a text for a driver's own reduction
        self._step_began_s: float | None = None
        self._closed = False
        arguments = (build, on_death)
        thread = threading.Thread(target=self._run, args=arguments, name="genlm-replica")
        thread.daemon = True
        thread.start()

    # -- any thread -------------------------------------------------------------------

    @property
    def step_seconds(self) -> float:
        """Elapsed time of the engine's current step."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def drivers(self) -> dict[str, int]:
        """The unanswered queries of each driver."""
        with self._changed:
            return {name: driver.unanswered for name, driver in self._drivers.items()}

    def attach(self, name: str, on_finished: Callable[[], None]) -> None:
        """Accept queries of a driver, whose `on_finished` is called on any thread."""
        with self._changed:
            served = min((driver.served for driver in self._drivers.values()), default=0.0)
            self._drivers[name] = _Driver(on_finished, served)

    def detach(self, name: str) -> None:
        """Drop a driver's queries."""
        with self._changed:
            driver = self._drivers.pop(name, None)
            if driver is not None:
                self._aborts.extend(driver.in_engine)
                self._changed.notify()
                if driver.reducer is not None:
                    driver.reducer.close()

    def submit(self, name: str, queries: Sequence[AnyQuery]) -> None:
        """Queue the queries of a driver; ids are the driver's."""
        with self._changed:
            driver = self._drivers[name]
            if not driver.unanswered:  # an idle driver accumulates no share
                busy = [each.served for each in self._drivers.values() if each.unanswered]
                driver.served = max(driver.served, min(busy, default=driver.served))
            driver.waiting.extend(queries)
            self._changed.notify()

    def abort(self, name: str, query_ids: Sequence[int]) -> None:
        """Drop queries of a driver, which is told when none is left."""
        dropped = set(query_ids)
        with self._changed:
            driver = self._drivers[name]
            driver.waiting = deque(
                each for each in driver.waiting if each.query_id not in dropped
            )
            of_engine = [mine for mine, theirs in driver.in_engine.items() if theirs in dropped]
            for query_id in of_engine:
                del driver.in_engine[query_id]
                driver.with_own_code.pop(query_id, None)
            self._aborts.extend(of_engine)
            self._changed.notify()
            is_answered = not driver.unanswered
        if is_answered:  # else a poll for the last of them would wait for ever
            driver.on_finished()

    def release(self, adapter: str | None, key: bytes) -> None:
        """Tell the engine that a driver has dropped a context, if it supports that."""
        with self._changed:
            self._released.append((adapter, key))
            self._changed.notify()

    def finished(self, name: str) -> tuple[list[Completion], int]:
        """Return a driver's completions, and how many queries it still waits for."""
        with self._changed:
            driver = self._drivers[name]
            return list(driver.finished), driver.unanswered

    def discard_finished(self, name: str, count: int) -> None:
        """Forget the first completions of a driver, which were packed."""
        with self._changed:
            del self._drivers[name].finished[:count]

    def pending(self, name: str) -> int:
        """Number of a driver's queries without fetched results."""
        with self._changed:
            driver = self._drivers[name]
            return driver.unanswered + len(driver.finished)

    def fail_overdue_reductions(self) -> None:
        """Fail the queries of drivers whose custom reductions take too long."""
        with self._changed:
            overdue = [each for each in self._drivers.values() if self._is_overdue(each)]
            for driver in overdue:
                for query_id in sorted(driver.with_own_code):
                    theirs = driver.in_engine.pop(query_id)
                    driver.finished.append(Completion(theirs, error=self._overdue_error()))
                driver.with_own_code.clear()
        for driver in overdue:
            driver.on_finished()

    def _is_overdue(self, driver: _Driver) -> bool:
        reducer = driver.reducer
        return reducer is not None and reducer.seconds > self._reduction_timeout_s

    def _overdue_error(self) -> EvaluationError:
        return EvaluationError(
            f"a reduction of this program has run for more than {self._reduction_timeout_s:g} "
            f"s in a replica; until it returns, no other reduction of its own is computed there"
        )

    def call(self, function: Callable[[Engine], Any]) -> concurrent.futures.Future[Any]:
        """Call a function on the engine's thread between two steps."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            self._calls.append((function, future))
            self._changed.notify()
        return future

    def statistics(self) -> Mapping[str, int | float | str]:
        """The engine's statistics."""
        return self.built.result().statistics()

    def close(self) -> None:
        """End the thread after its step."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    # -- the engine's thread ----------------------------------------------------------

    def _run(
        self, build: Callable[[], Engine], on_death: Callable[[BaseException], None]
    ) -> None:
        try:
            engine: Any = with_groups(build())
        except BaseException as error:  # noqa: BLE001 - raised where `built` is awaited
            self.built.set_exception(error)
            return
        self._text_rows = max(SHARED_ROWS, _TEXT_VALUES // engine.vocabulary.size)
        self.built.set_result(engine)
        try:
            while self._wait():
                self._work(engine)
            engine.close()
        except BaseException as error:  # noqa: BLE001 - the process ends with it
            on_death(error)

    def _wait(self) -> bool:
        with self._changed:
            while not (
                self._closed or self._calls or self._aborts or self._released or self._owners
            ):
                drivers = self._drivers.values()
                if any(driver.can_continue(self._text_rows) for driver in drivers):
                    break
                self._changed.wait()
            return not self._closed

    def _work(self, engine: Any) -> None:
        with self._changed:
            aborts, self._aborts = self._aborts, []
            calls, self._calls = self._calls, deque()
        for query_id in aborts:
            self._remove(query_id)
            engine.abort(query_id)
        for function, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(engine)
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                future.set_exception(error)
            else:
                future.set_result(result)
        finished = self._submit(engine)
        self._release(engine)  # after the submissions, which may use released contexts
        if self._owners:
            finished += self._step(engine)
        self._deliver(finished)

    def _release(self, engine: Engine) -> None:
        with self._changed:
            released, self._released = self._released, []
        release = getattr(engine, "release_context", None)
        if release is not None:
            for adapter, key in released:
                try:
                    release(adapter, key)
                except Exception:  # the engine then keeps that state
                    logger.exception("release_context of %s raised", type(engine).__name__)

    def _submit(self, engine: Any) -> list[Completion]:
        """Submit the drivers' queries; return the errors of refused queries."""
        with self._changed:
            chosen = self._chosen()
            overdue = {name for name, one in self._drivers.items() if self._is_overdue(one)}
        refused = []
        for name, query, wanted in chosen:
            query_id = query.query_id
            try:
                if wanted is not query and name in overdue:
                    raise self._overdue_error()
                if isinstance(wanted, GroupQuery):
                    engine.submit_group(wanted)
                else:
                    engine.submit(wanted)
            except Exception as error:  # noqa: BLE001 - it fails this query alone
                refused.append(Completion(query_id, error=error))
            self._owners[query_id] = (name, query)
            self._rows += _is_of_rows(query)
        return refused

    def _chosen(self) -> list[tuple[str, AnyQuery, AnyQuery]]:
        """Choose queries in fair shares, renamed to ids that are unique in the engine.

        Returns:
            The names of drivers, their queries, and what the engine computes of each: rows
            only, where a reduction is the driver's code.
        """
        limit = self._text_rows
        asking = {name: one for name, one in self._drivers.items() if one.can_continue(limit)}
        busy = [name for name, one in self._drivers.items() if one.unanswered]
        room = SHARED_ROWS - self._rows if len(busy) > 1 else None
        chosen: list[tuple[str, AnyQuery, AnyQuery]] = []
        while asking and (room is None or len(chosen) < room):
            name = min(asking, key=lambda one: asking[one].served)
            driver = asking[name]
            query_id = next(self._ids)
            original = driver.waiting.popleft()
            query = wanted = _renamed(original, query_id)
            driver.in_engine[query_id] = original.query_id
            if has_client_code(query):
                wanted = rows_only(query, limit)
                targets = wanted.targets if isinstance(wanted, Query) else ()
                driver.with_own_code[query_id] = max(1, len(targets))
            driver.served += _share(wanted)
            chosen.append((name, query, wanted))
            if not driver.can_continue(limit):
                del asking[name]
        return chosen

    def _step(self, engine: Engine) -> list[Completion]:
        self._step_began_s = time.monotonic()
        try:
            return self._reduced(list(engine.step()))
        except Exception as error:  # noqa: BLE001 - every query in the engine gets it
            query_ids = list(self._owners)
            for query_id in query_ids:
                engine.abort(query_id)
            return [Completion(query_id, error=error) for query_id in query_ids]
        finally:
            self._step_began_s = None

    def _reduced(self, completions: list[Completion]) -> list[Completion]:
        """Reduce rows, for engines that do not reduce them."""
        places = []
        members: list[tuple[Query, torch.Tensor]] = []
        for place, (query_id, result, _) in enumerate(completions):
            _, query = self._owners.get(query_id, (None, None))
            if not isinstance(query, Query) or has_client_code(query):
                continue
            if isinstance(result, torch.Tensor) and query.outputs != (None,):
                places.append(place)
                members.append((query, result))
        if members:
            for place, reduced in zip(places, reduced_rows(members), strict=True):
                completions[place] = reduced
        return completions

    def _deliver(self, finished: list[Completion]) -> None:
        """Pass on the engine's completions; rows for a driver's code go to its thread."""
        answered: dict[str, list[Completion]] = {}
        to_reduce: dict[str, list[tuple[AnyQuery, Any]]] = {}
        for completion in finished:
            name, query = self._remove(completion.query_id)
            if query is None:
                continue
            rows = completion.result
            if isinstance(rows, _OF_ROWS) and has_client_code(query):
                to_reduce.setdefault(name, []).append((query, rows))
            else:
                answered.setdefault(name, []).append(completion)
        for name, members in to_reduce.items():
            self._reduce_apart(name, members)
        for name, completions in answered.items():
            self._answer(name, completions)

    def _reduce_apart(self, name: str, members: list[tuple[AnyQuery, Any]]) -> None:
        with self._changed:
            driver = self._drivers.get(name)
            if driver is None:
                return
            members = [each for each in members if each[0].query_id in driver.in_engine]
            if not members:  # all were aborted
                return
            if driver.reducer is None:
                driver.reducer = ReductionThread(functools.partial(self._answer, name))
            driver.reducer.submit(members)

    def _answer(self, name: str, answers: Sequence[Completion | Query]) -> None:
        """Hand completions, by the engine's ids, to their driver; queue the rest of texts."""
        with self._changed:
            driver = self._drivers.get(name)
            if driver is None:
                return
            for answer in answers:
                driver.with_own_code.pop(answer.query_id, None)
                query_id = driver.in_engine.pop(answer.query_id, None)
                if query_id is None:  # aborted
                    continue
                if isinstance(answer, Query):
                    driver.waiting.appendleft(answer.replace(query_id=query_id))
                else:
                    driver.finished.append(answer._replace(query_id=query_id))
            self._changed.notify()  # the engine may wait for the driver's reductions
        driver.on_finished()

    def _remove(self, query_id: int) -> tuple[str, AnyQuery | None]:
        name, query = self._owners.pop(query_id, ("", None))
        if query is not None:
            self._rows -= _is_of_rows(query)
        return name, query


def _share(query: AnyQuery) -> float:
    """Cost of a query in tokens: drawn tokens, or rows and targets."""
    if isinstance(query, GroupQuery):
        return len(query.wanted)
    drawn = 1 if query.sampling is None else query.sampling.max_tokens
    return drawn + len(query.targets)


def _is_of_rows(query: AnyQuery) -> bool:
    """Whether a query counts among the rows in the engine; a group counts as one."""
    return isinstance(query, GroupQuery) or query.sampling is None


def _renamed(query: AnyQuery, query_id: int) -> AnyQuery:
    if isinstance(query, GroupQuery):
        return dataclasses.replace(query, query_id=query_id)
    return query.replace(query_id=query_id)
