"""`AlternatingEngine`: engines of several settings where only one can be alive.

For the conformance suite, which has an engine for each setting of a target and uses one after
the other. Not for serving: each change of setting takes SGLang down and builds it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from genlm import Completion, Query

__all__ = ["AlternatingEngine"]


class AlternatingEngine:
    """An engine that makes way for another setting's, and is built again when it is asked.

    Args:
        build: Makes the engine.

    Attributes:
        lock: Held during every call to any of them.
        awake: The one that is alive.

    Raises:
        RuntimeError: The engine that should make way has unanswered queries.
        Exception: Whatever `build` raises.
    """

    lock: ClassVar[threading.RLock] = threading.RLock()
    awake: ClassVar[AlternatingEngine | None] = None

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._engine: Any = None
        self._adapters: dict[str, str] = {}
        self._unanswered: set[int] = set()
        self._last_statistics: Mapping[str, int | float | str] = {}
        with self.lock:
            engine = self._woken()
            self.vocabulary = engine.vocabulary
            self.max_context = engine.max_context
            self.capabilities = engine.capabilities

    def _woken(self) -> Any:
        cls = type(self)
        if self._engine is None:
            if cls.awake is not None:
                cls.awake.park()
            self._engine = self._build()
            cls.awake = self
            for name, path in self._adapters.items():
                self._engine.add_adapter(name, path)
        return self._engine

    def park(self) -> None:
        """Make way: end this engine's life until it is asked again."""
        if self._unanswered:
            raise RuntimeError(f"asked to make way with {len(self._unanswered)} queries")
        self.close()

    def submit(self, query: Query) -> None:
        """As the engine."""
        with self.lock:
            self._woken().submit(query)
            self._unanswered.add(query.query_id)

    def step(self) -> list[Completion]:
        """As the engine."""
        with self.lock:
            try:
                completions: list[Completion] = self._woken().step()
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

    def add_adapter(self, name: str, path: str) -> None:
        """As the engine, in every life from now on."""
        with self.lock:
            self._woken().add_adapter(name, path)
            self._adapters[name] = path

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """As the engine."""
        with self.lock:
            self._woken().cache_prefix(token_ids, adapter)

    def clear_prefix_cache(self) -> None:
        """As the engine."""
        with self.lock:
            self._woken().clear_prefix_cache()

    def statistics(self) -> Mapping[str, int | float | str]:
        """As the engine; of its last life, while it sleeps."""
        engine: Any = self._engine
        figures = self._last_statistics if engine is None else engine.statistics()
        return dict(figures)

    def close(self) -> None:
        """End the engine's life, if it has one."""
        with self.lock:
            engine, self._engine = self._engine, None
            if type(self).awake is self:
                type(self).awake = None
            if engine is not None:
                engine.close()
                self._last_statistics = engine.statistics()
