"""`LeaseTable`: counts the references to contexts whose state an engine stores."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from genlm.core.base.forking import renew_in_forks
from genlm.core.engine.engine import call_each

ContextKey = tuple[str | None, bytes]
"""The engine name of the adapter, and the key of the token sequence."""


class ContextLease:
    """Keeps the engine's state of contexts alive until the lease is garbage-collected.

    Args:
        keys: The engine name of the adapter and the key of the token sequence of each context.
        on_drop: Function of the keys, called once when the lease is dropped, on any thread,
            also during garbage collection.

    Attributes:
        keys: As the argument.
    """

    __slots__ = ("_on_drop", "keys")

    def __init__(
        self,
        keys: tuple[ContextKey, ...],
        on_drop: Callable[[tuple[ContextKey, ...]], object],
    ) -> None:
        self.keys = keys
        self._on_drop = on_drop

    def __del__(self) -> None:
        self._on_drop(self.keys)


class LeaseTable:
    """Counts the leases of each context of one model.

    Attributes:
        on_drop: Function of the keys of a lease, called once when the lease is dropped, on any
            thread, also during garbage collection. It must schedule `release` with the keys.
    """

    def __init__(self) -> None:
        self.on_drop: Callable[[tuple[ContextKey, ...]], object] = lambda _keys: None
        self._counts: dict[ContextKey, int] = {}
        self._lock = threading.Lock()
        renew_in_forks(self)

    def lease(self, keys: Sequence[ContextKey]) -> ContextLease:
        """Return a lease of several contexts with state in the engine."""
        with self._lock:
            for key in keys:
                self._counts[key] = self._counts.get(key, 0) + 1
        return ContextLease(tuple(keys), self.on_drop)

    def find(self, key: ContextKey) -> ContextLease | None:
        """Return a further lease of a context that has a lease, else None."""
        with self._lock:
            if key not in self._counts:
                return None
            self._counts[key] += 1
        return ContextLease((key,), self.on_drop)

    def release(self, engine: Any, dropped: list[tuple[ContextKey, ...]]) -> None:
        """Release contexts without further leases; `dropped` has the keys of dropped leases.

        It runs on the engine's thread.
        """
        unused_keys = []
        with self._lock:
            for key in itertools.chain.from_iterable(dropped):
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]
                    unused_keys.append(key)
        call_each(engine.release_context, unused_keys)
