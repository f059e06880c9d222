"""`ExclusiveEngine`: several engines of which one at a time is built.

For the conformance suite, which uses one engine per setting of a target, one after the other.
Not for serving: each change of engine shuts SGLang down and builds it again.
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
        build: Builds the engine.

    Attributes:
        lock: Held during every call to any `ExclusiveEngine`.
        active: Instance whose engine is built.

    Raises:
        RuntimeError: The engine to close has unanswered queries.
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
            engine = self._built()
            self.vocabulary = engine.vocabulary
            self.max_context = engine.max_context
            self.capabilities = engine.capabilities

    def _built(self) -> Any:
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
            raise RuntimeError(f"asked to suspend with {len(self._unanswered)} pending queries")
        self.close()

    def submit(self, query: Query) -> None:
        """As the engine."""
        with self.lock:
            self._built().submit(query)
            self._unanswered.add(query.query_id)

    def submit_group(self, group: GroupQuery) -> None:
        """As the engine."""
        with self.lock:
            self._built().submit_group(group)
            self._unanswered.add(group.query_id)

    def step(self) -> list[Completion]:
        """As the engine."""
        with self.lock:
            try:
                completions: list[Completion] = self._built().step()
            except Exception:
                self._unanswered.clear()
                raise
            self._unanswered -= {completion.query_id for completion in completions}
            return completions

    def abort(self, query_id: int) -> None:
        """As the engine."""
        with self.lock:
            self._unanswered.discard(query_id)
            if self._engine is not None:
                self._engine.abort(query_id)

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """As the engine."""
        with self.lock:
            if self._engine is not None:
                self._engine.release_context(adapter, key)

    def add_adapter(self, name: str, path: str) -> None:
        """As the engine; repeated each time that it is built."""
        with self.lock:
            self._built().add_adapter(name, path)
            self._adapters[name] = path

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """As the engine."""
        with self.lock:
            self._built().cache_prefix(token_ids, adapter)

    def clear_prefix_cache(self) -> None:
        """As the engine."""
        with self.lock:
            self._built().clear_prefix_cache()

    def statistics(self) -> Mapping[str, int | float | str]:
        """As the engine; while it is suspended, the last ones."""
        engine: Any = self._engine
        figures = self._last_statistics if engine is None else engine.statistics()
        return dict(figures)

    def close(self) -> None:
        """Close the engine if it is built."""
        with self.lock:
            engine, self._engine = self._engine, None
            if type(self).active is self:
                type(self).active = None
            if engine is not None:
                engine.close()
                self._last_statistics = engine.statistics()
