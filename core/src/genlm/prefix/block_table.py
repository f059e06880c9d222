"""Block tables: the slots of many sequences as arrays, and reference counts of the slots.

A row of a `BlockTable` has the slots of one sequence, in order. Slots form a tree by their
parents, so `SlotReferences` counts only the ends of rows and the children of a slot: copying a
row of any length costs one operation. This module does not depend on torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genlm.core.queries.generations import Integers64
from genlm.prefix.node import SCRATCH_SLOT, Slots

# Number of references to the scratch slot, which stands for "no slot" and is never freed.
_PERMANENT = 2**30

# 1 in the dtype of the counts: numpy is 25 times slower with another dtype.
_ONE = np.int32(1)


class SlotReferences:
    """Reference counts of slots: rows that end in a slot, and slots that continue it.

    Args:
        capacity: The largest slot.

    Attributes:
        counts: Number of references to each slot.
        parents: Slot of the previous token of each slot; `SCRATCH_SLOT` for a first token.
    """

    def __init__(self, capacity: int) -> None:
        self.counts = np.zeros(capacity + 1, np.int32)
        self.parents = np.zeros(capacity + 1, np.int32)
        self.counts[SCRATCH_SLOT] = _PERMANENT

    def add(self, slots: NDArray[np.integer]) -> None:
        """Add a reference to each slot."""
        np.add.at(self.counts, slots, _ONE)
        self.counts[SCRATCH_SLOT] = _PERMANENT

    def connect(self, slots: Slots, parents: NDArray[np.integer]) -> None:
        """Set the parents of new slots, and add references to the parents."""
        self.parents[slots] = parents
        self.add(parents)

    def disconnect(self, slots: Slots) -> None:
        """Remove the references of slots to their parents."""
        np.subtract.at(self.counts, self.parents[slots], _ONE)
        self.counts[SCRATCH_SLOT] = _PERMANENT
        self.parents[slots] = SCRATCH_SLOT

    def release(self, slots: NDArray[np.integer]) -> Slots:
        """Remove a reference to each slot.

        Returns:
            The slots without references: some of `slots`, and ancestors without other
            references.
        """
        freed = [np.empty(0, np.int64)]
        while len(slots):
            np.subtract.at(self.counts, slots, _ONE)
            self.counts[SCRATCH_SLOT] = _PERMANENT
            unused = slots[self.counts[slots] == 0]
            if not len(unused):  # most often: the next token continues the slots
                break
            freed.append(np.unique(unused))
            slots = self.parents[freed[-1]]
        return np.concatenate(freed)


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The slots of n sequences.

    Attributes:
        trunk: Common first slots of all rows. A row has further slots unless its end was freed.
        slots: The slots after the trunk, shape `(n, longest)`, int32; entries after the end of
            a row are undefined.
        lengths: Number of slots of each row after the trunk, shape `(n,)`.
    """

    trunk: Slots
    slots: NDArray[np.int32]
    lengths: Integers64

    @classmethod
    def empty(cls, count: int) -> BlockTable:
        """Return a table of rows without slots."""
        slots = np.empty((count, 0), np.int32)
        return cls(np.empty(0, np.int64), slots, np.zeros(count, np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def tokens(self) -> Integers64:
        """Number of tokens of each row that have slots, shape `(n,)`."""
        return self.lengths + len(self.trunk)

    @functools.cached_property
    def last(self) -> Slots:
        """The last slot of each row, shape `(n,)`; `SCRATCH_SLOT` for an empty row."""
        before = self.trunk[-1] if len(self.trunk) else SCRATCH_SLOT
        if not self.slots.shape[1]:
            return np.full(len(self), before)
        last: Slots = self.slots[np.arange(len(self)), self.lengths - 1].astype(np.int64)
        last[self.lengths == 0] = before
        return last

    @property
    def first(self) -> int:
        """The first slot of all rows; `SCRATCH_SLOT` if they do not have the same."""
        return int(self.trunk[0]) if len(self.trunk) else SCRATCH_SLOT

    def select(self, rows: Integers64) -> BlockTable:
        """Return a table of selected rows, possibly repeated, with the longest trunk."""
        if np.array_equal(rows, np.arange(len(self))):
            return _with_trunk(self)
        lengths = self.lengths[rows]
        longest = int(lengths.max(initial=0))
        return _with_trunk(BlockTable(self.trunk, self.slots[rows, :longest], lengths))

    def replace(self, rows: Integers64, paths: Sequence[Slots]) -> BlockTable:
        """Return the table with all slots of some rows replaced."""
        lengths, trunk = self.tokens.copy(), len(self.trunk)
        lengths[rows] = [len(path) for path in paths]
        width = trunk + self.slots.shape[1]
        slots = np.zeros((len(self), max(width, int(lengths.max()))), np.int32)
        slots[:, :trunk], slots[:, trunk:width] = self.trunk, self.slots
        for row, path in zip(rows.tolist(), paths, strict=True):
            slots[row, : len(path)] = path
        return _with_trunk(BlockTable(np.empty(0, np.int64), slots, lengths))

    def with_trunk(self, count: int) -> BlockTable:
        """Return the table with the first `count` slots of the trunk alone in the trunk."""
        rest = self.trunk[count:].astype(np.int32)
        slots = np.hstack([np.tile(rest, (len(self), 1)), self.slots])
        return BlockTable(self.trunk[:count], slots, self.lengths + len(rest))

    def without(self, freed: Slots, rows: Integers64) -> BlockTable:
        """Return the table without freed slots, which are at the ends of some rows."""
        ends, lengths = self.slots[rows], self.lengths.copy()
        is_freed = np.isin(ends, freed) & (np.arange(ends.shape[1]) < lengths[rows, None])
        lengths[rows] -= is_freed.sum(axis=1)
        return BlockTable(self.trunk[~np.isin(self.trunk, freed)], self.slots, lengths)

    def extend(
        self, rows: Integers64, slots: NDArray[np.int32], lengths: Integers64
    ) -> BlockTable:
        """Return the table with some rows replaced by longer ones, without the trunk."""
        if len(rows) == len(self):  # all of them, in order
            return BlockTable(self.trunk, slots, lengths)
        width = max(self.slots.shape[1], slots.shape[1])
        all_slots, all_lengths = np.zeros((len(self), width), np.int32), self.lengths.copy()
        all_slots[:, : self.slots.shape[1]] = self.slots
        all_slots[rows, : slots.shape[1]], all_lengths[rows] = slots, lengths
        return BlockTable(self.trunk, all_slots, all_lengths)


def joined_rows(parts: Sequence[tuple[BlockTable, Integers64]]) -> BlockTable:
    """Return rows of several tables as one table, whose trunk is that of all tables.

    Args:
        parts: Tables, and indices of their rows, ascending, without repetition.
    """
    tables = [table for table, _ in parts]
    shortest = min(len(table.trunk) for table in tables)
    trunks = np.stack([table.trunk[:shortest] for table in tables])
    differs = (trunks != trunks[0]).any(axis=0)
    common = int(differs.argmax()) if differs.any() else shortest
    ends = np.cumsum([len(rows) for _, rows in parts]).tolist()
    width = max(len(table.trunk) + table.slots.shape[1] for table in tables) - common
    slots, lengths = np.zeros((ends[-1], width), np.int32), np.empty(ends[-1], np.int64)
    begin = 0
    for (table, rows), end in zip(parts, ends, strict=True):
        rest = len(table.trunk) - common
        is_whole = len(rows) == len(table)
        own = table.slots if is_whole else table.slots[rows]
        slots[begin:end, :rest] = table.trunk[common:]
        slots[begin:end, rest : rest + own.shape[1]] = own
        lengths[begin:end] = (table.lengths if is_whole else table.lengths[rows]) + rest
        begin = end
    return BlockTable(trunks[0, :common], slots, lengths)


def _with_trunk(table: BlockTable) -> BlockTable:
    """Move the leading columns in which all rows are equal to the trunk."""
    slots, shared, width = table.slots, 0, 1
    limit = int(table.lengths.min()) - 1
    while shared < limit:
        columns = slots[:, shared : min(shared + width, limit)]
        differs = (columns != columns[0]).any(axis=0)
        if differs.any():
            shared += int(differs.argmax())
            break
        shared, width = shared + len(differs), 2 * width
    if not shared:
        return table
    trunk = np.concatenate([table.trunk, slots[0, :shared]])
    return BlockTable(trunk, slots[:, shared:], table.lengths - shared)
