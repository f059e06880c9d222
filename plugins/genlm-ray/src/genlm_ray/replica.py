"""`Replica`: the Ray actor that owns an engine and serves its drivers.

Its methods run on the actor's event loop, not on the engine's thread, so that it answers while
the engine steps. Its process ends when a step takes too long or the engine's thread has ended,
and Ray starts another. Ray starts the calls of an asynchronous actor in any order, so a message
refers only to what the replica has answered.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import importlib.metadata
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.cloudpickle

from genlm import EngineDiedError
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
from genlm_ray.session import Prefix, Session, SharedEngine
from genlm_ray.wire import TRANSPORT, ReplicaRequest, ReplicaResponse, unpacked_queries

__all__ = [
    "UNLIMITED",
    "Replica",
    "ReplicaSpec",
    "ServingLimits",
    "version_of",
    "versions",
]

logger = logging.getLogger("genlm.ray")


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
        sequences: Sequences of populations that are kept for one program.
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

    def check(self, error: type[Exception], **needed: int) -> None:
        """Raise the error if a program needs more than is allowed."""
        for name, number in needed.items():
            limit = getattr(self, name)
            if number > limit:
                raise error(
                    f"asked for {number} {name.replace('_', ' ')} at a replica; the served "
                    f"model allows {limit} (ServingLimits.{name})"
                )


_ANY = sys.maxsize

UNLIMITED = ServingLimits(_ANY, _ANY, _ANY, _ANY, _ANY, math.inf)
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

    Raises:
        TypeError: The model is an object, which cannot be sent.
        ValueError: Fewer than one replica.
        PluginError: The backend is not installed.
    """

    engine: str
    model: str
    options: Mapping[str, Any]
    name: str
    replicas: int
    driver_timeout_s: float
    step_timeout_s: float = 3600.0
    limits: ServingLimits = UNLIMITED

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise TypeError(
                f"asked for replicas of a {type(self.model).__name__}; replicas load models "
                f"themselves: pass a folder or a name"
            )
        if self.replicas < 1:
            raise ValueError(f"replicas={self.replicas}: expected at least 1")
        if find_backend(self.engine).name == "ray":
            raise ModelLoadError(
                "asked for replicas of engine='ray'; name the engine to replicate"
            )


class Replica:
    """One engine and the drivers that use it.

    Args:
        spec: Load options.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._sessions: dict[str, Session] = {}
        self._began_s = time.time()
        self._answered = 0
        self._last_statistics: dict[str, Any] = {}
        self._own_adapters: tuple[str, ...] = ()
        self._supervisor: asyncio.Task[None] | None = None
        # Of adapters and prefixes: a driver's next session waits until the last is freed.
        self._loading = asyncio.Lock()
        is_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id()
        loading = concurrent.futures.ThreadPoolExecutor(1, "genlm-loading")
        self._built = loading.submit(
            SharedEngine, self._build, spec.step_timeout_s if is_actor else None
        )
        loading.shutdown(wait=False)

    def _build(self) -> Engine:
        spec = self._spec
        engine = get_backend(spec.engine)(spec.model, **spec.options)
        gc.freeze()  # this process is the engine's: garbage collections omit the loaded objects
        return engine

    @property
    def _shared(self) -> SharedEngine:
        """The engine, once it is loaded."""
        return self._built.result()

    # -- calls of drivers -------------------------------------------------------------

    async def attach(
        self,
        driver: str,
        session: str,
        adapters: Mapping[str, str],
        prefixes: Sequence[Prefix],
    ) -> dict[str, Any]:
        """Begin a session, load its adapters and prefixes, and describe the engine.

        Raises:
            GenlmError: The engine, an adapter or a prefix could not be loaded, or the replica
                has its maximum number of drivers.
        """
        shared = await self._loaded()
        engine = shared.engine
        for name in [key for key, each in self._sessions.items() if each.driver == driver]:
            await self._end(name)
        self._spec.limits.check(ModelLoadError, clients=len(self._sessions) + 1)
        self._own_adapters = tuple(getattr(engine, "adapters", ()))
        state = Session(driver, shared, self._spec.limits.reduction_s)
        self._sessions[session] = state
        if self._supervisor is None:
            self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        try:
            await self.configure(session, adapters, prefixes)
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

    async def exchange(self, session: str, message: ReplicaRequest) -> ReplicaResponse | None:
        """Take queries; return as soon as any of the session's queries have finished.

        Returns:
            The completions; empty if no query is left; None if the session has ended.
        """
        await self.notify(session, message)
        state = self._sessions.get(session)
        while state is not None and session in self._sessions:
            if state.finished or not state.unanswered:
                self._exit_with_engine()
                finished = state.finished
                size = self._shared.engine.vocabulary.size
                packed = TRANSPORT.pack_completions(finished, size)
                state.finished = state.finished[len(finished) :]  # kept if packing raised
                self._answered += len(finished)
                return ReplicaResponse(packed, self._statistics())
            state.changed.clear()
            await state.changed.wait()
        return None

    async def notify(self, session: str, message: ReplicaRequest) -> None:
        """Take a message without waiting for queries; it also shows that the driver lives."""
        state = self._sessions.get(session)
        if state is not None:
            state.seen_s = time.monotonic()
            self._take(state, message)

    async def detach(self, session: str) -> None:
        """End a session: drop its queries and its adapters."""
        await self._end(session)

    async def configure(
        self, session: str, adapters: Mapping[str, str], prefixes: Sequence[Prefix]
    ) -> bool:
        """Have a driver's adapters and prefixes, and no others; other drivers keep theirs.

        Args:
            session: The session.
            adapters: Paths of the driver's adapters by name; other drivers may use the names.
            prefixes: Prefixes that the engine keeps while the session lasts, and the driver's
                names of their adapters.

        Returns:
            Whether the session has not ended.

        Raises:
            AdapterError: An adapter cannot be loaded, or there are more than allowed.
            EvaluationError: The prefixes have more tokens than allowed.
        """
        wanted = dict.fromkeys(prefixes)
        limits = self._spec.limits
        limits.check(AdapterError, adapters=len(adapters))
        limits.check(EvaluationError, prefix_tokens=sum(len(ids) for ids, _ in wanted))
        async with self._loading:
            state = self._sessions.get(session)
            if state is None:
                return False
            await self._load_adapters(state, adapters)
            freed = [prefix for prefix in state.prefixes if prefix not in wanted]
            for prefix in freed:
                del state.prefixes[prefix]
            if any(adapter in {None, *adapters} for _, adapter in freed):
                await self._keep_prefixes()
            for prefix in wanted:
                if prefix not in state.prefixes:
                    await self._cache_prefix(state, prefix)
                    state.prefixes[prefix] = None
            return session in self._sessions  # else `_end` waits to free them

    async def describe(self) -> dict[str, Any]:
        """Return the loaded model's description for `genlm serve --status`."""
        await self._loaded()
        return {
            "name": self._spec.name,
            "engine": self._spec.engine,
            "model": self._spec.model,
            "replicas": self._spec.replicas,
            "versions": versions(self._spec.engine),
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "seconds": time.time() - self._began_s,
            "drivers": {name: each.unanswered for name, each in self._sessions.items()},
            "answered": self._answered,
            "statistics": self._statistics(),
        }

    async def versions(self) -> dict[str, str | None]:
        """The versions here, known before the model is loaded."""
        return versions(self._spec.engine)

    # -- the engine -------------------------------------------------------------------

    async def _loaded(self) -> SharedEngine:
        try:
            # A driver that leaves must not cancel the loading.
            return await asyncio.shield(asyncio.wrap_future(self._built))
        except asyncio.CancelledError:
            raise
        except GenlmError as error:
            raise picklable_error(error) from None
        except BaseException as error:  # noqa: BLE001 - raised in the driver
            raise ModelLoadError(
                f"loading {self._spec.model!r} with {self._spec.engine!r} in a replica raised "
                f"{type(error).__name__}: {error}"
            ) from None

    async def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of the engine on its thread."""

        def call(engine: Any) -> None:
            getattr(engine, method)(*arguments)

        try:
            await asyncio.to_thread(self._shared.scheduler.run, call)
        except Exception as error:  # noqa: BLE001 - raised in the driver
            raise picklable_error(error) from None

    def _statistics(self) -> dict[str, Any]:
        """Return the engine's statistics, or the last ones if it raises."""
        try:
            found = self._shared.scheduler.engine_statistics().items()
            # Values that cannot be pickled would lose the results in the same message.
            self._last_statistics = {
                name: value for name, value in found if isinstance(value, (int, float, str))
            }
        except Exception:
            logger.exception("the engine's statistics raised")
        return self._last_statistics

    async def _load_adapters(self, state: Session, adapters: Mapping[str, str]) -> None:
        for name in [each for each in state.adapters if each not in adapters]:
            del state.adapters[name]
            await self._remove_adapter(state, name)
        for name, path in adapters.items():
            if name not in state.adapters:
                await self._call("add_adapter", self._adapter(state, name), path)
                state.adapters[name] = path

    async def _remove_adapter(self, state: Session, name: str) -> None:
        try:
            if hasattr(self._shared.engine, "remove_adapter"):
                await self._call("remove_adapter", self._adapter(state, name))
        except Exception:  # it stays loaded; the others are freed
            logger.exception("freeing the adapter %r raised", name)

    async def _cache_prefix(self, state: Session, prefix: Prefix) -> None:
        token_ids, adapter = prefix
        await self._call("cache_prefix", token_ids, self._adapter(state, adapter))

    async def _keep_prefixes(self) -> None:
        """Replace the engine's prefixes by those of the sessions that have not ended."""
        await self._call("clear_prefix_cache")
        for state in list(self._sessions.values()):
            for prefix in list(state.prefixes):
                try:
                    await self._cache_prefix(state, prefix)
                except Exception:  # each query then computes it
                    logger.exception("computing a prefix again raised")

    def _adapter(self, state: Session, name: str | None) -> str | None:
        """Return an adapter name that is unique among drivers."""
        if name is None or name in self._own_adapters:
            return name
        return f"{name}-{state.driver}"

    # -- sessions ---------------------------------------------------------------------

    def _take(self, state: Session, message: ReplicaRequest) -> None:
        """Drop the queries that a message aborts, and submit its own.

        Raises:
            EvaluationError: The driver would exceed its limits; no query was accepted.
        """
        if message.aborted:
            state.abort(message.aborted)
        for number in message.dropped:
            state.generations.drop(number)
        groups, added = message.groups, message.count + len(message.groups)
        rows = sum(each.size for each in groups)
        pending = state.unanswered + len(state.finished)
        self._spec.limits.check(
            EvaluationError,
            pending_queries=pending + added if added else 0,
            sequences=state.generations.sequences + rows if rows else 0,
        )
        queries: list[Any] = [
            query
            if query.adapter is None
            else query.replace(adapter=self._adapter(state, query.adapter))
            for query in unpacked_queries(message)
        ]
        lease = functools.partial(_HeldContexts, self._shared.scheduler.release)
        for each in groups:
            adapter = self._adapter(state, each.adapter)
            queries.append(state.generations.group(each, adapter, lease))
        state.submit(queries)
        if message.released is not None:
            for name, sequence in zip(
                message.released[0], message.released[1].unpack(), strict=True
            ):
                self._shared.scheduler.release((self._adapter(state, name), sequence.key))

    async def _end(self, session: str) -> None:
        state = self._sessions.pop(session, None)
        if state is None:
            return
        state.end()
        async with self._loading:
            for name in state.adapters:
                await self._remove_adapter(state, name)
            if state.prefixes:
                try:
                    await self._keep_prefixes()
                except Exception:  # as for adapters
                    logger.exception("freeing the prefixes of a program raised")

    async def _supervise(self) -> None:
        """End silent sessions, and the process whose engine has ended."""
        timeout_s = self._spec.driver_timeout_s
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            self._exit_with_engine()
            oldest_s = time.monotonic() - timeout_s
            for name in [k for k, each in self._sessions.items() if each.seen_s < oldest_s]:
                await self._end(name)

    def _exit_with_engine(self) -> None:
        """End the process of an engine whose thread has ended: Ray starts another."""
        if self._shared.scheduler.closed:
            _exit(EngineDiedError("the engine's thread has ended"))


class _HeldContexts:
    """Keeps the engine's cached state of a population's contexts alive."""

    def __init__(
        self, release: Callable[[Any], None], contexts: list[tuple[str | None, bytes]]
    ) -> None:
        self._release, self._contexts = release, contexts

    def __del__(self) -> None:
        for context in self._contexts:
            self._release(context)


def _exit(cause: BaseException) -> None:
    """End this process."""
    logger.error("the engine ended, and its process with it", exc_info=cause)
    os._exit(1)
