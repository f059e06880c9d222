"""The published mappings of a trie: its nodes as dictionaries and arrays.

The mappings are computed on first use; `children`, `jump` and `node2prefix` compute the entry
of a node when it is first read, so the cost of a walk is proportional to the visited nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

import genlm

__all__ = ["NodeMapping", "NodeSequence", "TrieViews"]

T = TypeVar("T")

_FIRST_OBJECT = 256
"""Code of the first of `symbol_objects`; lower codes are bytes."""


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


class TrieViews(genlm.TokenCharacterTrie):
    """A token trie with the published mappings, whose values callers must not change."""

    @cached_property
    def children(self) -> NodeSequence[dict[Any, int]]:
        """The children of every node by edge.

        An edge is a symbol (bytes are integers) or, to a leaf, `(None, leaf_label(leaf))`.
        Edges are in the order of the first token below them in `decode`, as published, so that
        seeded programs that draw an edge draw the same one.
        """
        return NodeSequence(len(self), self._edge_reader())

    def leaf_label(self, leaf: int) -> Hashable:
        """Return the label of the edge to a leaf in `children`, unique below one parent.

        Returns:
            The leaf, which is the position of its token in `decode`.
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
        return {_word(item): leaf for leaf, item in enumerate(self.decode)}

    @cached_property
    def leaf2word(self) -> dict[int, Hashable]:
        """The inverse of `word2leaf`."""
        return {leaf: word for word, leaf in self.word2leaf.items()}

    @property
    def idx_to_leaf(self) -> npt.NDArray[np.int32]:
        """Pairs of a position in `decode` and its leaf, `(len(decode), 2)`; both are equal."""
        positions = np.arange(self.layout.n_tokens, dtype=np.int32)
        return np.stack([positions, positions], axis=1)

    @property
    def ordering(self) -> npt.NDArray[np.int32]:
        """All nodes except leaves, children before parents."""
        return np.arange(self.layout.n_tokens, self.layout.n_nodes, dtype=np.int32)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the mappings, whose functions cannot be pickled."""
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(TrieViews, name, None), cached_property)
        }

    def _sorted_children(self, node: int) -> npt.NDArray[np.int32]:
        if self.is_leaf(node):
            return np.empty(0, np.int32)
        prefixes = np.array(self.child_prefixes(node), dtype=np.int32)
        return np.concatenate([np.sort(self.tokens_at(node)), prefixes])

    def _edge_reader(self) -> Callable[[int], dict[Any, int]]:
        """Create the function that computes a node's edges.

        It reads Python lists: a walk over all nodes takes a tenth of the time of one with
        arrays.
        """
        layout, objects = self.layout, self.symbol_objects
        n = layout.n_tokens
        order, child_start = layout.order.tolist(), layout.child_start.tolist()
        lo, hi = layout.lo.tolist(), layout.hi.tolist()
        symbols = [
            code if code < _FIRST_OBJECT else objects[code - _FIRST_OBJECT]
            for code in layout.symbol.tolist()
        ]
        first_token = (-self.weight_max(-np.arange(n))).astype(np.int64).tolist()
        first_of = first_token.__getitem__
        no_edges: dict[Any, int] = {}

        def edges(node: int) -> dict[Any, int]:
            if node < n:
                return no_edges
            first, last = child_start[node - n], child_start[node - n + 1]
            begin, end = lo[node], lo[first] if first < last else hi[node]
            if begin == end and last - first == 1:  # most nodes: one symbol, no token
                return {symbols[first - n]: first}
            children = sorted([*order[begin:end], *range(first, last)], key=first_of)
            return {
                (None, self.leaf_label(child)) if child < n else symbols[child - n]: child
                for child in children
            }

        return edges


def _word(item: Any) -> Hashable:
    """Return the key of an item in `word2leaf`."""
    token_id = getattr(item, "token_id", None)
    key: Hashable = item if token_id is None else (bytes(item), token_id)
    return key
