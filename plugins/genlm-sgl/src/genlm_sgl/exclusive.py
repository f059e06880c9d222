"""`ExclusiveEngine`: several engines of which at most one is built.

The conformance suite uses one engine for each setting of a target, one after the other. The
class is not for serving: every change of engine shuts SGLang down and builds it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from genlm.plugin import Completion, GroupQuery, Query

__all__ = ["ExclusiveEngine"]


class ExclusiveEngine:
    """An engine that closes when another one is used and is rebuilt on its next use.

    Args:
        build: Function that builds the engine.

    Attributes:
        lock: Lock of all `ExclusiveEngine`s, held during every call.
        active: The instance whose engine is built.

    Raises:
        RuntimeError: The engine that would be closed has unanswered queries.
        Exception: Any error of `build`.
    """

    lock: ClassVar[threading.RLock] = threading.RLock()
    active: ClassVar[ExclusiveEngine | None] = None

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._engine: Any = None
        self._adapters: dict[str, str] = {}
        self._unanswered: set[int] = set()
        self._last_statistics: Mapping[str, int | float | str] = {}
        with self.lock:
            engine = self._activate()
            self.vocabulary = engine.vocabulary
            self.max_context = engine.max_context
            self.capabilities = engine.capabilities

    def _activate(self) -> Any:
        """Return the engine, built if it is closed."""
        cls = type(self)
        if self._engine is None:
            if cls.active is not None:
                cls.active.suspend()
            self._engine = self._build()
            cls.active = self
            for name, path in self._adapters.items():
                self._engine.add_adapter(name, path)
        return self._engine

    def suspend(self) -> None:
        """Close the engine until it is used again."""
        if self._unanswered:
            raise RuntimeError(f"cannot suspend with {len(self._unanswered)} pending queries")
        self.close()

    def submit(self, query: Query) -> None:
        """Submit a query to the engine."""
        with self.lock:
            self._activate().submit(query)
            self._unanswered.add(query.query_id)

    def submit_group(self, group: GroupQuery) -> None:
        """Submit a group query to the engine."""
        with self.lock:
            self._activate().submit_group(group)
            self._unanswered.add(group.query_id)

    def step(self) -> list[Completion]:
        """Run a step of the engine."""
        with self.lock:
            try:
                completions: list[Completion] = self._activate().step()
            except Exception:
                self._unanswered.clear()
                raise
            self._unanswered -= {completion.query_id for completion in completions}
            return completions

    def abort(self, query_id: int) -> None:
        """Abort a query of the engine."""
        with self.lock:
            self._unanswered.discard(query_id)
            if self._engine is not None:
                self._engine.abort(query_id)

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """Release a context of the engine."""
        with self.lock:
            if self._engine is not None:
                self._engine.release_context(adapter, key)

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter, now and each time the engine is built."""
        with self.lock:
            self._activate().add_adapter(name, path)
            self._adapters[name] = path

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Cache a prefix in the engine."""
        with self.lock:
            self._activate().cache_prefix(token_ids, adapter)

    def clear_prefix_cache(self) -> None:
        """Clear the engine's prefix cache."""
        with self.lock:
            self._activate().clear_prefix_cache()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return the engine's statistics, or their last values while it is suspended."""
        engine: Any = self._engine
        return dict(self._last_statistics if engine is None else engine.statistics())

    def close(self) -> None:
        """Close the engine if it is built."""
        with self.lock:
            engine, self._engine = self._engine, None
            if type(self).active is self:
                type(self).active = None
            if engine is not None:
                engine.close()
                self._last_statistics = engine.statistics()
