"""`Tables`: the block tables of generations, and the eviction of their slots."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from genlm.core.queries.generations import Generation, Integers64, Lineage
from genlm.core.queries.query import GroupQuery
from genlm.core.queries.sequence import TokenSequence
from genlm.prefix.block_table import BlockTable, SlotReferences
from genlm.prefix.node import SCRATCH_SLOT
from genlm.prefix.tree import PrefixTree

_MAX_EXTENDED_BYTES = 2**26
"""Maximum memory of the tables of generations that were extended, except for recent ones. If a
program keeps the populations of all steps of a filter, the memory of all of their tables is
quadratic in the number of steps."""

_RECENT = 4
"""Number of tables used last, which are not evicted to limit the memory."""


class Tables:
    """The block tables of generations, least recently used first.

    The slots of a row belong to the tree up to the last one that is pinned there, and to the
    tables after it. Tables are released when their generation is dropped, on any thread: the
    next call of `collect` on the engine's thread frees their slots. When the tree lacks slots,
    it evicts its nodes first, then the last tokens of rows, then tables. Rows without their
    last tokens are continued like rows that were extended by several tokens. Tables of
    generations that were extended are also evicted to limit their memory.

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
        self._extended_bytes = 0
        # Adapter and sequence of each pinned sequence, by its last slot.
        self._pinned: dict[int, tuple[str | None, TokenSequence]] = {}
        self._dropped: deque[int] = deque()

    def drop(self, adapter: str) -> None:
        """Release the tables of an adapter, before the tree drops its tokens."""
        self._remove(*(key for key, one in [*self._entries.items()] if one.adapter == adapter))

    def collect(self) -> None:
        """Free the slots of tables whose generations were dropped."""
        if self._dropped:
            self._remove(*(self._dropped.popleft() for _ in range(len(self._dropped))))

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
        rows = lineage.origins(np.arange(len(lineage)), base.lineage)
        table = entry.table.select(rows)
        self.store(group, table)
        return table

    def get(self, group: GroupQuery) -> BlockTable:
        """Return the table of a generation for which `find` has returned one."""
        return self._entries[group.generation.state.key].table

    def find_longer(self, parts: Sequence[tuple[GroupQuery, Integers64]]) -> list[bool]:
        """Return whether other tables may have more tokens of rows, for each group.

        Args:
            parts: Groups of one adapter, with tables, and rows that are extended by several
                tokens, at least one.
        """
        adapter = parts[0][0].adapter
        tables = {
            k: entry.table for k, entry in self._entries.items() if entry.adapter == adapter
        }
        keys = np.fromiter(tables, np.int64, len(tables))
        firsts = np.array([table.first for table in tables.values()])
        longest = np.array([table.tokens.max(initial=0) for table in tables.values()])
        may_share = firsts == SCRATCH_SLOT
        found = []
        for group, rows in parts:
            key = group.generation.state.key
            table = tables[key]
            is_other = (longest > table.tokens[rows].min()) & (keys != key)
            if table.first != SCRATCH_SLOT:
                is_other &= may_share | (firsts == table.first)
            found.append(bool(is_other.any()))
        return found

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
            if previous is not None and base is not None and not previous.is_extended:
                self._entries[base.key] = previous._replace(is_extended=True)
                self._extended_bytes += previous.nbytes
            reference = _Reference(next(self._keys), self._dropped)
            generation.keep(reference)
        else:
            self._remove(reference.key)
        is_cut = previous is not None and previous.is_cut
        entry = _Entry(group.adapter, table, generation.lineage, is_cut)
        self._entries[reference.key] = entry
        self._limit_extended()

    def pin(self, adapter: str | None, sequence: TokenSequence, slot: int) -> None:
        """Pin a sequence that the tree contains, which ends in `slot`."""
        if slot not in self._pinned:
            self._tree.pin(adapter, sequence)
            self._pinned[slot] = adapter, sequence
            self.references.parents[slot] = SCRATCH_SLOT

    def share(self, generation: Generation) -> None:
        """Add the tokens of a generation's table to the tree, where other requests find them.

        Slots that rows refer to remain pinned. Rows of which the tree has other slots are
        not added.
        """
        reference = _reference(generation)
        if reference is not None and reference.key in self._entries:
            self._share(self._entries[reference.key])

    def share_prefixes(self, adapter: str | None, sequences: Sequence[TokenSequence]) -> None:
        """Share the tables that contain tokens of sequences which the tree lacks.

        At most as many rows are searched as the tree lacks tokens, the newest tables first.
        """
        self.collect()
        lacking = self._lacking(adapter, sequences) if self._entries else []
        limit = sum(len(sequence) - 1 - count for sequence, count in lacking)
        for entry in reversed([*self._entries.values()]):
            if limit <= 0:
                break
            if entry.adapter != adapter or len(entry.table) > limit:
                continue
            limit -= len(entry.table)
            keys: dict[int, set[bytes]] = {}  # by the number of tokens
            rows = np.flatnonzero(entry.table.tokens)
            ends = entry.table.tokens[rows].tolist()
            for row_sequence, end in zip(entry.lineage.sequences(rows), ends, strict=True):
                keys.setdefault(end, set()).add(row_sequence.prefix_key(end))
            if any(
                count < end <= len(sequence) and sequence.prefix_key(end) in keys[end]
                for sequence, count in lacking
                for end in keys
            ):
                self._share(entry)
                lacking = self._lacking(adapter, sequences)

    def evict(self, count: int) -> bool:
        """Free slots of tables that the current pass does not use, of the oldest table first.

        Args:
            count: Number of slots that are needed. If fewer are freed, this method may be
                called again.

        Returns:
            False if there are no such slots.
        """
        if self._dropped:  # since a thread dropped a population after the last `collect`
            self.collect()
            return True
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
        self._remove(key)
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
        entry = self._entries[key]
        table, lineage = entry.table, entry.lineage
        references, last = self.references, table.last
        may_be_cut = references.parents[last] != SCRATCH_SLOT
        may_be_cut[self.in_use.get(key, [])] = False
        rows = np.flatnonzero(may_be_cut)[::-1]
        rows = rows[np.argsort((table.tokens < lineage.lengths)[rows], kind="stable")]
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
        self._entries[key] = entry._replace(table=table, is_cut=entry.is_cut or len(freed) > 0)
        self._tree.free(freed)
        self._tree.tokens_evicted += len(freed)
        return len(freed)

    def _lacking(
        self, adapter: str | None, sequences: Sequence[TokenSequence]
    ) -> list[tuple[TokenSequence, int]]:
        """Return the sequences of which the tree lacks more than the last token.

        Each has the number of its tokens that the tree contains.
        """
        counts = [self._tree.match(adapter, sequence)[1] for sequence in sequences]
        pairs = zip(sequences, counts, strict=True)
        return [(sequence, count) for sequence, count in pairs if count < len(sequence) - 1]

    def _share(self, entry: _Entry) -> None:
        adapter, table, lineage = entry.adapter, entry.table, entry.lineage
        references, tree = self.references, self._tree
        counts = table.tokens.tolist()
        for row, sequence in enumerate(lineage.sequences(np.arange(len(table)))):
            node, first = match = tree.match(adapter, sequence)
            if first >= counts[row]:
                continue
            path = np.concatenate([table.trunk, table.slots[row, : table.lengths[row]]])
            before = int(path[first - 1]) if first else SCRATCH_SLOT
            if first and node.slots[first - 1 - node.start] != before:
                continue
            slots = path[first:]
            tree.add_computed(adapter, sequence, match, slots)
            references.disconnect(slots)
            for place in references.counts[slots].nonzero()[0].tolist():
                self.pin(adapter, sequence.prefix(first + place + 1), int(slots[place]))
            if not references.counts[before]:
                tree.unpin(*self._pinned.pop(before))

    def _limit_extended(self) -> None:
        """Evict tables of extended generations, the oldest first, down to the limit."""
        if self._extended_bytes <= _MAX_EXTENDED_BYTES:
            return
        for key, entry in [*self._entries.items()][:-_RECENT]:
            if entry.is_extended and key not in self.in_use and key not in self.pending:
                self._remove(key)
                if self._extended_bytes <= _MAX_EXTENDED_BYTES:
                    return

    def _remove(self, *keys: int) -> None:
        """Remove tables that exist; free slots that neither the tree nor other tables have."""
        entries = [self._entries.pop(key) for key in keys if key in self._entries]
        if not entries:
            return
        self._extended_bytes -= sum(entry.nbytes * entry.is_extended for entry in entries)
        freed = self.references.release(np.concatenate([entry.table.last for entry in entries]))
        roots = freed[self.references.parents[freed] == SCRATCH_SLOT].tolist()
        pinned = [slot for slot in roots if slot in self._pinned]
        for slot in pinned:
            self._tree.unpin(*self._pinned.pop(slot))
        self._tree.free(freed[~np.isin(freed, pinned)] if pinned else freed)


class _Entry(NamedTuple):
    """A table.

    Attributes:
        adapter: The adapter.
        table: The slots.
        lineage: The sequences.
        is_cut: Whether last tokens of rows were evicted.
        is_extended: Whether a generation with a table extends this one.
    """

    adapter: str | None
    table: BlockTable
    lineage: Lineage
    is_cut: bool
    is_extended: bool = False

    @property
    def nbytes(self) -> int:
        """Memory of the slots."""
        return self.table.slots.nbytes


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
