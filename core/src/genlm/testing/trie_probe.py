"""`TrieProbe`: a trie around a trie, which a check can hold, break and watch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from genlm.testing.turnstile import Turnstile

__all__ = ["TrieProbe"]


class TrieProbe(Turnstile):
    """Passes everything on to a trie; `hold` makes its reductions wait.

    Args:
        trie: The trie inside, which does all the work.
        patience_s: How long a held reduction waits to be released.

    Attributes:
        reductions: Name and number of rows of each reduction that was begun.
    """

    def __init__(self, trie: Any, patience_s: float) -> None:
        super().__init__(patience_s)
        self.reductions: list[tuple[str, int]] = []
        self._trie = trie

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trie, name)
        if name.startswith(("weight_", "batch_weight_")):
            return functools.partial(self._reduced, name, value)
        return value

    def __len__(self) -> int:
        return len(self._trie)

    def _reduced(self, name: str, reduce: Callable[..., Any], ws: Any, **options: Any) -> Any:
        self.reductions.append((name, len(ws) if name.startswith("batch_") else 1))
        self.enter()
        return reduce(ws, **options)
