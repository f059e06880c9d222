"""`Replica`: the Ray actor that owns an engine and serves its drivers.

Its methods run on the actor's event loop, not on the engine's thread, so that the replica
responds while the engine steps. Its process ends when a step takes too long or the engine's
thread has ended, and Ray starts a new process. Ray starts the calls of an asynchronous actor in
any order; therefore messages refer only to state that the replica has acknowledged.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import operator
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray

from genlm import EngineDiedError
from genlm.plugin import (
    AdapterLimitError,
    Engine,
    EvaluationError,
    GenlmError,
    ModelLoadError,
    PackedCompletions,
    call_on_thread,
    check_options,
    describe_error,
    get_backend,
    picklable_error,
)
from genlm_ray.session import Session, SharedEngine
from genlm_ray.spec import ReplicaSpec, versions
from genlm_ray.wire import TRANSPORT, Prefix, ReplicaRequest

logger = logging.getLogger("genlm.ray")


class Replica:
    """An engine and the drivers that use it.

    The engine is loaded on a thread, not in the constructor: Ray would start a process that
    ends in its constructor again, and send the error of a constructor only as text.

    Args:
        spec: Load options.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._sessions: dict[int, Session] = {}
        self._started_s = time.time()
        self._answered = 0
        self._supervisor: asyncio.Task[None] | None = None
        # Held while adapters and prefixes are loaded and freed: the next session of a driver
        # waits until those of its last session are freed.
        self._loading = asyncio.Lock()
        self._engine_future = call_on_thread(
            lambda: SharedEngine(self._build, spec.step_timeout_s)
        )

    def _build(self) -> Engine:
        spec = self._spec
        build, options = get_backend(spec.engine), spec.engine_opts or {}
        check_options(build, spec.engine, options)
        engine = build(spec.model, **options)
        gc.freeze()  # garbage collections omit the loaded objects
        return engine

    @property
    def _shared(self) -> SharedEngine:
        """The engine; available when it is loaded."""
        return self._engine_future.result()

    # -- calls of drivers -------------------------------------------------------------

    # The call waits while Ray restarts the replica.
    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def attach(
        self,
        driver: str,
        session: int,
        adapters: Mapping[str, str],
        prefixes: Sequence[Prefix],
    ) -> dict[str, Any]:
        """Begin a session, load its adapters and prefixes, and return the engine's description.

        Raises:
            GenlmError: The engine, an adapter or a prefix could not be loaded, or the replica
                has its maximum number of drivers.
        """
        shared = await self._wait_until_loaded()
        engine = shared.engine
        for earlier in [n for n, other in self._sessions.items() if other.driver == driver]:
            await self.detach(earlier)
        self._spec.limits.check(ModelLoadError, clients=len(self._sessions) + 1)
        state = Session(driver, shared, self._spec.limits)
        self._sessions[session] = state
        if self._supervisor is None:
            self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        try:
            await self.configure(session, adapters, prefixes)
        except BaseException:
            await self.detach(session)
            raise
        state.seen_s = time.monotonic()
        return {
            "vocabulary": engine.vocabulary,
            "max_context": engine.max_context,
            "capabilities": engine.capabilities,
            "capability_hints": dict(getattr(engine, "capability_hints", {})),
            "adapters": tuple(getattr(engine, "adapters", ())),
            "statistics": self._statistics(),
            "pid": os.getpid(),
            "pending_queries": self._spec.limits.pending_queries,
        }

    async def exchange(
        self, session: int, message: ReplicaRequest
    ) -> tuple[PackedCompletions, dict[str, Any]] | None:
        """Accept queries, and wait until a query of the session is finished.

        Returns:
            The completions of the finished queries, none if the session has no unanswered
            query, and the engine's statistics. None if the session has ended.
        """
        await self.notify(session, message)
        state = self._sessions.get(session)
        while state is not None and session in self._sessions:
            if state.finished or not state.unanswered:
                self._exit_if_engine_ended()
                finished, state.finished = state.finished, []
                self._answered += len(finished)
                size = self._shared.engine.vocabulary.size
                return TRANSPORT.pack_completions(finished, size), self._statistics()
            state.changed.clear()
            await state.changed.wait()
        return None

    async def notify(self, session: int, message: ReplicaRequest) -> None:
        """Accept a message without waiting for queries; it shows that the driver is alive."""
        state = self._sessions.get(session)
        if state is not None:
            state.seen_s = time.monotonic()
            state.accept(message)

    async def detach(self, session: int) -> None:
        """End a session and drop its queries, adapters and prefixes."""
        state = self._sessions.pop(session, None)
        if state is None:
            return
        state.end()
        async with self._loading:
            try:
                await self._load(state, {}, ())
            except Exception:  # prefixes stay cached; other sessions are not affected
                logger.exception("freeing the prefixes of a program raised")

    async def configure(
        self, session: int, adapters: Mapping[str, str], prefixes: Sequence[Prefix]
    ) -> bool:
        """Replace the adapters and prefixes of a session.

        Other drivers may use the same names of adapters, and their prefixes stay cached.

        Returns:
            Whether the session has not ended.

        Raises:
            AdapterError: An adapter cannot be loaded.
            AdapterLimitError: The number of adapters exceeds the limit.
            EvaluationError: The number of tokens of the prefixes exceeds the limit.
        """
        distinct = dict.fromkeys(prefixes)
        limits = self._spec.limits
        limits.check(AdapterLimitError, adapters=len(adapters))
        limits.check(EvaluationError, prefix_tokens=sum(len(ids) for ids, _ in distinct))
        async with self._loading:
            state = self._sessions.get(session)
            if state is None:
                return False
            await self._load(state, adapters, distinct)
            return session in self._sessions  # otherwise `detach` waits to free them

    async def describe(self) -> dict[str, Any]:
        """Return the description of the loaded model for `genlm serve --status`."""
        await self._wait_until_loaded()
        return {
            "name": self._spec.name,
            "engine": self._spec.engine,
            "model": self._spec.model,
            "replicas": self._spec.replicas,
            "versions": versions(self._spec.engine),
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "seconds": time.time() - self._started_s,
            "drivers": {name: state.unanswered for name, state in self._sessions.items()},
            "answered": self._answered,
            "statistics": self._statistics(),
        }

    # -- the engine -------------------------------------------------------------------

    async def _wait_until_loaded(self) -> SharedEngine:
        try:
            return await asyncio.wrap_future(self._engine_future)
        except asyncio.CancelledError:
            raise
        except GenlmError as error:
            raise picklable_error(error) from None
        except BaseException as error:  # noqa: BLE001 - raised in the driver
            raise ModelLoadError(
                f"loading {self._spec.model!r} with {self._spec.engine!r} in a replica raised "
                f"{describe_error(error)}"
            ) from None

    async def _call_engine(self, method: str, *arguments: Any) -> None:
        """Call a method of the engine on its thread."""
        call = operator.methodcaller(method, *arguments)
        try:
            await asyncio.to_thread(self._shared.run, call)
        except Exception as error:  # noqa: BLE001 - raised in the driver
            raise picklable_error(error) from None

    def _statistics(self) -> dict[str, Any]:
        """Return the engine's statistics, none if the engine raises."""
        shared = self._shared
        try:
            return dict(shared.engine_statistics())
        except Exception:
            logger.exception("the engine's statistics raised")
            return {}

    async def _load(
        self, state: Session, adapters: Mapping[str, str], prefixes: Collection[Prefix]
    ) -> None:
        """Load the missing adapters and prefixes of a session, and free the others."""
        for name in state.adapters.difference(adapters):
            state.adapters.remove(name)
            engine_name = state.engine_adapter(name)
            try:
                if hasattr(self._shared.engine, "remove_adapter"):
                    await self._call_engine("remove_adapter", engine_name)
            except Exception:  # the adapter stays loaded; others are freed
                logger.exception("freeing the adapter %r raised", name)
        for name, path in adapters.items():
            if name not in state.adapters:
                engine_name = state.engine_adapter(name)
                await self._call_engine("add_adapter", engine_name, path)
                state.adapters.add(name)
        freed = [prefix for prefix in state.prefixes if prefix not in prefixes]
        for prefix in freed:
            del state.prefixes[prefix]
        if freed:
            await self._recompute_prefixes()
        for prefix in prefixes:
            if prefix not in state.prefixes:
                await self._cache_prefix(state, prefix)
                state.prefixes[prefix] = None

    async def _cache_prefix(self, state: Session, prefix: Prefix) -> None:
        token_ids, adapter = prefix
        await self._call_engine("cache_prefix", token_ids, state.engine_adapter(adapter))

    async def _recompute_prefixes(self) -> None:
        """Clear the engine's prefix cache and compute the prefixes of all sessions again."""
        await self._call_engine("clear_prefix_cache")
        for state in list(self._sessions.values()):
            for prefix in list(state.prefixes):
                try:
                    await self._cache_prefix(state, prefix)
                except Exception:  # queries then compute it
                    logger.exception("computing a prefix again raised")

    # -- supervision ------------------------------------------------------------------

    async def _supervise(self) -> None:
        """End slow reductions, sessions of silent drivers, and the process with the engine."""
        timeout_s = self._spec.driver_timeout_s
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            self._exit_if_engine_ended()
            for state in list(self._sessions.values()):
                state.time_out_reductions()
            oldest_s = time.monotonic() - timeout_s
            silent = [n for n, state in self._sessions.items() if state.seen_s < oldest_s]
            if silent:  # they may wait for an adapter that is being loaded
                detaching = [asyncio.create_task(self.detach(session)) for session in silent]
                await asyncio.wait(detaching, timeout=1.0)

    def _exit_if_engine_ended(self) -> None:
        """End the process if the engine's thread has ended; Ray starts a new process."""
        if self._shared.closed:
            _exit(EngineDiedError("the engine's thread has ended"))


def _exit(cause: BaseException) -> None:
    """End this process."""
    logger.error("the engine has ended; its process ends too", exc_info=cause)
    os._exit(1)
