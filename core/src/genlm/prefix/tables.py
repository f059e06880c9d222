"""`Tables`: the block tables of generations, and the eviction of their slots."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from genlm.core.queries.generations import Generation, Integers64
from genlm.core.queries.query import GroupQuery
from genlm.core.queries.sequence import TokenSequence
from genlm.prefix.block_table import BlockTable, SlotReferences
from genlm.prefix.node import SCRATCH_SLOT, Slots
from genlm.prefix.tree import OutOfSlotsError, PrefixTree


class Tables:
    """The block tables of generations, least recently used first.

    Tables are released when their generation is dropped, on any thread: the next call of
    `collect` on the engine's thread frees their slots. When the tree lacks slots, it evicts its
    nodes first, then the last tokens of rows, then tables. Rows without their last tokens are
    continued like rows that were extended by several tokens.

    Args:
        tree: Tree that provides slots and contains the first sequences of populations.

    Attributes:
        references: Reference counts of the slots.
        in_use: Rows that the current pass uses and that are not evicted, by the key of their
            table.
        pending: Keys of tables that are removed after all others, even if their rows have no
            last tokens any more.
    """

    # Unique in the process: a generation may outlive the engine that has its table.
    _keys = itertools.count()

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.clear()
        tree.evict_others = self.evict

    def clear(self) -> None:
        """Remove all tables, before the tree is cleared."""
        self.references = SlotReferences(self._tree.capacity)
        self.in_use: dict[int, Integers64] = {}
        self.pending: frozenset[int] = frozenset()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        # Adapter and sequence of each pinned first sequence, by its last slot.
        self._pinned: dict[int, tuple[str | None, TokenSequence]] = {}
        self._dropped: deque[int] = deque()

    def drop(self, adapter: str) -> None:
        """Release the tables of an adapter, before the tree drops its tokens."""
        for key in [key for key, entry in self._entries.items() if entry.adapter == adapter]:
            self._free(self._entries.pop(key).table)

    def collect(self) -> None:
        """Free the slots of tables whose generations were dropped."""
        while self._dropped:
            entry = self._entries.pop(self._dropped.popleft(), None)
            if entry is not None:
                self._free(entry.table)

    def find(self, group: GroupQuery) -> BlockTable | None:
        """Return the table of a generation, or a selection of that of its base, or None."""
        generation, lineage = group.generation, group.generation.lineage
        base = generation.root
        reference = _reference(base)
        entry = None if reference is None else self._entries.get(reference.key)
        if reference is None or entry is None or entry.adapter != group.adapter:
            return None
        self._entries.move_to_end(reference.key)
        if base is generation:
            return entry.table
        rows = lineage.suffixes(np.arange(len(lineage)), base.lineage).places
        table = entry.table.select(rows)
        self.store(group, table)
        return table

    def get(self, group: GroupQuery) -> BlockTable:
        """Return the table of a generation that has had one.

        Raises:
            OutOfSlotsError: It was evicted.
        """
        entry = self._entries.get(group.generation.state.key)
        if entry is None:
            raise OutOfSlotsError("the table of a population was evicted for another one")
        return entry.table

    def expect(self, groups: Iterable[GroupQuery]) -> None:
        """Set `pending` to the tables of groups."""
        references = (_reference(group.generation.root) for group in groups)
        self.pending = frozenset(one.key for one in references if one is not None)

    def is_cut(self, group: GroupQuery) -> bool:
        """Whether last tokens of rows of a table, or of its base, were evicted."""
        return self._entries[group.generation.state.key].is_cut

    def store(self, group: GroupQuery, table: BlockTable) -> None:
        """Store the table of a generation, in place of its current one."""
        self.references.add(table.last)
        generation = group.generation
        reference, base = _reference(generation), _reference(generation.root)
        previous = None if base is None else self._entries.get(base.key)
        if reference is None or previous is None:
            reference = _Reference(next(self._keys), self._dropped)
            generation.keep(reference)
        else:
            self._free(previous.table)
        lengths, is_cut = generation.lineage.lengths, previous is not None and previous.is_cut
        self._entries[reference.key] = _Entry(group.adapter, table, lengths, is_cut)

    def pin(self, adapter: str | None, sequence: TokenSequence, slot: int) -> None:
        """Pin a first sequence, which the tree contains and which ends in `slot`."""
        if slot not in self._pinned:
            self._tree.pin(adapter, sequence)
            self._pinned[slot] = adapter, sequence
            self.references.parents[slot] = SCRATCH_SLOT

    def remove(self, generation: Generation) -> tuple[BlockTable, Slots] | None:
        """Remove the table of a generation.

        Returns:
            The table, and its slots that belong to no other table or the tree; they are the
            caller's. None if the generation has no table.
        """
        reference = _reference(generation)
        entry = None if reference is None else self._entries.pop(reference.key, None)
        return None if entry is None else (entry.table, self._released(entry.table))

    def evict(self, count: int) -> bool:
        """Free slots of tables that the current pass does not use, of the oldest table first.

        Args:
            count: Number of slots that are needed. If fewer are freed, this method may be
                called again.

        Returns:
            False if there are no such slots.
        """
        self.collect()
        unused = [key for key in self._entries if key not in self.in_use]
        for key in list(self._entries):
            if self._cut(key, count):
                return True
            if key in unused and key not in self.pending:
                break
        else:
            if not unused:
                return False
            key = unused[0]
        self._free(self._entries.pop(key).table)
        return True

    def _cut(self, key: int, count: int) -> int:
        """Free the last tokens of rows of a table that no other row contains.

        Rows whose last token is cached are cut before the others, which the current step has
        yet to compute.

        Args:
            key: Key of the table.
            count: Number of slots to free at least, if the table has as many.

        Returns:
            The number of slots that were freed.
        """
        adapter, table, lengths, is_cut = self._entries[key]
        references, last = self.references, table.last
        may_be_cut = references.parents[last] != SCRATCH_SLOT
        may_be_cut[self.in_use.get(key, [])] = False
        rows = np.flatnonzero(may_be_cut)[::-1]
        rows = rows[np.argsort((table.tokens < lengths)[rows], kind="stable")]
        roots = np.fromiter(self._pinned, np.int64, len(self._pinned))
        references.add(roots)  # they belong to the tree
        freed, end, size = np.empty(0, np.int64), 0, 1
        while len(freed) < count and end < len(rows):
            released = references.release(last[rows[end : end + size]])
            freed, end = np.concatenate([freed, released]), end + size
            size = min(2 * size, 1 + (count - len(freed)) * end // max(1, len(freed)))
        table = table.without(freed, rows[:end])
        references.add(table.last[rows[:end]])
        references.release(roots)
        self._entries[key] = _Entry(adapter, table, lengths, is_cut or len(freed) > 0)
        self._tree.free(freed)
        self._tree.tokens_evicted += len(freed)
        return len(freed)

    def _free(self, table: BlockTable) -> None:
        """Free the slots of a table that no other table refers to."""
        self._tree.free(self._released(table))

    def _released(self, table: BlockTable) -> Slots:
        """Release a table, and return the slots to free, which belong to no other table.

        Those of first sequences belong to the tree, where they are unpinned.
        """
        freed = self.references.release(table.last)
        roots = freed[self.references.parents[freed] == SCRATCH_SLOT].tolist()
        pinned = [slot for slot in roots if slot in self._pinned]
        for slot in pinned:
            self._tree.unpin(*self._pinned.pop(slot))
        return freed[~np.isin(freed, pinned)] if pinned else freed


class _Entry(NamedTuple):
    """A table, its adapter, the length of each sequence, and whether rows were cut."""

    adapter: str | None
    table: BlockTable
    lengths: Integers64
    is_cut: bool


class _Reference:
    """A generation's reference to its table, which is released when the generation is dropped.

    Generations may be dropped on any thread, and during garbage collections in other calls.
    """

    __slots__ = ("_dropped", "key")

    def __init__(self, key: int, dropped: deque[int]) -> None:
        self.key, self._dropped = key, dropped

    def __del__(self) -> None:
        self._dropped.append(self.key)


def _reference(generation: Generation) -> _Reference | None:
    """Return the reference of a generation to its table, None if it has none."""
    state = generation.state
    return state if isinstance(state, _Reference) else None
