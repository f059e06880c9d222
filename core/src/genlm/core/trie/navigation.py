"""Finding one's way in a trie without its dict-shaped views.

Everything here is read off the layout's arrays; nothing is built or kept.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.letters import FIRST_OBJECT, spell

__all__ = ["Navigation"]


class Navigation:
    """The nodes of a layout by prefix, letter, interval and token.

    A node is an integer as `TrieLayout` numbers them; a token is a position in the
    vocabulary, which is also its leaf's node.

    Attributes:
        layout: The trie as arrays.
        letter_objects: The letters that are no bytes; the first has code 256.
    """

    layout: TrieLayout
    letter_objects: tuple[Hashable, ...]

    def __init__(self, layout: TrieLayout, letter_objects: Sequence[Hashable] = ()) -> None:
        self.layout = layout
        self.letter_objects = tuple(letter_objects)
        self._code_of = {
            letter: FIRST_OBJECT + index for index, letter in enumerate(letter_objects)
        }

    def __repr__(self) -> str:
        tokens, nodes = self.layout.n_tokens, self.layout.n_nodes
        return f"<{type(self).__name__}: {tokens} tokens, {nodes} nodes>"

    @property
    def root(self) -> int:
        """The node of the empty prefix, the last one."""
        return self.layout.root

    def __len__(self) -> int:
        """Number of nodes, leaves included; the length of every result."""
        return self.layout.n_nodes

    def is_leaf(self, node: int) -> bool:
        """Whether the node stands for one whole token."""
        return self._checked(node) < self.layout.n_tokens

    def interval(self, node: int) -> tuple[int, int]:
        """The ranks `[lo, hi)` of the tokens below a node, in the order of their letters."""
        node = self._checked(node)
        return int(self.layout.lo[node]), int(self.layout.hi[node])

    def parent(self, node: int) -> int | None:
        """The node above; None for the root."""
        above = int(self.layout.parent[self._checked(node)])
        return None if above < 0 else above

    def child_prefixes(self, node: int) -> range:
        """The nodes one letter further, in the order of their letters; leaves left out."""
        node = self._checked(node)
        if node < self.layout.n_tokens:
            return range(0)
        lo, hi = self.layout.child_start[node - self.layout.n_tokens :][:2].tolist()
        return range(lo, hi)

    def child_letters(self, node: int) -> list[Any]:
        """The letter of each of `child_prefixes`: bytes as integers, others as they are."""
        children = self.child_prefixes(node)
        n = self.layout.n_tokens
        codes = self.layout.letter[max(children.start - n, 0) : max(children.stop - n, 0)]
        return spell(codes.tolist(), self.letter_objects)

    def child(self, node: int, letter: Any) -> int | None:
        """The node one letter further, None if no token goes on like that."""
        code = self._code(letter)
        children = self.child_prefixes(node)
        if code is None or not children:
            return None
        first = children.start - self.layout.n_tokens
        codes = self.layout.letter[first : first + len(children)]
        place = int(np.searchsorted(codes, code))
        if place == len(codes) or int(codes[place]) != code:
            return None
        return children[place]

    def path(self, prefix: Iterable[Any]) -> list[int]:
        """The nodes from the root along a prefix, as far as tokens go: at least the root."""
        node: int | None = self.root
        nodes = [self.root]
        for letter in prefix:
            node = self.child(nodes[-1], letter)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def node_of(self, prefix: Iterable[Any]) -> int | None:
        """The node of a prefix, None if no token begins like that.

        Args:
            prefix: Bytes or an iterable of letters.
        """
        letters = list(prefix)
        nodes = self.path(letters)
        return nodes[-1] if len(nodes) == len(letters) + 1 else None

    def prefix_of(self, node: int) -> list[Any]:
        """The letters from the root to a node; those of its token for a leaf."""
        letters = []
        node = self._checked(node)
        n = self.layout.n_tokens
        while node != self.root:
            if node >= n:
                letters.append(int(self.layout.letter[node - n]))
            node = int(self.layout.parent[node])
        return spell(reversed(letters), self.letter_objects)

    def tokens_at(self, node: int) -> npt.NDArray[np.int32]:
        """The tokens whose letters end at a node, which are its leaves; read-only."""
        node = self._checked(node)
        lo, hi = self.interval(node)
        children = self.child_prefixes(node)
        # A token sorts before those that it is a prefix of.
        end = int(self.layout.lo[children.start]) if children else hi
        return self.layout.order[lo:end]

    def tokens_below(self, node: int) -> npt.NDArray[np.int32]:
        """The tokens that begin with a node's prefix, in sorted order; read-only."""
        lo, hi = self.interval(node)
        return self.layout.order[lo:hi]

    def _checked(self, node: int) -> int:
        node = operator.index(node)
        if not 0 <= node < self.layout.n_nodes:
            raise IndexError(
                f"no node {node}; the trie's nodes are 0 to {self.layout.n_nodes - 1}"
            )
        return node

    def _code(self, letter: Any) -> int | None:
        if isinstance(letter, int | np.integer) and 0 <= letter < FIRST_OBJECT:
            return int(letter)
        return self._code_of.get(letter)
