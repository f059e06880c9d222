"""`TrieProbe`: a trie around a trie, which a check can hold, break and watch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from genlm.testing.failure import NeverEnded

__all__ = ["TrieProbe"]


class TrieProbe:
    """Passes everything on to a trie; can hold its reductions.

    Args:
        trie: The trie inside, which does all the work.
        patience_s: How long a held reduction waits to be released.

    Attributes:
        reductions: Name and number of rows of each reduction that was begun.
    """

    def __init__(self, trie: Any, patience_s: float) -> None:
        self.reductions: list[tuple[str, int]] = []
        self._trie = trie
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._held = False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trie, name)
        if name.startswith(("weight_", "batch_weight_")):
            return functools.partial(self._reduced, name, value)
        return value

    def __len__(self) -> int:
        return len(self._trie)

    def hold(self) -> None:
        """Make every reduction from now on wait for `release`."""
        self._held = True

    def release(self) -> None:
        """Let held and later reductions go on."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def wait_until_begun(self, count: int) -> None:
        """Block until `count` reductions have begun in all."""
        with self._changed:
            begun = functools.partial(self._has_begun, count)
            if not self._changed.wait_for(begun, self._patience_s):
                raise NeverEnded(f"waiting for reduction {count} to begin", self._patience_s)

    def _has_begun(self, count: int) -> bool:
        return len(self.reductions) >= count

    def _reduced(self, name: str, reduce: Callable[..., Any], ws: Any, **options: Any) -> Any:
        with self._changed:
            self.reductions.append((name, len(ws) if name.startswith("batch_") else 1))
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._held, self._patience_s)
        return reduce(ws, **options)
