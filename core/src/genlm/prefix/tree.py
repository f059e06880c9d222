"""The prefix tree: a map from the tokens of sequences to slots.

There is one radix tree over token ids per adapter; all share the same slots. The tree works in
batches: `insert` finds or allocates the slots of sequences, the caller computes the uncached
tokens, and `commit` or `roll_back` ends the batch. This module does not depend on torch, models
or queries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from genlm.core.queries.sequence import TokenSequence
from genlm.prefix.node import FreeSlots, Node, Slots

_MAX_PLACES = 2**14
"""Maximum number of stored places of sequences, in trees with at least as many slots: half a
kilobyte per place."""

_TOKENS_PER_PLACE = 128
"""Number of tokens of a sequence for each place that is looked up: matching as many takes five
times as long."""

# At least this fraction, a quarter, of a leaf is evicted at once, so that eviction costs O(1)
# per slot.
_EVICTED_FRACTION = 4

_START = attrgetter("start")


_Place = tuple[Node, int, int]
"""A node on whose path a sequence ends, its `cuts` at that time, and the sequence length.

The path contains the sequence as long as the node is not cut: other operations only split it.
"""


class End(NamedTuple):
    """The last tokens of a sequence in the tree.

    Attributes:
        node: Node from `insert`.
        first: Position of the first of these tokens.
        length: Number of tokens of the sequence.
    """

    node: Node
    first: int
    length: int


class OutOfSlotsError(RuntimeError):
    """Too few slots: the others are pinned or in use by the current batch."""


class PrefixTree:
    """Sequences with shared prefixes, in at most `capacity` slots.

    Least recently used tokens are evicted when slots are needed, ends of sequences
    first; tokens that are pinned or in use by the current batch are not evicted.

    Invariants: each slot is free or belongs to exactly one token of the tree, and a
    token keeps its slot for as long as it is in the tree. Between batches every token
    of the tree is computed.

    Args:
        capacity: Number of slots.

    Attributes:
        capacity: As above.
        tokens_evicted: Number of tokens that were evicted.
        times_cleared: Number of calls of `clear`.
        uncached_tokens: Number of tokens that the current batch must compute.
        evict_others: Function that frees about as many slots returned by `allocate` as its
            argument, called only before a batch has new tokens; returns False if there are no
            such slots.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evict_others: Callable[[int], bool] = lambda _: False
        self.tokens_evicted = self.times_cleared = 0
        self._max_places = min(_MAX_PLACES, capacity)
        self._reset()

    def _reset(self) -> None:
        self._free = FreeSlots(self.capacity)
        self._roots: dict[str | None, Node] = {}
        # Nodes that may be evicted, least recently used first. Descendants precede
        # their ancestors, so the first is always a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._idle_slots = 0
        self._in_use: set[Node] = set()
        # In the order of `insert`, so that equal batches are computed in equal order.
        self._uncached: dict[Node, None] = {}
        self.uncached_tokens = 0
        self._places: OrderedDict[tuple[str | None, bytes], _Place] = OrderedDict()

    @property
    def slots_used(self) -> int:
        """Number of tokens in the tree."""
        return self.capacity - len(self._free)

    @property
    def available(self) -> int:
        """Number of slots that are free or contain idle tokens of the tree."""
        return len(self._free) + self._idle_slots

    # -- a batch ----------------------------------------------------------------------

    def insert(
        self, adapter: str | None, tokens: TokenSequence, match: tuple[Node, int] | None = None
    ) -> Node:
        """Add a sequence to the tree and to the current batch.

        Tokens after a sequence that was inserted before are added without reading the tokens
        before them.

        Args:
            adapter: Adapter of the sequence.
            tokens: The sequence.
            match: The result of `match` for the sequence, if the caller has it.

        Returns:
            The node that contains the last token; after later splits, a node with the token on
            the path to it.

        Raises:
            OutOfSlotsError: All other slots are pinned or in use. No token of the sequence is
                added to the tree.
        """
        node, length = match or self.match(adapter, tokens)
        if length < min(node.end, len(tokens)):
            node = self._split(node, length - node.start)
        self._use_path(node)
        if length < len(tokens):
            node = self._extend(node, list(tokens.ids_from(length)))
        self._store_place(adapter, tokens.key, node, len(tokens))
        return node

    def match(self, adapter: str | None, tokens: TokenSequence) -> tuple[Node, int]:
        """Find the longest beginning of a sequence in the tree.

        Returns:
            The node that contains its last token, and its number of tokens.
        """
        node, first = self._start_of_match(adapter, tokens)
        matched, length = first, len(tokens)
        suffix, edge = list(tokens.ids_from(first)), node.tokens[first - node.start :]
        while matched < length:
            begin = matched - first
            if suffix[begin : begin + len(edge)] != edge:
                return node, matched + _common_length(edge, suffix[begin:])
            matched += len(edge)
            child = node.children.get(suffix[matched - first]) if matched < length else None
            if child is None:
                break
            node, edge = child, child.tokens
        return node, matched

    def followers(self, adapter: str | None, tokens: TokenSequence) -> list[int]:
        """Return the token ids that follow a sequence in the tree; none if it is not there."""
        node, length = self.match(adapter, tokens)
        if length < len(tokens):
            return []
        return list(node.children) if length == node.end else [node.tokens[length - node.start]]

    def missing(self, adapter: str | None, tokens: TokenSequence) -> int:
        """Return the number of tokens at the end of a sequence that are not in the tree."""
        return len(tokens) - self.match(adapter, tokens)[1]

    def find(self, adapter: str | None, tokens: TokenSequence) -> Node:
        """Return the node that contains the last token of a sequence in the tree."""
        return self.match(adapter, tokens)[0]

    def uncached(self) -> Sequence[Node]:
        """Return the nodes with tokens to compute, ancestors before descendants."""
        return sorted(self._uncached, key=_START)

    def commit(self, ends: Iterable[End] = ()) -> None:
        """End the batch: its uncached tokens are computed, and all its tokens may be evicted.

        Args:
            ends: Ends of sequences of the batch that are evicted before all other tokens,
                unless other sequences continue them.
        """
        for node in self._uncached:
            node.computed = len(node.tokens)
        self._uncached.clear()
        self.uncached_tokens = 0
        nodes = {node for end in ends for node in self._nodes_of(end)}
        self._release()
        self._evict_first(nodes)

    def roll_back(self) -> None:
        """End the batch without its results: remove its uncached tokens from the tree."""
        for node in sorted(self._uncached, key=_START, reverse=True):
            self._free.free(node.cut(node.computed))
            if not node.tokens:
                self._in_use.discard(node)
        self._uncached.clear()
        self.uncached_tokens = 0
        self._release()

    # -- between batches --------------------------------------------------------------

    def pin(self, adapter: str | None, tokens: TokenSequence) -> None:
        """Pin a sequence of the tree until as many calls of `unpin`, or `clear`."""
        node: Node | None = self.find(adapter, tokens)
        assert node is not None  # noqa: S101 - our own mistake
        if len(tokens) < node.end:
            node = self._split(node, len(tokens) - node.start)
        while node is not None and node.parent is not None:
            self._set_idle(node, idle=False)
            node.pinned += 1
            node = node.parent

    def release(self, adapter: str | None, key: bytes) -> None:
        """Evict the end of a sequence before all other tokens, unless a sequence continues it.

        Args:
            adapter: Adapter of the sequence.
            key: Key of the sequence that was inserted.
        """
        place = self._places.pop((adapter, key), None)
        if place is None:
            return
        node, cuts, length = place
        is_end = node.cuts == cuts and node.end == length and not node.children
        if is_end and node in self._idle:
            self._idle.move_to_end(node, last=False)

    def drop(self, adapter: str | None) -> None:
        """Remove all tokens of an adapter, pinned ones included. Call this between batches."""
        assert not self._in_use  # noqa: S101 - our own mistake
        root = self._roots.pop(adapter, None)
        nodes = [] if root is None else list(root.descendants())
        for node in reversed(nodes):  # children before parents
            self._set_idle(node, idle=False)
            self._free.free(node.cut(0))

    def unpin(self, adapter: str | None, tokens: TokenSequence) -> None:
        """Undo a call of `pin`."""
        node: Node | None = self.find(adapter, tokens)
        while node is not None and node.parent is not None:
            node.pinned -= 1
            if not node.pinned and node not in self._in_use:
                self._set_idle(node, idle=True)
            node = node.parent

    def allocate(self, count: int) -> Slots:
        """Allocate slots outside the tree; idle tokens are evicted if necessary.

        Raises:
            OutOfSlotsError: All other slots are pinned or in use; nothing is evicted.
        """
        while (lacking := count - len(self._free)) > self._idle_slots:
            if self._uncached or not self.evict_others(lacking - self._idle_slots):
                raise OutOfSlotsError(
                    f"{count} slots requested; {len(self._free)} of {self.capacity} are free "
                    f"and {self._idle_slots} can be evicted"
                )
        while lacking > 0:
            lacking -= self._evict(lacking)
        return self._free.allocate(count)

    def add_computed(
        self,
        adapter: str | None,
        tokens: TokenSequence,
        match: tuple[Node, int],
        slots: Slots,
    ) -> None:
        """Add tokens that were computed outside the tree. Call this between batches.

        Args:
            adapter: Adapter of the sequence.
            tokens: The sequence.
            match: The result of `match` for the sequence, which ends before slots of it. The
                tokens up to there, if any, are pinned.
            slots: Slots of the next tokens of the sequence, at least one, from `allocate`; they
                then belong to the tree.
        """
        node, length = match
        assert length == node.end  # noqa: S101 - the caller has pinned the sequence up to there
        ids = list(tokens.ids_from(length)[: len(slots)])
        child = Node(ids, slots, length, node)
        child.computed = len(ids)
        node.children[ids[0]] = child
        self._store_place(adapter, tokens.prefix_key(child.end), child, child.end)
        self._set_idle(child, idle=True)  # its ancestors are pinned

    def free(self, slots: Slots) -> None:
        """Free slots that `allocate` returned."""
        self._free.free(slots)

    def clear(self) -> None:
        """Remove all tokens, pinned ones included. Call this between batches only."""
        assert not self._in_use  # noqa: S101 - our own mistake
        self.times_cleared += 1
        self._reset()

    # -- internals --------------------------------------------------------------------

    def _start_of_match(self, adapter: str | None, tokens: TokenSequence) -> tuple[Node, int]:
        """Return a node and the position up to which its path contains the tokens.

        The tree stores the places of inserted sequences. The start is the place of the longest
        beginning that has one, among those that lack few of the tokens; for other sequences it
        is the root.
        """
        length = len(tokens)
        for end in range(length, max(0, length - 2 - length // _TOKENS_PER_PLACE), -1):
            node = self._end_of((adapter, tokens.prefix_key(end)))
            if node is not None:
                return node, end
        return self._root(adapter), 0

    def _end_of(self, key: tuple[str | None, bytes]) -> Node | None:
        """Return the node at the stored place of a sequence, None without a valid place."""
        place = self._places.get(key)
        if place is None:
            return None
        node, cuts, length = place
        return node.at(length - 1) if node.cuts == cuts else None

    def _store_place(
        self, adapter: str | None, sequence_key: bytes, node: Node, length: int
    ) -> None:
        """Store the node that contains the last token of a sequence."""
        key = (adapter, sequence_key)
        self._places[key] = (node, node.cuts, length)
        self._places.move_to_end(key)
        if len(self._places) > self._max_places:
            self._places.popitem(last=False)

    def _use_path(self, node: Node | None) -> None:
        """Mark a node and its ancestors as in use."""
        while node is not None and node.parent is not None and node not in self._in_use:
            self._in_use.add(node)
            self._set_idle(node, idle=False)
            node = node.parent

    def _set_idle(self, node: Node, *, idle: bool) -> None:
        """Permit or prevent the eviction of a node."""
        if idle and node not in self._idle:
            self._idle[node] = None
            self._idle_slots += len(node.slots)
        elif not idle and node in self._idle:
            del self._idle[node]
            self._idle_slots -= len(node.slots)

    def _root(self, adapter: str | None) -> Node:
        root = self._roots.get(adapter)
        if root is None:
            root = self._roots[adapter] = Node([], np.empty(0, np.int64), 0, None)
        return root

    def _release(self) -> None:
        for node in sorted(self._in_use, key=_START, reverse=True):
            if not node.pinned:
                self._set_idle(node, idle=True)
        self._in_use.clear()

    def _nodes_of(self, end: End) -> list[Node]:
        """Return the nodes of the current batch that contain the end of a sequence.

        The list is empty if the last token is within a node, whose later tokens continue it.
        """
        node: Node | None = end.node.at(end.length - 1)
        assert node is not None  # noqa: S101 - our own mistake
        nodes = []
        if node.end == end.length:
            while node is not None and node.end > end.first:
                if node.start < end.first:
                    self._split(node, end.first - node.start)
                nodes.append(node)
                node = node.parent
        return nodes

    def _evict_first(self, nodes: set[Node]) -> None:
        """Evict those of the nodes first that have no descendants outside of them."""
        evictable: set[Node] = set()
        for node in sorted(nodes, key=_START, reverse=True):
            if node in self._idle and evictable.issuperset(node.children.values()):
                evictable.add(node)
        for node in sorted(evictable, key=_START):  # descendants precede their ancestors
            self._idle.move_to_end(node, last=False)

    def _extend(self, node: Node, tokens: list[int]) -> Node:
        slots = self.allocate(len(tokens))
        if node.children or node.pinned or node.parent is None:
            child = Node(tokens, slots, node.end, node)
            node.children[tokens[0]] = child
            self._in_use.add(child)
            node = child
        else:
            node.tokens += tokens
            node.slots = np.concatenate((node.slots, slots))
        self._uncached[node] = None
        self.uncached_tokens += len(tokens)
        return node

    def _split(self, node: Node, length: int) -> Node:
        upper = node.split(length)
        if node in self._in_use:
            self._in_use.add(upper)
        elif node in self._idle:  # the upper part is about to be used or pinned
            self._idle_slots -= length
        if upper.computed < length:
            self._uncached[upper] = None
        return upper

    def _evict(self, count: int) -> int:
        """Free at least `count` slots or a whole leaf; return the number of freed slots."""
        leaf = next(iter(self._idle))
        length = len(leaf.slots)
        remaining = max(0, length - max(count, length // _EVICTED_FRACTION))
        if not remaining:
            del self._idle[leaf]
        freed = leaf.cut(remaining)
        self._free.free(freed)
        self._idle_slots -= len(freed)
        self.tokens_evicted += len(freed)
        return len(freed)


def _common_length(edge: list[int], tokens: list[int]) -> int:
    """Return the length of the common prefix."""
    longest = min(len(edge), len(tokens))
    return next((i for i in range(longest) if edge[i] != tokens[i]), longest)
