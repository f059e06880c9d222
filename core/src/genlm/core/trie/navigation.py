"""Navigation between the nodes of a trie, and lists and mappings over its nodes.

Methods read the layout's arrays; they build and cache nothing. Mappings are computed on first
use; `children`, `jump` and `node2prefix` compute a node's entry when it is first read, so the
cost of a walk is proportional to the nodes that it visits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from genlm.core.base.forking import cached_property
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.symbols import FIRST_OBJECT, is_byte, item_key, symbols_of_codes

__all__ = ["Navigation", "NodeMapping", "NodeSequence"]

T = TypeVar("T")


class NodeSequence(Sequence[T], Generic[T]):
    """A sequence with an entry for every node, computed when first read, then cached."""

    def __init__(self, length: int, compute: Callable[[int], T]) -> None:
        self._compute = compute
        self._entries: list[T | None] = [None] * length

    def __getitem__(self, node: Any) -> Any:
        if isinstance(node, slice):
            return [self[index] for index in range(*node.indices(len(self)))]
        try:
            entry = self._entries[node]
        except IndexError as error:
            raise IndexError(
                f"no node {node}; the trie's nodes are 0 to {len(self) - 1}"
            ) from error
        if entry is None:
            entry = self._entries[node] = self._compute(operator.index(node) % len(self))
        return entry

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<entries of {len(self)} nodes, computed when read>"


class NodeMapping(Mapping[int, T], Generic[T]):
    """The entries of a `NodeSequence` as a mapping from nodes, in ascending order."""

    def __init__(self, entries: NodeSequence[T]) -> None:
        self._entries = entries

    def __getitem__(self, node: Any) -> Any:
        is_node = hasattr(node, "__index__") and 0 <= operator.index(node) < len(self)
        if not is_node and not isinstance(node, slice):
            raise KeyError(f"no node {node}; the trie's nodes are 0 to {len(self) - 1}")
        return self._entries[node]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __repr__(self) -> str:
        return repr(self._entries)


class Navigation:
    """Look-up of nodes by prefix, symbol, interval and token, and mappings as attributes.

    A node is an integer as `TrieLayout` numbers them. A token is a position in the
    vocabulary, which is also the node of its leaf. Callers must not change the values of
    mappings.

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
            TypeError: `prefix` is a `str` and the trie is over bytes.
        """
        if isinstance(prefix, str) and not self.symbol_objects:
            raise TypeError(f"the symbols of this trie are bytes: pass {prefix.encode()!r}")
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
            TypeError: `prefix` is a `str` and the trie is over bytes.
        """
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

    def _check_node(self, node: int) -> int:
        node = operator.index(node)
        if not 0 <= node < self.layout.n_nodes:
            raise IndexError(
                f"no node {node}; the trie's nodes are 0 to {self.layout.n_nodes - 1}"
            )
        return node

    # -- mappings -----------------------------------------------------------------------

    @cached_property
    def children(self) -> NodeSequence[dict[Any, int]]:
        """The children of every node by edge.

        An edge is a symbol (bytes are integers) or, to a leaf, `(None, leaf_label(leaf))`.
        Edges to leaves come first, symbols in sorted order.
        """
        return NodeSequence(
            len(self), _edge_reader(self.layout, self.symbol_objects, self.leaf_label)
        )

    def leaf_label(self, leaf: int) -> Hashable:
        """Return the label of the edge to a leaf in `children`.

        This class returns the leaf, which is the token's position in `decode`. A subclass
        may return another label, unique among the leaves below one parent.
        """
        return leaf

    @cached_property
    def jump(self) -> NodeSequence[npt.NDArray[np.int32]]:
        """The children of every node, leaves included, as sorted arrays."""
        return NodeSequence(len(self), self._sorted_children)

    @cached_property
    def node2prefix(self) -> NodeMapping[list[Any]]:
        """The symbols from the root to every node."""
        return NodeMapping(NodeSequence(len(self), self.prefix_of))

    @cached_property
    def word2leaf(self) -> dict[Hashable, int]:
        """The leaf of every item: tokens by `(bytes, token id)`, other items by themselves."""
        return {item_key(item): leaf for leaf, item in enumerate(self.decode)}

    @cached_property
    def leaf2word(self) -> dict[int, Hashable]:
        """The inverse of `word2leaf`."""
        return {leaf: word for word, leaf in self.word2leaf.items()}

    @cached_property
    def idx_to_leaf(self) -> npt.NDArray[np.int32]:
        """Pairs of a position in `decode` and its leaf, `(len(decode), 2)`; both are equal."""
        positions = np.arange(self.layout.n_tokens, dtype=np.int32)
        return np.stack([positions, positions], axis=1)

    @cached_property
    def ordering(self) -> npt.NDArray[np.int32]:
        """All nodes except leaves, children before parents."""
        return np.arange(self.layout.n_tokens, self.layout.n_nodes, dtype=np.int32)

    def _sorted_children(self, node: int) -> npt.NDArray[np.int32]:
        if node < self.layout.n_tokens:
            return np.empty(0, np.int32)
        prefixes = np.array(self.child_prefixes(node), dtype=np.int32)
        return np.concatenate([np.sort(self.tokens_at(node)), prefixes])


def _edge_reader(
    layout: TrieLayout,
    symbol_objects: Sequence[Hashable],
    leaf_label: Callable[[int], Hashable],
) -> Callable[[int], dict[Any, int]]:
    """Create the function that computes a node's edges.

    It reads Python lists: a walk over all nodes takes a tenth of the time of one with arrays.
    """
    n = layout.n_tokens
    order, child_start = layout.order.tolist(), layout.child_start.tolist()
    lo, hi = layout.lo.tolist(), layout.hi.tolist()
    symbols = symbols_of_codes(layout.symbol.tolist(), symbol_objects)
    no_edges: dict[Any, int] = {}

    def edges(node: int) -> dict[Any, int]:
        if node < n:
            return no_edges
        first, last = child_start[node - n], child_start[node - n + 1]
        begin, end = lo[node], lo[first] if first < last else hi[node]
        if begin == end and last - first == 1:  # most nodes: one symbol, no token
            return {symbols[first - n]: first}
        children: dict[Any, int] = {(None, leaf_label(leaf)): leaf for leaf in order[begin:end]}
        children.update(zip(symbols[first - n : last - n], range(first, last)))
        return children

    return edges
