"""`SharedEngine`: one engine for all the models that a target loads.

It is used for engines that are slow to build. The engine runs on a dedicated thread, like every
engine; every model has an `EngineHandle`, which forwards calls to that thread. At most one
shared engine is open at a time, because some libraries allow one engine per process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from genlm import Capability, Completion, Engine, EngineClosedError, Query, Vocabulary
from genlm.plugin import GroupQuery, Scheduler

_ADAPTER_METHODS = frozenset({"add_adapter", "remove_adapter"})
"""Methods of the engine that `SharedEngine` wraps, to track the loaded adapters."""


class SharedEngine:
    """An engine on a dedicated thread, and the handles that receive its completions.

    Args:
        build: Builds the engine, on that thread.

    Attributes:
        current: Key and engine that are open, if there is one.

    Raises:
        Exception: The exception that `build` raised.
    """

    current: ClassVar[tuple[object, SharedEngine] | None] = None

    @classmethod
    def open(cls, key: object, build: Callable[[], Engine]) -> SharedEngine:
        """Return the engine of a key; closes that of another key and builds this one."""
        if cls.current is None or cls.current[0] != key:
            cls.close_current()
            cls.current = key, cls(build)
        return cls.current[1]

    @classmethod
    def close_current(cls) -> None:
        """Close the engine that is open, if there is one."""
        if cls.current is not None:
            (_, shared), cls.current = cls.current, None
            shared.close()

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._owners: dict[int, EngineHandle] = {}  # by query id, unique in this process
        self._adapters: dict[str, str] = {}

        def build_shared() -> SimpleNamespace:
            engine = build()
            return SimpleNamespace(shared=engine, close=engine.close)

        # The scheduler provides the thread; the only method of the engine it calls is `close`.
        self._thread = Scheduler(build_shared, name="genlm-testing-engine")
        self.engine: Engine = self._thread.engine.shared
        # The adapters built into the model, without those that `add_adapter` loads.
        self.built_in_adapters = tuple(getattr(self.engine, "adapters", ()))

    @property
    def closed(self) -> bool:
        """Whether the engine was closed; its models can then only be closed."""
        return self._thread.closed

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the engine's thread and wait; does nothing after `close`."""
        return None if self.closed else self._thread.run(lambda _: function())

    def close(self) -> None:
        """Close the engine and end its thread; an exception of the engine is logged."""
        self._thread.close()

    # -- on the engine's thread -------------------------------------------------------

    def submit(self, query: Query | GroupQuery, handle: EngineHandle) -> None:
        """Submit a query or a group to the engine."""
        if isinstance(query, GroupQuery):
            self.engine.submit_group(query)  # type: ignore[attr-defined]
        else:
            self.engine.submit(query)
        self._owners[query.query_id] = handle

    def step(self) -> None:
        """Step the engine and store each completion in the handle of its query."""
        for completion in self.engine.step():
            handle = self._owners.pop(completion.query_id, None)
            if handle is not None:
                handle.ready.append(completion)

    def abort(self, query_id: int) -> None:
        """Abort a query in the engine, if it is there."""
        if self._owners.pop(query_id, None) is not None:
            self.engine.abort(query_id)

    def abort_all(self, handle: EngineHandle) -> None:
        """Abort all queries of one handle."""
        for query_id in [id_ for id_, owner in self._owners.items() if owner is handle]:
            self.abort(query_id)

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter unless it is loaded."""
        if self._adapters.get(name) != path:
            self.engine.add_adapter(name, path)  # type: ignore[attr-defined]
            self._adapters[name] = path

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter, which later models load again."""
        self.engine.remove_adapter(name)  # type: ignore[attr-defined]
        self._adapters.pop(name, None)


class EngineHandle:
    """View of the shared engine for one model.

    Attributes:
        ready: Completions of this model's queries, from steps of this and of other models.
    """

    vocabulary: Vocabulary
    max_context: int | None
    capabilities: frozenset[Capability]

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self.ready: list[Completion] = []
        self.adapters = shared.built_in_adapters

    def submit(self, query: Query | GroupQuery) -> None:
        """Submit a query or a group."""
        self._shared.call(lambda: self._shared.submit(query, self))

    def step(self) -> list[Completion]:
        """Return the ready completions; if there are none, step the engine.

        Raises:
            EngineClosedError: An engine with other options was opened.
        """
        if self._shared.closed:
            raise EngineClosedError("an engine with other options was opened")

        def collect_ready() -> list[Completion]:
            if not self.ready:
                self._shared.step()
            ready, self.ready = self.ready, []
            return ready

        completions: list[Completion] = self._shared.call(collect_ready)
        return completions

    def abort(self, query_id: int) -> None:
        """Abort a query of this model."""
        self._shared.call(lambda: self._shared.abort(query_id))

    def close(self) -> None:
        """Abort this model's queries; the engine stays open."""
        self._shared.call(lambda: self._shared.abort_all(self))

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
