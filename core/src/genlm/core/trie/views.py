"""The dict-shaped views of a trie that clients read, each derived when asked for.

`children`, `jump` and `node2prefix` make a node's entry when it is read; a client that
walks from the root pays for the nodes that it visits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from genlm.core.errors import VocabularyError
from genlm.core.forking import cached_property
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.letters import item_key, spell
from genlm.core.trie.navigation import Navigation

__all__ = ["NodeMapping", "NodeView", "Views", "check_keys"]

T = TypeVar("T")


class NodeView(Sequence[T], Generic[T]):
    """A list with an entry for every node, each made when it is first read and then kept."""

    def __init__(self, length: int, entry: Callable[[int], T]) -> None:
        self._entry = entry
        self._made: list[T | None] = [None] * length

    @overload
    def __getitem__(self, node: int) -> T: ...
    @overload
    def __getitem__(self, node: slice) -> list[T]: ...
    def __getitem__(self, node: int | slice) -> T | list[T]:
        if isinstance(node, slice):
            return [self[index] for index in range(*node.indices(len(self)))]
        try:
            made = self._made[node]
        except IndexError as error:
            raise IndexError(
                f"no node {node}; the trie's nodes are 0 to {len(self) - 1}"
            ) from error
        if made is None:
            made = self._made[node] = self._entry(operator.index(node) % len(self))
        return made

    def __len__(self) -> int:
        return len(self._made)

    def __repr__(self) -> str:
        return f"<an entry for each of {len(self)} nodes, made when it is read>"

    def __iter__(self) -> Iterator[T]:
        return (self[node] for node in range(len(self)))


class NodeMapping(Mapping[int, T], Generic[T]):
    """The entries of a `NodeView` as a mapping from nodes, in the order of their numbers."""

    def __init__(self, entries: NodeView[T]) -> None:
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


class Views(Navigation):
    """The views of a trie as attributes; what they give must not be changed.

    Attributes:
        decode: The vocabulary.
    """

    decode: list[Any]

    @cached_property
    def children(self) -> NodeView[dict[Any, int]]:
        """For every node its children by edge.

        An edge is a letter (bytes as integers) or, for a leaf, `(None, leaf_label(leaf))`.
        End-of-token edges come first, letters in order.
        """
        return NodeView(
            len(self), _edge_reader(self.layout, self.letter_objects, self.leaf_label)
        )

    def leaf_label(self, leaf: int) -> Hashable:
        """Return what the edge to a leaf carries in `children`: the leaf's number.

        The leaf's number is the token's position in `decode`. A subclass may return another
        label that no other leaf below the same parent has.
        """
        return leaf

    @cached_property
    def jump(self) -> NodeView[npt.NDArray[np.int32]]:
        """For every node its children, leaves among them, as a sorted array."""
        return NodeView(len(self), self._sorted_children)

    @cached_property
    def node2prefix(self) -> NodeMapping[list[Any]]:
        """For every node the letters from the root to it."""
        return NodeMapping(NodeView(len(self), self.prefix_of))

    @cached_property
    def word2leaf(self) -> dict[Hashable, int]:
        """The leaf of every item: of tokens by `(bytes, token id)`, others by themselves."""
        return {item_key(item): leaf for leaf, item in enumerate(self.decode)}

    @cached_property
    def leaf2word(self) -> dict[int, Hashable]:
        """`word2leaf` the other way round."""
        return {leaf: word for word, leaf in self.word2leaf.items()}

    @cached_property
    def idx_to_leaf(self) -> npt.NDArray[np.int32]:
        """Rows of a position in `decode` and its leaf, `(len(decode), 2)`: equal here."""
        positions = np.arange(self.layout.n_tokens, dtype=np.int32)
        return np.stack([positions, positions], axis=1)

    @cached_property
    def ordering(self) -> npt.NDArray[np.int32]:
        """All nodes but the leaves, children before parents."""
        return np.arange(self.layout.n_tokens, self.layout.n_nodes, dtype=np.int32)

    def _sorted_children(self, node: int) -> npt.NDArray[np.int32]:
        if node < self.layout.n_tokens:
            return np.empty(0, np.int32)
        prefixes = np.array(self.child_prefixes(node), dtype=np.int32)
        return np.concatenate([np.sort(self.tokens_at(node)), prefixes])


def _edge_reader(
    layout: TrieLayout,
    letter_objects: Sequence[Hashable],
    leaf_label: Callable[[int], Hashable],
) -> Callable[[int], dict[Any, int]]:
    """Make the function that lists a node's edges.

    It reads Python lists: a walk over all nodes takes a tenth of the time that
    indexing arrays does.
    """
    n = layout.n_tokens
    order, child_start = layout.order.tolist(), layout.child_start.tolist()
    lo, hi = layout.lo.tolist(), layout.hi.tolist()
    letters = spell(layout.letter.tolist(), letter_objects)
    no_edges: dict[Any, int] = {}

    def edges(node: int) -> dict[Any, int]:
        if node < n:
            return no_edges
        first, last = child_start[node - n], child_start[node - n + 1]
        begin, end = lo[node], lo[first] if first < last else hi[node]
        if begin == end and last - first == 1:  # of most nodes: one letter, no token
            return {letters[first - n]: first}
        found: dict[Any, int] = {(None, leaf_label(leaf)): leaf for leaf in order[begin:end]}
        found.update(zip(letters[first - n : last - n], range(first, last)))
        return found

    return edges


def check_keys(decode: Sequence[Any], layout: TrieLayout) -> None:
    """Refuse an item that occurs twice: only neighbours in sorted order can be equal.

    Raises:
        VocabularyError: Two positions hold the same item.
    """
    end = layout.parent[layout.order]
    alike = np.flatnonzero(end[1:] == end[:-1])
    position_of: dict[Hashable, int] = {}
    ranks = np.union1d(alike, alike + 1)
    for position in np.sort(layout.order[ranks]).tolist():
        key = item_key(decode[position])
        first = position_of.setdefault(key, position)
        if first != position:
            raise VocabularyError(
                f"Duplicate word in vocabulary: items {first} and {position} are both {key!r}; "
                f"tokens that share bytes need ids of their own: Token(token_id, byte_string)"
            )
