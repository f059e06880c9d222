"""`Replica`: the Ray actor that owns an engine and serves its drivers.

Its methods run on the actor's event loop, not on the engine's thread, so that it answers `ping`
while the engine steps. It supervises itself: it ends its process when a step takes too long,
and Ray starts another. Messages of a session carry numbers, because Ray starts the calls of an
asynchronous actor in any order.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import importlib.metadata
import logging
import math
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.cloudpickle

from genlm.plugin import (
    AdapterError,
    Engine,
    EvaluationError,
    GenlmError,
    ModelLoadError,
    find_backend,
    get_backend,
    picklable_error,
)
from genlm_ray.serving_loop import ServingLoop
from genlm_ray.wire import TRANSPORT, ReplicaRequest, ReplicaResponse, Sequences

__all__ = [
    "UNLIMITED",
    "Replica",
    "ReplicaSpec",
    "ServingLimits",
    "new_session",
    "version_of",
    "versions",
]

logger = logging.getLogger("genlm.ray")


_GRACE_S = 10.0
"""Delay after which the process is ended if this module's check does not run."""

_COMPARED = ("genlm-core", "genlm-ray", "ray", "python", "torch", "numpy")

_MINOR = frozenset({"python", "torch", "numpy"})
"""Distributions whose minor versions share a pickle format."""


def version_of(name: str) -> str | None:
    """The version of a distribution that a driver and its replicas must have in common.

    Returns:
        None if it is not installed here.
    """
    if name == "python":
        found = platform.python_version()
    else:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None
    return ".".join(found.split(".")[:2]) if name in _MINOR else found


def versions(engine: str) -> dict[str, str | None]:
    """Versions that drivers and replicas must have in common, a backend's plugin included."""
    names = dict.fromkeys((*_COMPARED, find_backend(engine).distribution))
    return {name: version_of(name) for name in names}


@dataclass(frozen=True)
class ServingLimits:
    """Resource limits of the programs that share a replica.

    Attributes:
        clients: Maximum number of concurrent programs.
        pending_queries: Unanswered queries of one program.
        sequences: Sequences that are kept for one program to name again.
        prefix_tokens: Tokens of the prefixes that one program keeps.
        adapters: Adapters that one program has loaded.
        reduction_s: Maximum time in seconds of a program's own reductions of a batch of rows or
            of a part of a text.
    """

    clients: int = 128
    pending_queries: int = 8192
    sequences: int = 2**17
    prefix_tokens: int = 2**15
    adapters: int = 8
    reduction_s: float = 60.0


UNLIMITED = ServingLimits(
    clients=sys.maxsize,
    pending_queries=sys.maxsize,
    sequences=sys.maxsize,
    prefix_tokens=sys.maxsize,
    adapters=sys.maxsize,
    reduction_s=math.inf,
)
"""Limits of a private replica, whose program limits itself."""


@dataclass(frozen=True)
class ReplicaSpec:
    """Load options of a replica.

    Attributes:
        engine: Name of a backend.
        model: Model id or path for that backend.
        options: Its further options.
        name: Name of a served model; `""` for a private one.
        replicas: Number of replicas of the model.
        driver_timeout_s: Silence after which a driver counts as dead.
        step_timeout_s: Longest step of the engine before the replica ends its process.
        limits: Resource limits of each driver.
    """

    engine: str
    model: str
    options: Mapping[str, Any]
    name: str
    replicas: int
    driver_timeout_s: float
    step_timeout_s: float = 3600.0
    limits: ServingLimits = UNLIMITED


_Prefix = tuple[tuple[int, ...], str | None]


@dataclass
class _Session:
    """A driver's connection: it begins anew when the replica or the connection was lost."""

    driver: str
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    sequences: Sequences = field(default_factory=Sequences)
    adapters: list[str] = field(default_factory=list)
    prefixes: dict[_Prefix, None] = field(default_factory=dict)
    next_message: int = 0
    turns: dict[int, asyncio.Event] = field(default_factory=dict)
    seen_s: float = field(default_factory=time.monotonic)


class Replica:
    """One engine and the drivers that use it.

    Args:
        spec: Load options.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._sessions: dict[str, _Session] = {}
        self._began_s = time.time()
        self._answered = 0
        self._last_statistics: dict[str, Any] = {}
        self._own_adapters: tuple[str, ...] = ()
        self._supervisor: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        # Of adapters and prefixes: a driver's next session waits until the last is freed.
        self._loading = asyncio.Lock()
        self._loop = ServingLoop(
            self._build, _exit, reduction_timeout_s=spec.limits.reduction_s
        )

    def _build(self) -> Engine:
        spec = self._spec
        engine = get_backend(spec.engine)(spec.model, **spec.options)
        gc.freeze()  # this process is the engine's: garbage collections omit the loaded objects
        return engine

    # -- calls of drivers -------------------------------------------------------------

    async def attach(
        self,
        driver: str,
        session: str,
        adapters: Mapping[str, str],
        prefixes: Sequence[tuple[Sequence[int], str | None]],
    ) -> dict[str, Any]:
        """Begin a session, load its adapters and prefixes, and describe the engine.

        Raises:
            GenlmError: The engine, an adapter or a prefix could not be loaded, or the replica
                has its maximum number of drivers.
        """
        engine = await self._engine()
        for name in [key for key, each in self._sessions.items() if each.driver == driver]:
            await self._end(name)
        limit = self._spec.limits.clients
        if len(self._sessions) >= limit:
            raise ModelLoadError(
                f"the model {self._spec.name!r} serves {limit} programs, the most that it was "
                f"started for (ServingLimits.clients)"
            )
        self._own_adapters = tuple(getattr(engine, "adapters", ()))
        # A driver sends no pings before its session has begun.
        state = self._sessions[session] = _Session(driver, seen_s=math.inf)
        loop = asyncio.get_running_loop()

        def finished() -> None:
            loop.call_soon_threadsafe(state.finished.set)

        self._loop.attach(session, finished)
        if self._supervisor is None:
            self._supervisor = loop.create_task(self._supervise())
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
            "pending_queries": self._spec.limits.pending_queries,
        }

    async def exchange(
        self, session: str, number: int, message: ReplicaRequest
    ) -> ReplicaResponse | None:
        """Take queries; return as soon as any of the session's queries have finished.

        Returns:
            The completions; empty if no query is left; None if the session has ended.
        """
        state = await self._received(session, number, message)
        while state is not None and session in self._sessions:
            finished, unanswered = self._loop.finished(session)
            if finished or not unanswered:
                size = self._loop.built.result().vocabulary.size
                packed = TRANSPORT.pack_completions(finished, size)
                self._loop.discard_finished(session, len(finished))
                self._answered += len(finished)
                return ReplicaResponse(packed, self._statistics())
            state.finished.clear()
            await state.finished.wait()
        return None

    async def notify(self, session: str, number: int, message: ReplicaRequest) -> None:
        """Accept a message without reply: aborts and sequences to forget."""
        await self._received(session, number, message)

    async def ping(self, session: str) -> None:
        """Record that the driver lives; the reply shows that this process responds."""
        if session in self._sessions:
            self._sessions[session].seen_s = time.monotonic()

    async def detach(self, session: str) -> None:
        """End a session: drop its queries and its adapters."""
        await self._end(session)

    # These return whether the session had not ended.

    async def add_adapter(self, session: str, name: str, path: str) -> bool:
        """Load an adapter for a driver; other drivers may use the same name."""
        async with self._loading:
            state = self._sessions.get(session)
            if state is None:
                return False
            limit = self._spec.limits.adapters
            if len(state.adapters) >= limit:
                raise AdapterError(
                    f"this program has loaded {limit} adapters, the most that the served model "
                    f"allows (ServingLimits.adapters); remove one"
                )
            named = self._adapter(state, name)
            await self._call(lambda engine: engine.add_adapter(named, path))
            state.adapters.append(name)
            return session in self._sessions  # else `_end` waits to free it

    async def remove_adapter(self, session: str, name: str) -> bool:
        """Free an adapter of a driver, if it was loaded here."""
        async with self._loading:
            state = self._sessions.get(session)
            if state is None:
                return False
            if name in state.adapters:
                named = self._adapter(state, name)
                state.adapters.remove(name)
                state.prefixes = {each: None for each in state.prefixes if each[1] != name}
                await self._call(lambda engine: _remove_adapter(engine, named))
            return True

    async def cache_prefix(
        self, session: str, token_ids: Sequence[int], adapter: str | None
    ) -> bool:
        """Have the engine compute a prefix, and keep it while the session lasts.

        Raises:
            EvaluationError: The driver would exceed its limit of tokens.
        """
        async with self._loading:
            state = self._sessions.get(session)
            if state is None:
                return False
            prefix = (tuple(token_ids), adapter)
            limit = self._spec.limits.prefix_tokens
            tokens = sum(len(ids) for ids, _ in {**state.prefixes, prefix: None})
            if tokens > limit:
                raise EvaluationError(
                    f"with this prefix the program would keep {tokens} tokens; the served "
                    f"model allows {limit} (ServingLimits.prefix_tokens). clear_kv_cache() "
                    f"frees those that it keeps"
                )
            named = self._adapter(state, adapter)
            await self._call(lambda engine: engine.cache_prefix(prefix[0], named))
            state.prefixes[prefix] = None
            return session in self._sessions  # else `_end` waits to free it

    async def clear_prefix_cache(self, session: str) -> bool:
        """Have the engine free the driver's prefixes; those of others are computed again."""
        async with self._loading:
            state = self._sessions.get(session)
            if state is None:
                return False
            state.prefixes.clear()
            await self._keep_prefixes()
            return True

    async def _keep_prefixes(self) -> None:
        """Replace the engine's prefixes by those of the sessions that have not ended."""
        await self._call(lambda engine: engine.clear_prefix_cache())
        for state in list(self._sessions.values()):
            for token_ids, adapter in list(state.prefixes):
                keep = functools.partial(
                    _cache_prefix, token_ids=token_ids, adapter=self._adapter(state, adapter)
                )
                try:
                    await self._call(keep)
                except Exception:  # each query then computes it
                    logger.exception("computing a prefix again raised")

    async def statistics(self, session: str) -> dict[str, Any]:
        """The engine's statistics."""
        del session
        return self._statistics()

    async def describe(self) -> dict[str, Any]:
        """Return the loaded model's description for `genlm serve --status`."""
        await self._engine()
        return {
            "name": self._spec.name,
            "engine": self._spec.engine,
            "model": self._spec.model,
            "replicas": self._spec.replicas,
            "versions": versions(self._spec.engine),
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "seconds": time.time() - self._began_s,
            "drivers": self._loop.drivers,
            "answered": self._answered,
            "statistics": self._statistics(),
        }

    async def versions(self) -> dict[str, str | None]:
        """The versions here, known before the model is loaded."""
        return versions(self._spec.engine)

    # -- sessions ---------------------------------------------------------------------

    def _statistics(self) -> dict[str, Any]:
        """Return the engine's statistics, or the last ones if it raises."""
        try:
            found = self._loop.statistics().items()
            # Values that cannot be pickled would lose the results in the same message.
            self._last_statistics = {
                name: value for name, value in found if isinstance(value, (int, float, str))
            }
        except Exception:
            logger.exception("the engine's statistics raised")
        return self._last_statistics

    async def _engine(self) -> Engine:
        try:
            return await asyncio.wrap_future(self._loop.built)
        except asyncio.CancelledError:  # the caller has gone
            raise
        except GenlmError as error:
            raise picklable_error(error) from None
        except BaseException as error:  # noqa: BLE001 - raised in the driver
            raise ModelLoadError(
                f"loading {self._spec.model!r} with {self._spec.engine!r} in a replica raised "
                f"{type(error).__name__}: {error}"
            ) from None

    async def _received(
        self, session: str, number: int, message: ReplicaRequest
    ) -> _Session | None:
        """Accept a message of a session after all earlier ones.

        The session ends if an earlier one does not arrive for `driver_timeout_s`.
        """
        state = self._sessions.get(session)
        if state is None:
            return None
        if state.next_message != number:
            turn = state.turns[number] = asyncio.Event()
            try:
                await asyncio.wait_for(turn.wait(), self._spec.driver_timeout_s)
            except TimeoutError:
                logger.warning("message %d of a session was lost", state.next_message)
                await self._end(session)
                return None
        state.seen_s = time.monotonic()
        try:
            if session in self._sessions:
                self._take(state, session, message)
        finally:  # later messages do not wait for this one if it raises
            state.next_message += 1
            turn_of_next = state.turns.pop(state.next_message, None)
            if turn_of_next is not None:
                turn_of_next.set()
        return state if session in self._sessions else None

    def _take(self, state: _Session, session: str, message: ReplicaRequest) -> None:
        """Drop the queries that a message aborts, submit its own, then forget sequences.

        Raises:
            EvaluationError: The driver would exceed its limits; no query was accepted.
        """
        if message.aborted:
            self._loop.abort(session, message.aborted)
        limits, count = self._spec.limits, message.count
        rows = sum(each.size for each in message.groups)
        pending = self._loop.pending(session)
        for what, used, added, limit in (
            ("pending_queries", pending, count + len(message.groups), limits.pending_queries),
            ("sequences", len(state.sequences), count + rows, limits.sequences),
        ):
            if added and used + added > limit:
                raise EvaluationError(
                    f"this program has {used} {what.replace('_', ' ')} at a replica and sends "
                    f"{added} more; the served model allows {limit} (ServingLimits.{what})"
                )
        queries = state.sequences.queries(message)
        renamed = [
            query
            if query.adapter is None
            else query.replace(adapter=self._adapter(state, query.adapter))
            for query in queries
        ]
        lease = functools.partial(_HeldContexts, self._loop)
        groups = [
            state.sequences.group(each, self._adapter(state, each.adapter), lease)
            for each in message.groups
        ]
        self._loop.submit(session, [*renamed, *groups])
        for number in message.dropped:
            state.sequences.drop(number)
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
        async with self._loading:
            for name in state.adapters:
                named = self._adapter(state, name)
                try:
                    await self._call(functools.partial(_remove_adapter, name=named))
                except Exception:  # it stays loaded; the others are freed
                    logger.exception("freeing the adapter %r raised", named)
            if state.prefixes:
                try:
                    await self._keep_prefixes()
                except Exception:  # as above
                    logger.exception("freeing the prefixes of a program raised")

    async def _supervise(self) -> None:
        """End silent sessions, slow reductions, and the process whose engine hangs."""
        spec = self._spec
        guards_process = ray.is_initialized() and ray.get_runtime_context().get_actor_id()
        while True:
            if guards_process:  # if this loop hangs as well, a thread without the GIL acts
                faulthandler.dump_traceback_later(
                    spec.step_timeout_s + _GRACE_S, exit=True, file=2
                )
            await asyncio.sleep(min(1.0, spec.driver_timeout_s / 4))
            step_s = self._loop.step_seconds
            if step_s > spec.step_timeout_s:
                _exit(TimeoutError(f"a step of the engine has taken {step_s:.0f} s"))
            self._loop.fail_overdue_reductions()
            oldest_s = time.monotonic() - spec.driver_timeout_s
            for name in [k for k, each in self._sessions.items() if each.seen_s < oldest_s]:
                # Not awaited: freeing adapters waits for the step that is watched here.
                ending = asyncio.create_task(self._end(name))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    async def _call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function on the engine's thread."""
        try:
            return await asyncio.wrap_future(self._loop.call(function))
        except Exception as error:  # noqa: BLE001 - raised in the driver
            raise picklable_error(error) from None

    def _adapter(self, state: _Session, name: str | None) -> str | None:
        """Return an adapter name that is unique among drivers."""
        if name is None or name in self._own_adapters:
            return name
        return f"{name}-{state.driver}"


class _HeldContexts:
    """Keeps the engine's cached state of a population's contexts alive."""

    def __init__(self, loop: ServingLoop, contexts: list[tuple[str | None, bytes]]) -> None:
        self._loop, self._contexts = loop, contexts

    def __del__(self) -> None:
        for adapter, key in self._contexts:
            self._loop.release(adapter, key)


def new_session() -> str:
    """Return a unique session name."""
    return uuid.uuid4().hex


def _remove_adapter(engine: Any, name: str | None) -> None:
    if hasattr(engine, "remove_adapter"):
        engine.remove_adapter(name)


def _cache_prefix(engine: Any, *, token_ids: Sequence[int], adapter: str | None) -> None:
    engine.cache_prefix(token_ids, adapter)


def _exit(cause: BaseException) -> None:
    """End the process of an engine whose thread ended: Ray starts another."""
    logger.error("the engine ended, and its process with it", exc_info=cause)
    os._exit(1)
