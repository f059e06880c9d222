"""Navigation between the nodes of a trie.

Methods read the layout's arrays; they build and cache nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.symbols import FIRST_OBJECT, is_byte, symbols_of_codes


class Navigation:
    """Look-up of nodes by prefix, symbol, interval and token.

    A node is an integer as `TrieLayout` numbers them. A token is a position in the
    vocabulary, which is also the node of its leaf.

    Attributes:
        decode: The vocabulary.
        layout: The trie as arrays.
        symbol_objects: The symbols other than bytes; the first has code 256.
    """

    decode: list[Any]

    def __init__(self, layout: TrieLayout, symbol_objects: Sequence[Hashable] = ()) -> None:
        self.layout = layout
        self.symbol_objects = tuple(symbol_objects)
        self._code_of = {
            symbol: FIRST_OBJECT + index for index, symbol in enumerate(symbol_objects)
        }

    def __repr__(self) -> str:
        tokens, nodes = self.layout.n_tokens, self.layout.n_nodes
        return f"<{type(self).__name__}: {tokens} tokens, {nodes} nodes>"

    @property
    def root(self) -> int:
        """The node of the empty prefix, which is the last node."""
        return self.layout.root

    def __len__(self) -> int:
        """Number of nodes, leaves included, which is the length of every result."""
        return self.layout.n_nodes

    def is_leaf(self, node: int) -> bool:
        """Whether the node is the leaf of a token."""
        return self._check_node(node) < self.layout.n_tokens

    def interval(self, node: int) -> tuple[int, int]:
        """Return the ranks `[lo, hi)` of the tokens below a node, in sorted order."""
        node = self._check_node(node)
        return int(self.layout.lo[node]), int(self.layout.hi[node])

    def parent(self, node: int) -> int | None:
        """Return the parent of a node, None for the root."""
        parent = int(self.layout.parent[self._check_node(node)])
        return None if parent < 0 else parent

    def child_prefixes(self, node: int) -> range:
        """Return the children of a node except leaves, sorted by symbol."""
        node = self._check_node(node)
        if node < self.layout.n_tokens:
            return range(0)
        lo, hi = self.layout.child_start[node - self.layout.n_tokens :][:2].tolist()
        return range(lo, hi)

    def child_symbols(self, node: int) -> list[Any]:
        """Return the edge symbol of each of `child_prefixes`; bytes are integers."""
        children = self.child_prefixes(node)
        n = self.layout.n_tokens
        codes = self.layout.symbol[max(children.start - n, 0) : max(children.stop - n, 0)]
        return symbols_of_codes(codes.tolist(), self.symbol_objects)

    def child(self, node: int, symbol: Any) -> int | None:
        """Return the child of a node along a symbol, None if that prefix does not exist."""
        code = int(symbol) if is_byte(symbol) else self._code_of.get(symbol)
        children = self.child_prefixes(node)
        if code is None or not children:
            return None
        first = children.start - self.layout.n_tokens
        codes = self.layout.symbol[first : first + len(children)]
        place = int(np.searchsorted(codes, code))
        if place == len(codes) or int(codes[place]) != code:
            return None
        return children[place]

    def path(self, prefix: Iterable[Any]) -> list[int]:
        """Return the nodes from the root along a prefix, up to the longest existing prefix.

        Raises:
            TypeError: `prefix` is a `str` and the trie is over bytes, or cannot be iterated.
        """
        self._check_prefix(prefix)
        node: int | None = self.root
        nodes = [self.root]
        for symbol in prefix:
            node = self.child(nodes[-1], symbol)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def node_of(self, prefix: Iterable[Any]) -> int | None:
        """Return the node of a prefix, None if no token starts with it.

        Args:
            prefix: Bytes or an iterable of symbols.

        Raises:
            TypeError: As `path`.
        """
        self._check_prefix(prefix)
        symbols = prefix if isinstance(prefix, (bytes, str)) else list(prefix)
        nodes = self.path(symbols)
        return nodes[-1] if len(nodes) == len(symbols) + 1 else None

    def prefix_of(self, node: int) -> list[Any]:
        """Return the symbols from the root to a node; for a leaf, the symbols of its token."""
        symbols = []
        node = self._check_node(node)
        n = self.layout.n_tokens
        while node != self.root:
            if node >= n:
                symbols.append(int(self.layout.symbol[node - n]))
            node = int(self.layout.parent[node])
        return symbols_of_codes(reversed(symbols), self.symbol_objects)

    def tokens_at(self, node: int) -> npt.NDArray[np.int32]:
        """Return the tokens equal to a node's prefix (leaves below the node); read-only."""
        node = self._check_node(node)
        lo, hi = self.interval(node)
        children = self.child_prefixes(node)
        # A token sorts before its extensions.
        end = int(self.layout.lo[children.start]) if children else hi
        return self.layout.order[lo:end]

    def tokens_below(self, node: int) -> npt.NDArray[np.int32]:
        """Return the tokens that start with a node's prefix, in sorted order. Read-only."""
        lo, hi = self.interval(node)
        return self.layout.order[lo:hi]

    def _check_prefix(self, prefix: object) -> None:
        if isinstance(prefix, str) and not self.symbol_objects:
            raise TypeError(f"the symbols of this trie are bytes: pass {prefix.encode()!r}")
        if not isinstance(prefix, Iterable):
            raise TypeError(f"found {prefix!r}; a prefix is bytes or an iterable of symbols")

    def _check_node(self, node: int) -> int:
        try:
            node = operator.index(node)
        except TypeError:
            raise TypeError(f"found {node!r}; a node is an integer") from None
        if not 0 <= node < self.layout.n_nodes:
            raise IndexError(
                f"no node {node}; the trie's nodes are 0 to {self.layout.n_nodes - 1}"
            )
        return node
