"""`Replica`: the Ray actor that holds an engine and answers its drivers.

Its methods run on the actor's event loop, beside the engine's thread, so that it answers `ping`
while the engine steps. Messages of a session carry numbers, because Ray starts the calls of an
asynchronous actor in any order.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.metadata
import logging
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.cloudpickle

from genlm.plugin import Engine, GenlmError, ModelLoadError, get_backend
from genlm_ray.serving_loop import ServingLoop
from genlm_ray.wire import Answers, Questions, Sequences, packed_answers, picklable_error

__all__ = ["Replica", "ReplicaSpec", "new_session", "versions"]

logger = logging.getLogger("genlm.ray")


def versions() -> dict[str, str]:
    """Versions that a driver and its replicas must have in common."""
    found = {
        name: importlib.metadata.version(name) for name in ("genlm-core", "genlm-ray", "ray")
    }
    return {**found, "python": platform.python_version().rpartition(".")[0]}


@dataclass(frozen=True)
class ReplicaSpec:
    """What a replica loads, and for whom.

    Attributes:
        engine: Name of a backend.
        model: What that backend calls a model.
        options: Its further options.
        name: Under which it is served; `""` for a private one.
        replicas: Number of replicas of the model.
        driver_timeout_s: Silence after which a driver counts as dead.
    """

    engine: str
    model: str
    options: Mapping[str, Any]
    name: str
    replicas: int
    driver_timeout_s: float


@dataclass
class _Session:
    """A driver's connection: it begins anew when the replica or the connection was lost."""

    driver: str
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    sequences: Sequences = field(default_factory=Sequences)
    adapters: list[str] = field(default_factory=list)
    next_message: int = 0
    turns: dict[int, asyncio.Event] = field(default_factory=dict)
    seen_s: float = field(default_factory=time.monotonic)


class Replica:
    """One engine and the drivers that use it.

    Args:
        spec: What to load.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._sessions: dict[str, _Session] = {}
        self._began_s = time.time()
        self._answered = 0
        self._last_statistics: dict[str, Any] = {}
        self._own_adapters: tuple[str, ...] = ()
        self._lease: asyncio.Task[None] | None = None
        self._adapting = asyncio.Lock()  # a driver's next session waits until the last is freed
        self._loop = ServingLoop(self._build, _exit)

    def _build(self) -> Engine:
        spec = self._spec
        engine = get_backend(spec.engine)(spec.model, **spec.options)
        gc.freeze()  # this process is the engine's: garbage collections omit what loading made
        return engine

    # -- what drivers call ------------------------------------------------------------

    async def attach(
        self,
        driver: str,
        session: str,
        adapters: Mapping[str, str],
        prefixes: Sequence[tuple[Sequence[int], str | None]],
    ) -> dict[str, Any]:
        """Begin a session, load what its driver uses, and describe the engine.

        Raises:
            GenlmError: The engine, an adapter or a prefix could not be loaded.
        """
        engine = await self._engine()
        for name in [key for key, each in self._sessions.items() if each.driver == driver]:
            await self._end(name)
        self._own_adapters = tuple(getattr(engine, "adapters", ()))
        # A driver sends no pings before its session has begun.
        state = self._sessions[session] = _Session(driver, seen_s=math.inf)
        loop = asyncio.get_running_loop()

        def finished() -> None:
            loop.call_soon_threadsafe(state.finished.set)

        self._loop.attach(session, finished)
        if self._lease is None:
            self._lease = loop.create_task(self._watch_drivers())
        try:
            for name, path in adapters.items():
                await self.add_adapter(session, name, path)
            for token_ids, adapter in prefixes:
                await self.cache_prefix(session, token_ids, adapter)
        except BaseException:
            await self._end(session)
            raise
        state.seen_s = time.monotonic()
        return {
            "vocabulary": ray.cloudpickle.dumps(engine.vocabulary),
            "max_context": engine.max_context,
            "capabilities": [str(each) for each in engine.capabilities],
            "hints": {str(k): v for k, v in getattr(engine, "capability_hints", {}).items()},
            "adapters": self._own_adapters,
            "statistics": self._statistics(),
            "pid": os.getpid(),
        }

    async def exchange(self, session: str, number: int, message: Questions) -> Answers | None:
        """Take queries; return as soon as any of the session's queries have finished.

        Returns:
            What has finished; nothing if no query is left; None if the session has ended.
        """
        state = await self._received(session, number, message)
        while state is not None and session in self._sessions:
            finished, unanswered = self._loop.take_finished(session)
            if finished or not unanswered:
                self._answered += len(finished)
                size = self._loop.built.result().vocabulary.size
                return packed_answers(finished, self._statistics(), size)
            state.finished.clear()
            await state.finished.wait()
        return None

    async def tell(self, session: str, number: int, message: Questions) -> None:
        """Take what needs no answer: aborts and sequences to forget."""
        await self._received(session, number, message)

    async def ping(self, session: str) -> float:
        """Return for how many seconds the engine's current step has run."""
        if session in self._sessions:
            self._sessions[session].seen_s = time.monotonic()
        return self._loop.step_seconds

    async def detach(self, session: str) -> None:
        """End a session: drop its queries and its adapters."""
        await self._end(session)

    # These return whether the session had not ended.

    async def add_adapter(self, session: str, name: str, path: str) -> bool:
        """Load an adapter for a driver; other drivers may use the same name."""
        async with self._adapting:
            state = self._sessions.get(session)
            if state is None:
                return False
            named = self._adapter(state, name)
            await self._call(lambda engine: engine.add_adapter(named, path))
            state.adapters.append(name)
            return session in self._sessions  # else `_end` waits to free it

    async def remove_adapter(self, session: str, name: str) -> bool:
        """Free an adapter of a driver, if it was loaded here."""
        async with self._adapting:
            state = self._sessions.get(session)
            if state is None:
                return False
            if name in state.adapters:
                named = self._adapter(state, name)
                state.adapters.remove(name)
                await self._call(lambda engine: _remove_adapter(engine, named))
            return True

    async def cache_prefix(
        self, session: str, token_ids: Sequence[int], adapter: str | None
    ) -> bool:
        """Have the engine compute and keep a prefix."""
        state = self._sessions.get(session)
        if state is None:
            return False
        named = self._adapter(state, adapter)
        await self._call(lambda engine: engine.cache_prefix(token_ids, named))
        return True

    async def clear_prefix_cache(self, session: str) -> bool:
        """Have the engine free its prefixes, those of other drivers as well."""
        if session not in self._sessions:
            return False
        await self._call(lambda engine: engine.clear_prefix_cache())
        return True

    async def statistics(self, session: str) -> dict[str, Any]:
        """The engine's statistics."""
        del session
        return self._statistics()

    async def describe(self) -> dict[str, Any]:
        """What is served here, once it is loaded, for `genlm serve --status`."""
        await self._engine()
        return {
            "name": self._spec.name,
            "engine": self._spec.engine,
            "model": self._spec.model,
            "replicas": self._spec.replicas,
            "versions": versions(),
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "seconds": time.time() - self._began_s,
            "drivers": self._loop.drivers,
            "answered": self._answered,
            "statistics": self._statistics(),
        }

    async def versions(self) -> dict[str, str]:
        """The versions here, known before the model is loaded."""
        return versions()

    # -- sessions ---------------------------------------------------------------------

    def _statistics(self) -> dict[str, Any]:
        """The engine's, the last ones if it raises: answers that go with them are not lost."""
        try:
            self._last_statistics = dict(self._loop.statistics())
        except Exception:
            logger.exception("the engine's statistics raised")
        return self._last_statistics

    async def _engine(self) -> Engine:
        try:
            return await asyncio.wrap_future(self._loop.built)
        except GenlmError as error:
            raise picklable_error(error) from None
        except BaseException as error:  # noqa: BLE001 - raised in the driver
            raise ModelLoadError(
                f"loading {self._spec.model!r} with {self._spec.engine!r} in a replica raised "
                f"{type(error).__name__}: {error}"
            ) from None

    async def _received(self, session: str, number: int, message: Questions) -> _Session | None:
        """Take a message of a session when those before it are taken."""
        state = self._sessions.get(session)
        if state is None:
            return None
        if state.next_message != number:
            turn = state.turns[number] = asyncio.Event()
            await turn.wait()
        state.seen_s = time.monotonic()
        try:
            if session in self._sessions:
                self._take(state, session, message)
        finally:  # whatever this one raises, the next ones do not wait for it
            state.next_message += 1
            turn_of_next = state.turns.pop(state.next_message, None)
            if turn_of_next is not None:
                turn_of_next.set()
        return state if session in self._sessions else None

    def _take(self, state: _Session, session: str, message: Questions) -> None:
        """Submit the queries of a message, then drop what it drops."""
        queries = state.sequences.queries(message)
        renamed = [
            query
            if query.adapter is None
            else query.replace(adapter=self._adapter(state, query.adapter))
            for query in queries
        ]
        self._loop.submit(session, renamed)
        if message.aborted:
            self._loop.abort(session, message.aborted)
        for each in message.forgotten:
            forgotten = state.sequences.forget(each)
            if forgotten is not None:
                adapter, sequence = forgotten
                self._loop.release(self._adapter(state, adapter), sequence.key)

    async def _end(self, session: str) -> None:
        state = self._sessions.pop(session, None)
        if state is None:
            return
        self._loop.detach(session)
        state.finished.set()
        for turn in state.turns.values():
            turn.set()
        async with self._adapting:
            for name in state.adapters:
                named = self._adapter(state, name)
                try:
                    await self._call(functools.partial(_remove_adapter, name=named))
                except Exception:  # it stays; the others are freed
                    logger.exception("freeing the adapter %r raised", named)

    async def _watch_drivers(self) -> None:
        """End the sessions of drivers that have been silent for too long."""
        timeout_s = self._spec.driver_timeout_s
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            oldest_s = time.monotonic() - timeout_s
            for name in [k for k, each in self._sessions.items() if each.seen_s < oldest_s]:
                await self._end(name)

    async def _call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function on the engine's thread."""
        try:
            return await asyncio.wrap_future(self._loop.call(function))
        except Exception as error:  # noqa: BLE001 - raised in the driver
            raise picklable_error(error) from None

    def _adapter(self, state: _Session, name: str | None) -> str | None:
        """Name an adapter of a driver apart from those of other drivers."""
        if name is None or name in self._own_adapters:
            return name
        return f"{name}-{state.driver}"


def new_session() -> str:
    """A name that no other session has."""
    return uuid.uuid4().hex


def _remove_adapter(engine: Any, name: str | None) -> None:
    if hasattr(engine, "remove_adapter"):
        engine.remove_adapter(name)


def _exit(cause: BaseException) -> None:
    """End the process of an engine whose thread ended: Ray starts another."""
    logger.error("the engine's thread ended", exc_info=cause)
    os._exit(1)
