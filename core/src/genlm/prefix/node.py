"""Nodes of the prefix tree and the slots of the KV storage that their tokens occupy.

A slot is the place of one token's keys and values in every layer. This module handles only
numbers and does not depend on torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]

SCRATCH_SLOT = 0
"""Slot to which recomputed tokens write, so that cached values are not overwritten; never
allocated."""

_NO_SLOTS: Slots = np.empty(0, np.int64)


def slots_within(budget_bytes: int, bytes_per_token: int) -> int:
    """Return the number of slots within a budget, including the scratch slot."""
    return budget_bytes // bytes_per_token


class FreeSlots:
    """The free slots among `1 ... capacity`; the last freed slots are allocated first.

    Slots that were freed together are allocated together, so the slots of long prompts are
    mostly contiguous, and attention reads them without gathering.
    """

    def __init__(self, capacity: int) -> None:
        self._slots: Slots = np.arange(1, capacity + 1)
        self._first = 0

    def __len__(self) -> int:
        return len(self._slots) - self._first

    def allocate(self, count: int) -> Slots:
        """Allocate `count` slots; at least as many must be free."""
        first, self._first = self._first, self._first + count
        assert self._first <= len(self._slots)  # noqa: S101 - our own mistake
        return self._slots[first : self._first].copy()

    def free(self, slots: Slots) -> None:
        """Free slots that were allocated."""
        end, self._first = self._first, self._first - len(slots)
        self._slots[self._first : end] = slots

    def numbers(self) -> set[int]:
        """Return the free slots, for tests and statistics."""
        return set(self._slots[self._first :].tolist())


class Node:
    """The edge from its parent: tokens `start ... end - 1` of every sequence through it.

    Attributes:
        tokens: At least one token, except in a root. Extended in place, in time that does not
            depend on their number.
        slots: One slot per token; a token keeps its slot while it is cached.
        start: Position of the first token in its sequences.
        parent: None in a root and in nodes removed from the tree.
        children: Children by their first token.
        computed: Number of tokens that have keys and values; the others are uncached.
        pinned: Number of users of the node; a node with users is not evicted.
        cuts: Number of times that tokens were removed from its end.
    """

    __slots__ = (
        *("children", "computed", "cuts", "parent", "pinned", "slots", "start", "tokens"),
    )

    def __init__(
        self, tokens: list[int], slots: Slots, start: int, parent: Node | None
    ) -> None:
        self.tokens = tokens
        self.slots = slots
        self.start = start
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.computed = 0
        self.pinned = 0
        self.cuts = 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    def split(self, length: int) -> Node:
        """Move the first `length` tokens into a new parent of this node; return the parent.

        This node keeps its children and the remaining tokens; no token changes its slot.
        """
        assert self.parent is not None  # noqa: S101 - our own mistake
        upper = Node(self.tokens[:length], self.slots[:length], self.start, self.parent)
        upper.computed = min(self.computed, length)
        upper.pinned = self.pinned
        self.parent.children[self.tokens[0]] = upper
        self.tokens, self.slots = self.tokens[length:], self.slots[length:]
        self.start += length
        self.computed = max(0, self.computed - length)
        self.parent = upper
        upper.children[self.tokens[0]] = self
        return upper

    def cut(self, length: int) -> Slots:
        """Remove all but the first `length` tokens and return the slots of the removed ones.

        A node without tokens is removed from the tree. The node must not have children.
        """
        assert not self.children  # noqa: S101 - our own mistake
        freed = self.slots[length:]
        self.cuts += 1
        if length:
            self.tokens, self.slots = self.tokens[:length], self.slots[:length]
            self.computed = min(self.computed, length)
        else:
            assert self.parent is not None  # noqa: S101 - our own mistake
            del self.parent.children[self.tokens[0]]
            self.parent = None
            # Stored places may still refer to removed nodes.
            self.tokens, self.slots = [], _NO_SLOTS
        return freed

    def at(self, position: int) -> Node:
        """Return the node that contains a token of the path to this node's end."""
        node = self
        while node.start > position:
            assert node.parent is not None  # noqa: S101 - our own mistake
            node = node.parent
        return node

    def computed_slots(self, first: int, end: int) -> set[int]:
        """Return the slots of the computed tokens among `first ... end - 1`."""
        slots: set[int] = set()
        node: Node | None = self
        while node is not None and end > first:
            start, last = node.start, min(node.computed, end - node.start)
            slots.update(node.slots[max(0, first - start) : last].tolist())
            node, end = node.parent, min(end, start)
        return slots

    def descendants(self) -> Iterator[Node]:
        """Yield all descendants, parents before children."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Paths:
    """Slots of whole sequences of a tree, whose nodes may only be split meanwhile.

    After many resampling steps a sequence has a node for every few tokens, and sequences share
    most of them; each shared node is visited once.
    """

    def __init__(self) -> None:
        self._known: dict[Node, Slots] = {}  # up to the end of nodes with children

    def slots(self, node: Node, end: int) -> Slots:
        """Return the slots of the tokens `0 ... end - 1` on the path to a node's end.

        The result must not be changed.
        """
        new: list[Node] = []
        ancestor: Node | None = node
        while ancestor is not None and ancestor not in self._known:
            new.append(ancestor)
            ancestor = ancestor.parent
        known = _NO_SLOTS if ancestor is None else self._known[ancestor]
        slots: Slots = np.concatenate([known, *(item.slots for item in reversed(new))])
        self._known |= {item: slots[: item.end] for item in new if item.children}
        return slots[:end]
