"""`SharedEngine`: one engine behind all the models that a target loads.

For engines that are slow to build. The engine runs on a dedicated thread, as every engine
does; each model has an `EngineHandle`, which forwards calls to that thread.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from genlm import Capability, Completion, Engine, Query, Vocabulary
from genlm.plugin import GroupQuery

__all__ = ["EngineHandle", "SharedEngine"]

T = TypeVar("T")

_ADAPTER_METHODS = frozenset({"add_adapter", "remove_adapter"})
"""Methods of the engine that `SharedEngine` calls itself, to know what is loaded."""


class SharedEngine:
    """An engine on a dedicated thread, and the handles of its queries.

    Args:
        build: Builds the engine, on that thread.

    Raises:
        Exception: The exception that `build` raised.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._owners: dict[int, tuple[EngineHandle, int]] = {}  # by the engine's query id
        self._query_ids = itertools.count()
        self._adapters: dict[str, str] = {}
        threading.Thread(target=self._run, name="genlm-testing-engine", daemon=True).start()
        try:
            self.engine: Engine = self.call(build)
        except BaseException:
            self._calls.put(None)
            raise
        # The adapters built into the model, without those that `add_adapter` loads.
        self.own_adapters = tuple(getattr(self.engine, "adapters", ()))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the engine's thread and wait."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def answer() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)

        self._calls.put(answer)
        return future.result()

    def close(self) -> None:
        """Close the engine and end its thread."""
        try:
            self.call(self.engine.close)
        finally:
            self._calls.put(None)

    # -- on the engine's thread -------------------------------------------------------

    def submit(self, query: Query | GroupQuery, handle: EngineHandle) -> int:
        """Submit a query or a group to the engine; returns its id there."""
        query_id = next(self._query_ids)
        if isinstance(query, GroupQuery):
            group = dataclasses.replace(query, query_id=query_id)
            self.engine.submit_group(group)  # type: ignore[attr-defined]
        else:
            self.engine.submit(query.replace(query_id=query_id))
        self._owners[query_id] = (handle, query.query_id)
        return query_id

    def step(self) -> None:
        """Step the engine and store each completion in the handle of its query."""
        for completion in self.engine.step():
            handle, query_id = self._owners.pop(completion.query_id, (None, 0))
            if handle is not None:
                handle.ready.append(completion._replace(query_id=query_id))

    def abort(self, query_id: int) -> None:
        """Abort a query in the engine."""
        self._owners.pop(query_id, None)
        self.engine.abort(query_id)

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter unless it is loaded."""
        if self._adapters.get(name) != path:
            self.engine.add_adapter(name, path)  # type: ignore[attr-defined]
            self._adapters[name] = path

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter, which later models load again."""
        self.engine.remove_adapter(name)  # type: ignore[attr-defined]
        self._adapters.pop(name, None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class EngineHandle:
    """View of the shared engine for one model.

    Attributes:
        ready: Completions of this model's queries, from its own steps and other models' steps.
    """

    vocabulary: Vocabulary
    max_context: int | None
    capabilities: frozenset[Capability]

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._ids: dict[int, int] = {}  # the engine's query ids by this model's
        self.ready: list[Completion] = []
        self.vocabulary = shared.engine.vocabulary
        self.max_context = shared.engine.max_context
        self.capabilities = shared.engine.capabilities
        self.capability_hints = getattr(shared.engine, "capability_hints", {})
        self.adapters = shared.own_adapters

    def submit(self, query: Query | GroupQuery) -> None:
        """Submit a query or a group under an id that is unique in the engine."""
        self._ids[query.query_id] = self._shared.call(lambda: self._shared.submit(query, self))

    def step(self) -> list[Completion]:
        """Return waiting completions; if there are none, step the engine."""

        def answered() -> list[Completion]:
            if not self.ready:
                self._shared.step()
            ready, self.ready = self.ready, []
            return ready

        completions = self._shared.call(answered)
        for completion in completions:
            self._ids.pop(completion.query_id, None)
        return completions

    def abort(self, query_id: int) -> None:
        """Abort a query of this model."""
        if query_id in self._ids:
            engines = self._ids.pop(query_id)
            self._shared.call(lambda: self._shared.abort(engines))

    def close(self) -> None:
        """Abort this model's queries; the engine stays open."""
        for query_id in list(self._ids):
            self.abort(query_id)

    def statistics(self) -> Mapping[str, int | float | str]:
        """The engine's statistics, summed over all models."""
        return self._shared.engine.statistics()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        engine = self._shared.engine
        method = getattr(engine, name)  # raises AttributeError if the engine lacks it
        if not callable(method) or name == "wake":  # called from any thread
            return method
        if name == "submit_group":
            return self.submit
        target = getattr(self._shared, name) if name in _ADAPTER_METHODS else method
        return lambda *arguments: self._shared.call(lambda: target(*arguments))
