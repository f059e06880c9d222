"""`ServingLoop`: one engine on its thread, stepped for the queries of several drivers.

The part of a replica that does not know Ray. Drivers share the engine by the tokens that they
ask for: the next query is that of the driver that was given the least so far.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from genlm.plugin import Completion, Engine, Query, Reduced, reduce_rows

__all__ = ["ServingLoop"]

logger = logging.getLogger("genlm.ray")

_ROW_ONLY = (None,)

SHARED_ROWS = 64
"""Most rows in the engine at a time while several drivers ask: what one waits for."""


class _Driver:
    """What a driver has asked and not been answered."""

    def __init__(self, on_finished: Callable[[], None], served: float) -> None:
        self.waiting: deque[Query] = deque()
        self.in_engine: dict[int, int] = {}  # the driver's query ids by the engine's
        self.finished: list[Completion] = []
        self.on_finished = on_finished
        self.served = served  # tokens, as if it had always had its share

    @property
    def unanswered(self) -> int:
        return len(self.waiting) + len(self.in_engine)


class ServingLoop:
    """Steps an engine on a thread of its own.

    Args:
        build: Makes the engine; called on that thread.
        on_death: Called on that thread with what ended it, if that was no `close`.
    """

    def __init__(
        self, build: Callable[[], Engine], on_death: Callable[[BaseException], None]
    ) -> None:
        self.built: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self._changed = threading.Condition()
        self._drivers: dict[str, _Driver] = {}
        self._calls: deque[tuple[Callable[[Engine], Any], concurrent.futures.Future[Any]]]
        self._calls = deque()
        self._aborts: list[int] = []
        self._released: list[tuple[str | None, bytes]] = []
        self._owners: dict[int, tuple[str, Query]] = {}  # what is in the engine
        self._ids = itertools.count()
        self._rows = 0  # of those, the ones that ask for rows
        self._step_began_s: float | None = None
        self._closed = False
        arguments = (build, on_death)
        thread = threading.Thread(target=self._run, args=arguments, name="genlm-replica")
        thread.daemon = True
        thread.start()

    # -- any thread -------------------------------------------------------------------

    @property
    def step_seconds(self) -> float:
        """How long the engine's current step has taken."""
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
        """Drop what a driver has asked."""
        with self._changed:
            driver = self._drivers.pop(name, None)
            if driver is not None:
                self._aborts.extend(driver.in_engine)
                self._changed.notify()

    def submit(self, name: str, queries: Sequence[Query]) -> None:
        """Queue the queries of a driver; ids are the driver's."""
        with self._changed:
            driver = self._drivers[name]
            if not driver.unanswered:  # it saves nothing up while it asks nothing
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
            self._aborts.extend(of_engine)
            self._changed.notify()
            is_answered = not driver.unanswered
        if is_answered:  # else what waits for the last of them would wait for ever
            driver.on_finished()

    def release(self, adapter: str | None, key: bytes) -> None:
        """Tell the engine that a driver has dropped a context, if it wants to know."""
        with self._changed:
            self._released.append((adapter, key))
            self._changed.notify()

    def take_finished(self, name: str) -> tuple[list[Completion], int]:
        """Return a driver's completions, and how many queries it still waits for."""
        with self._changed:
            driver = self._drivers[name]
            finished, driver.finished = driver.finished, []
            return finished, driver.unanswered

    def call(self, function: Callable[[Engine], Any]) -> concurrent.futures.Future[Any]:
        """Call a function on the engine's thread between two steps."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            self._calls.append((function, future))
            self._changed.notify()
        return future

    def statistics(self) -> Mapping[str, int | float | str]:
        """The engine's."""
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
            engine = build()
        except BaseException as error:  # noqa: BLE001 - raised where `built` is awaited
            self.built.set_exception(error)
            return
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
                if any(driver.waiting for driver in self._drivers.values()):
                    break
                self._changed.wait()
            return not self._closed

    def _work(self, engine: Engine) -> None:
        with self._changed:
            aborts, self._aborts = self._aborts, []
            calls, self._calls = self._calls, deque()
        for query_id in aborts:
            self._remove(query_id)
            engine.abort(query_id)
        for function, future in calls:
            try:
                future.set_result(function(engine))
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                future.set_exception(error)
        finished = self._submit(engine)
        self._release(engine)  # after the submissions, which may use what is released
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
                except Exception:  # the engine then keeps what it could free
                    logger.exception("release_context of %s raised", type(engine).__name__)

    def _submit(self, engine: Engine) -> list[Completion]:
        """Give the engine what its drivers wait for; returns the errors of refused queries."""
        with self._changed:
            chosen = self._chosen()
        refused = []
        for name, query in chosen:
            query_id = query.query_id
            try:
                engine.submit(query)
            except Exception as error:  # noqa: BLE001 - it fails this query alone
                refused.append(Completion(query_id, error=error))
            self._owners[query_id] = (name, query)
            self._rows += query.sampling is None
        return refused

    def _chosen(self) -> list[tuple[str, Query]]:
        """Choose queries in fair shares, renamed to ids that are unique in the engine."""
        asking = {name: one for name, one in self._drivers.items() if one.waiting}
        busy = [name for name, one in self._drivers.items() if one.unanswered]
        room = SHARED_ROWS - self._rows if len(busy) > 1 else None
        chosen: list[tuple[str, Query]] = []
        while asking and (room is None or len(chosen) < room):
            name = min(asking, key=lambda one: asking[one].served)
            driver = asking[name]
            query = driver.waiting.popleft()
            query_id = next(self._ids)
            driver.in_engine[query_id] = query.query_id
            driver.served += _share(query)
            chosen.append((name, query.replace(query_id=query_id)))
            if not driver.waiting:
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
        """Reduce rows of which something else is wanted, for engines that do not."""
        places = [
            place
            for place, (query_id, result, _) in enumerate(completions)
            if isinstance(result, torch.Tensor)
            and query_id in self._owners
            and self._owners[query_id][1].outputs != _ROW_ONLY
        ]
        if places:
            rows: list[Any] = [completions[place].result for place in places]
            wanted = [self._owners[completions[i].query_id][1].outputs for i in places]
            results = reduce_rows(torch.stack(rows), wanted)
            for place, result in zip(places, results, strict=True):
                query_id = completions[place].query_id
                completions[place] = (
                    Completion(query_id, result)
                    if isinstance(result, Reduced)
                    else Completion(query_id, error=result)
                )
        return completions

    def _deliver(self, finished: list[Completion]) -> None:
        woken: dict[str, _Driver] = {}
        with self._changed:
            for completion in finished:
                name = self._remove(completion.query_id)
                driver = None if name is None else self._drivers.get(name)
                if name is None or driver is None:
                    continue
                query_id = driver.in_engine.pop(completion.query_id, None)
                if query_id is not None:
                    driver.finished.append(completion._replace(query_id=query_id))
                    woken[name] = driver
        for driver in woken.values():
            driver.on_finished()

    def _remove(self, query_id: int) -> str | None:
        name, query = self._owners.pop(query_id, (None, None))
        if query is not None:
            self._rows -= query.sampling is None
        return name


def _share(query: Query) -> float:
    """What a query takes of the engine, in tokens: drawn ones, or a row and its targets."""
    drawn = 1 if query.sampling is None else query.sampling.max_tokens
    return drawn + len(query.targets)
