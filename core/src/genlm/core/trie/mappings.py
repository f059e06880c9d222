"""Lists and mappings over the nodes of a trie, computed on first use.

`children`, `jump` and `node2prefix` compute a node's entry when it is first read, so the
cost of a walk is proportional to the nodes that it visits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from genlm.core.base.forking import cached_property
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.navigation import Navigation
from genlm.core.trie.symbols import item_key, symbols_of_codes

__all__ = ["NodeMapping", "NodeSequence", "TrieMappings"]

T = TypeVar("T")


class NodeSequence(Sequence[T], Generic[T]):
    """A sequence with an entry for every node, computed when first read, then cached."""

    def __init__(self, length: int, compute: Callable[[int], T]) -> None:
        self._compute = compute
        self._entries: list[T | None] = [None] * length

    @overload
    def __getitem__(self, node: int) -> T: ...
    @overload
    def __getitem__(self, node: slice) -> list[T]: ...
    def __getitem__(self, node: int | slice) -> T | list[T]:
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
        return f"<an entry for each of {len(self)} nodes, computed when it is read>"

    def __iter__(self) -> Iterator[T]:
        return (self[node] for node in range(len(self)))


class NodeMapping(Mapping[int, T], Generic[T]):
    """The entries of a `NodeSequence` as a mapping from nodes, in ascending order."""

    def __init__(self, entries: NodeSequence[T]) -> None:
        self._entries = entries

    @overload
    def __getitem__(self, node: int) -> T: ...
    @overload
    def __getitem__(self, node: slice) -> list[T]: ...
    def __getitem__(self, node: int | slice) -> T | list[T]:
        if isinstance(node, slice):
            return self._entries[node]
        if node not in self:
            raise KeyError(f"no node {node}; the trie's nodes are 0 to {len(self) - 1}")
        return self._entries[node]

    def __contains__(self, node: object) -> bool:
        return hasattr(node, "__index__") and 0 <= operator.index(node) < len(self)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __repr__(self) -> str:
        return repr(self._entries)


class TrieMappings(Navigation):
    """The mappings of a trie as attributes; callers must not change their values.

    Attributes:
        decode: The vocabulary.
    """

    decode: list[Any]

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

    It reads Python lists, with which a walk over all nodes takes a tenth of the time that
    it takes with arrays.
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
        found: dict[Any, int] = {(None, leaf_label(leaf)): leaf for leaf in order[begin:end]}
        found.update(zip(symbols[first - n : last - n], range(first, last)))
        return found

    return edges
