"""`TokenTrie`: what any trie backend offers.

A backend is a class `target(vocabulary)` with these members. The nodes are numbered as
in `TrieLayout`, so results of different backends can be compared entry by entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.weights import Returns

__all__ = ["TokenTrie"]


@runtime_checkable
class TokenTrie(Protocol):
    """Reduces weights of tokens to weights of all their prefixes.

    `TokenCharacterTrie` documents each member; its subclasses need only override
    `reduce` (and `reduce_some`) to compute elsewhere.
    """

    @property
    def decode(self) -> Sequence[Any]:
        """The vocabulary; weights are indexed by position in it."""
        ...

    @property
    def layout(self) -> TrieLayout:
        """The trie as arrays."""
        ...

    @property
    def root(self) -> int:
        """The node of the empty prefix."""
        ...

    @property
    def children(self) -> Sequence[Mapping[Any, int]]:
        """For every node its children by edge."""
        ...

    @property
    def word2leaf(self) -> Mapping[Any, int]:
        """The leaf of every item."""
        ...

    def __len__(self) -> int:
        """Number of nodes."""
        ...

    def weight_sum(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Sum the weights below every node."""
        ...

    def weight_max(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Find the largest weight below every node."""
        ...

    def weight_logsumexp(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Add the log-weights below every node."""
        ...

    def batch_weight_sum(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Sum each of several rows."""
        ...

    def batch_weight_max(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Find the largest weights of several rows."""
        ...

    def batch_weight_logsumexp(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Add the log-weights of several rows."""
        ...
