"""`Populations`: next-token logits of generations from block tables.

The slots come from the pool of a prefix tree. The tree computes the first sequences of a
population and pins them while rows refer to them; their extensions have slots here, without an
object per sequence. The tree also recomputes the sequences of an evicted table. Sequences that
are no longer used as a population can be moved into the tree, where other requests find them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from genlm.core.queries.generations import NO_TOKEN, Generation, Integers64
from genlm.core.queries.query import GroupQuery
from genlm.core.queries.sequence import TokenSequence
from genlm.prefix.block_table import BlockTable, SlotReferences
from genlm.prefix.continuation import Continuation, continuation, joined
from genlm.prefix.forward import TableBatch
from genlm.prefix.node import SCRATCH_SLOT, Paths, Slots
from genlm.prefix.tree import OutOfSlotsError, PrefixTree

__all__ = ["Populations"]

RunTable = Callable[[TableBatch, str | None], torch.Tensor]
"""Function that computes a pass of an adapter; returns logits, shape `(results, width)`."""

_Part = tuple[GroupQuery, Integers64]
"""A group, and indices of rows of its table."""

_Extension = tuple[GroupQuery, Integers64, Integers64, NDArray[np.bool_]]
"""A group, rows of its table, their tokens to compute, and which of them are cached."""

# Sequences with more new tokens are computed through the tree, as prefill chunks.
_MAX_NEW_TOKENS = 32

# Number of sequences used to estimate the number of new tokens of a first generation.
_SAMPLE_SIZE = 32


class Populations:
    """The block tables of generations, least recently used first.

    Tables are released when their generation is dropped, on any thread: the next call on the
    engine's thread frees their slots. When the tree lacks slots, it evicts its nodes first,
    then the last tokens of rows, then tables. Rows without their last tokens are continued like
    rows that were extended by several tokens.

    Args:
        tree: Tree that provides slots and contains the first sequences of populations.
        max_tokens: Maximum number of tokens of a pass.
        max_rows: Maximum number of results of a pass.
    """

    # Unique in the process: a generation may outlive the engine that has its table.
    _keys = itertools.count()

    def __init__(self, tree: PrefixTree, *, max_tokens: int, max_rows: int) -> None:
        self._tree, self._max_tokens, self._max_rows = tree, max_tokens, max_rows
        self.clear()
        tree.evict_others = self.evict

    def clear(self) -> None:
        """Remove all tables, before the tree is cleared."""
        self._references = SlotReferences(self._tree.capacity)
        self._tables: OrderedDict[int, _TableEntry] = OrderedDict()
        # Adapter and sequence of each pinned first sequence, by its last slot.
        self._pinned: dict[int, tuple[str | None, TokenSequence]] = {}
        self._dropped: deque[int] = deque()
        # Rows that the current pass uses, by table.
        self._current: dict[int, Integers64] = {}

    def drop(self, adapter: str) -> None:
        """Release the tables of an adapter, before the tree drops its tokens."""
        for key in [key for key, entry in self._tables.items() if entry.adapter == adapter]:
            self._free(self._tables.pop(key).table)

    def collect(self) -> None:
        """Free the slots of tables whose generations were dropped."""
        while self._dropped:
            entry = self._tables.pop(self._dropped.popleft(), None)
            if entry is not None:
                self._free(entry.table)

    def limit(self, group: GroupQuery) -> int:
        """Return the number of sequences of a group for one pass, or about one in the tree."""
        self.collect()
        lineage, wanted = group.generation.lineage, group.wanted
        table = self._table(group)
        if table is not None:
            missing = lineage.lengths[wanted] - table.tokens[wanted]
            if table.tokens[wanted].all():
                few = np.clip(missing, 1, _MAX_NEW_TOKENS)
                tokens = np.cumsum(np.sort(few)[::-1])  # of any 1, 2, ... sequences, at most
                count = int(np.searchsorted(tokens, self._max_tokens, side="right"))
                return max(1, min(self._max_rows, count))
        sample = wanted[:: -(-len(wanted) // _SAMPLE_SIZE)].tolist()
        sequences = map(lineage.sequence, sample)
        mean = np.mean([1 + self._tree.missing(group.adapter, s) for s in sequences])
        return max(1, min(self._max_rows, int(self._max_tokens / mean)))

    def choose(self, pending: Sequence[GroupQuery]) -> Sequence[GroupQuery]:
        """Choose groups that one pass computes: the first, and others of its adapter.

        All or none of them have tables.
        """
        self.collect()
        first = pending[0]
        chosen = [first]
        has_table = self._table(first) is not None
        tokens = self._added_tokens(first, has_table=has_table)
        if tokens is None:
            return chosen
        rows = len(first.wanted)
        for group in pending[1:]:
            if group.adapter != first.adapter:
                continue
            rows += len(group.wanted)
            if rows > self._max_rows:
                break
            added = self._added_tokens(group, has_table=has_table)
            if added is None:
                continue
            tokens += added
            if tokens > self._max_tokens:
                break
            chosen.append(group)
        return chosen

    def _added_tokens(self, group: GroupQuery, *, has_table: bool) -> int | None:
        """Return the number of tokens of a pass over a group, at most.

        The result is None if the group has no table and should have one, or the reverse, or if
        its table lacks many tokens.
        """
        if has_table:
            missing = self._missing(group, group.wanted)
            return None if missing is None else int(np.maximum(missing, 1).sum())
        if self._table(group) is not None:
            return None
        sequence = group.generation.lineage.sequence
        return sum(
            max(1, self._tree.missing(group.adapter, sequence(row)))
            for row in group.wanted.tolist()
        )

    def logits(
        self, parts: Sequence[tuple[GroupQuery, Integers64]], run: RunTable
    ) -> torch.Tensor | None:
        """Compute the next-token logits of sequences of groups in one pass.

        After an exception, the state is that before the pass.

        Args:
            parts: Groups of one adapter, which is active, with different generations; and
                places of sequences in their `wanted`, at most `limit` for one group, or all
                places of groups from `choose`.
            run: Function that computes a pass.

        Returns:
            Shape `(number of places, width of the model's output)`, one group after the other.
            None if the sequences must be computed through the tree, after which `adopt` is
            called: a generation has no table, a row lacks many tokens, or the tree has too few
            slots for a single group.

        Raises:
            OutOfSlotsError: There are too few slots for several groups.
        """
        self.collect()
        selected = [(group, group.wanted[places]) for group, places in parts]
        if any(self._missing(group, rows) is None for group, rows in selected):
            return None
        try:
            return self._passes(selected, run)
        except OutOfSlotsError:
            if len(parts) > 1:
                raise
            return None

    def adopt(self, group: GroupQuery, places: Integers64) -> None:
        """Add a table with the sequences of a group that the tree contains."""
        self.collect()
        lineage, tree, adapter = group.generation.lineage, self._tree, group.adapter
        table = self._table(group)
        if table is None:
            table = BlockTable.empty(len(lineage))
        rows, slots, paths = [], [], Paths()
        for row in group.wanted[places].tolist():
            sequence = lineage.sequence(row)
            node, length = tree.match(adapter, sequence)
            if length < len(sequence):
                continue
            rows.append(row)
            slots.append(paths.slots(node, length))
            last = int(slots[-1][-1])
            if last not in self._pinned:
                tree.pin(adapter, sequence)
                self._pinned[last] = adapter, sequence
                self._references.parents[last] = SCRATCH_SLOT
        if rows:
            self._store(group, table.replace(np.array(rows, np.int64), slots))

    def move_to_tree(self, generation: Generation, adapter: str | None) -> None:
        """Move the tokens of a generation's sequences into the tree, and remove its table.

        Tokens to which rows of other tables refer are not moved.
        """
        self.collect()
        base = generation.with_state()
        if base is None or not isinstance(base.state, _TableReference):
            return
        entry = self._tables.pop(base.state.key, None)
        if entry is None:
            return
        table = entry.table
        is_free = np.zeros(self._tree.capacity + 1, bool)
        is_free[self._released(table)] = True
        for row, count in enumerate(table.tokens.tolist()):
            sequence = base.lineage.sequence(row)
            match = _, first = self._tree.match(adapter, sequence)
            path = np.concatenate([table.trunk, table.slots[row, : table.lengths[row]]])
            slots = path[first:]
            if first < count and is_free[slots].all():
                self._tree.add_computed(adapter, sequence, match, slots)
                is_free[slots] = False
        self._tree.free(np.flatnonzero(is_free))

    # -- internals --------------------------------------------------------------------

    def _missing(self, group: GroupQuery, rows: Integers64) -> Integers64 | None:
        """Return the number of tokens that each row's table lacks.

        The result is None if the tree should compute the rows: there is no table, each row lacks
        many tokens, or a row without tokens does.
        """
        table = self._table(group)
        if table is None:
            return None
        cached = table.tokens[rows]
        missing: Integers64 = group.generation.lineage.lengths[rows] - cached
        few = min(self._max_tokens, _MAX_NEW_TOKENS)
        is_long = missing > few
        return None if (is_long & (cached == 0)).any() else missing

    def _passes(self, parts: Sequence[_Part], run: RunTable) -> torch.Tensor:
        """Compute rows of groups in one pass, or in several if there are too few slots.

        Raises:
            OutOfSlotsError: There are too few slots for a row, or a table was evicted.
        """
        self._current = {group.generation.state.key: rows for group, rows in parts}
        try:
            for group, rows in parts:
                self._catch_up(group, rows, run)
            return self._pass(parts, run)
        except OutOfSlotsError:
            if len(parts) == len(parts[0][1]) == 1:
                raise
        finally:
            self._current = {}
        if len(parts) > 1:
            middle = len(parts) // 2
            logits = self._passes(parts[:middle], run).clone()  # the next pass overwrites them
            return torch.cat([logits, self._passes(parts[middle:], run)])
        [(group, rows)] = parts
        missing = group.generation.lineage.lengths[rows] - self._entry(group).table.tokens[rows]
        order = np.argsort(missing, kind="stable")
        middle = np.searchsorted(missing[order], missing.min(), side="right")
        if middle == len(rows):
            middle //= 2
        logits = self._passes([(group, rows[order[:middle]])], run).clone()
        logits = torch.cat([logits, self._passes([(group, rows[order[middle:]])], run)])
        return logits[torch.from_numpy(np.argsort(order)).to(logits.device)]

    def _catch_up(self, group: GroupQuery, rows: Integers64, run: RunTable) -> None:
        """Compute tokens of rows that lack many, until they lack few."""
        few = min(self._max_tokens, _MAX_NEW_TOKENS)
        lengths = group.generation.lineage.lengths
        while True:
            missing = lengths[rows] - self._entry(group).table.tokens[rows]
            behind = np.flatnonzero(missing > few)[: self._max_tokens // few]
            if not len(behind):
                return
            tokens = group.generation.lineage.last_tokens(rows[behind], missing[behind])
            in_order = np.argsort(tokens < 0, axis=1, kind="stable")[:, :few]
            first = np.take_along_axis(tokens, in_order, axis=1)
            is_cached = np.zeros(len(behind), bool)
            self._compute([(group, rows[behind], first, is_cached)], run)

    def _pass(self, parts: Sequence[_Part], run: RunTable) -> torch.Tensor:
        """Compute the logits of rows that lack few tokens."""
        extensions = []
        for group, rows in parts:
            lineage = group.generation.lineage
            missing = lineage.lengths[rows] - self._entry(group).table.tokens[rows]
            tokens = lineage.last_tokens(rows, np.maximum(missing, 1))
            extensions.append((group, rows, tokens, missing == 0))
        return self._compute(extensions, run)

    def _compute(self, extensions: Sequence[_Extension], run: RunTable) -> torch.Tensor:
        """Compute tokens after rows of tables, and store the longer tables.

        Returns:
            The logits after the last token of each row.

        Raises:
            OutOfSlotsError: There are too few slots; no row has changed.
        """
        steps: list[Continuation] = []
        try:
            for group, rows, tokens, is_repeated in extensions:
                repeated = tokens.max(axis=1)
                tokens[is_repeated] = NO_TOKEN
                table = self._entry(group).table
                steps.append(continuation(table, rows, tokens, repeated, self._tree.allocate))
            logits = run(joined([step.batch for step in steps]), extensions[0][0].adapter)
        except BaseException:
            for step in steps:
                self._tree.free(step.new)
            raise
        for (group, rows, _, _), step in zip(extensions, steps, strict=True):
            self._references.connect(step.new, step.parents)
            table = self._entry(group).table
            self._store(group, table.extend(rows, step.batch.slots, step.lengths))
        return logits

    def _entry(self, group: GroupQuery) -> _TableEntry:
        """Return the table of a group that has had one.

        Raises:
            OutOfSlotsError: It was evicted.
        """
        entry = self._tables.get(group.generation.state.key)
        if entry is None:
            raise OutOfSlotsError("the table of a population was evicted for another one")
        return entry

    def _table(self, group: GroupQuery) -> BlockTable | None:
        """Return the table of a generation, or a selection of that of its base, or None."""
        generation, lineage = group.generation, group.generation.lineage
        base = generation.with_state()
        if base is None or not isinstance(base.state, _TableReference):
            return None
        entry = self._tables.get(base.state.key)
        if entry is None or entry.adapter != group.adapter:
            return None
        self._tables.move_to_end(base.state.key)
        if base is generation:
            return entry.table
        rows = lineage.suffixes(np.arange(len(lineage)), base.lineage).places
        table = entry.table.select(rows)
        self._store(group, table)
        return table

    def _store(self, group: GroupQuery, table: BlockTable) -> None:
        """Store the table of a generation, in place of its current one."""
        self._references.add(table.last)
        state = group.generation.state
        entry = self._tables.get(state.key) if isinstance(state, _TableReference) else None
        if entry is None:
            state = _TableReference(next(self._keys), self._dropped)
            group.generation.keep(state)
        else:
            self._free(entry.table)
        lengths = group.generation.lineage.lengths
        self._tables[state.key] = _TableEntry(group.adapter, table, lengths)

    def evict(self, count: int) -> bool:
        """Free slots of tables that the current pass does not use, of the oldest table first.

        Args:
            count: Number of slots that are needed. If fewer are freed, this method may be called
                again.

        Returns:
            False if there are no such slots.
        """
        self.collect()
        for key in list(self._tables):
            if self._cut(key, count):
                return True
            if key not in self._current:
                self._free(self._tables.pop(key).table)
                return True
        return False

    def _cut(self, key: int, count: int) -> int:
        """Free the last tokens of rows of a table that no other row contains.

        Rows that a step has computed are cut before those that it has not: they are needed at
        the next step only.

        Args:
            key: Key of the table.
            count: Number of slots to free at least, if the table has as many.

        Returns:
            The number of slots that were freed.
        """
        adapter, table, ends = self._tables[key]
        references = self._references
        may_be_cut = references.parents[table.last] != SCRATCH_SLOT
        may_be_cut[self._current.get(key, [])] = False
        rows = np.flatnonzero(may_be_cut)[::-1]
        rows = rows[np.argsort((table.tokens < ends)[rows], kind="stable")]
        roots = np.fromiter(self._pinned, np.int64, len(self._pinned))
        references.add(roots)  # they belong to the tree
        total = first = 0
        size = 1
        while total < count and first < len(rows):
            cut = rows[first : first + size]
            freed = references.release(table.last[cut])
            table = table.without(freed, cut)
            references.add(table.last[cut])
            self._tree.free(freed)
            total, first = total + len(freed), first + len(cut)
            size = min(2 * size, 1 + (count - total) * first // max(1, total))
        references.release(roots)
        self._tables[key] = _TableEntry(adapter, table, ends)
        self._tree.tokens_evicted += total
        return total

    def _free(self, table: BlockTable) -> None:
        """Free the slots of a table that no other table refers to."""
        self._tree.free(self._released(table))

    def _released(self, table: BlockTable) -> Slots:
        """Release a table, and return the slots to free, which belong to no other table.

        Those of first sequences belong to the tree, where they are unpinned.
        """
        freed = self._references.release(table.last)
        if not len(freed):
            return freed
        roots = freed[self._references.parents[freed] == SCRATCH_SLOT].tolist()
        pinned = [slot for slot in roots if slot in self._pinned]
        for slot in pinned:
            self._tree.unpin(*self._pinned.pop(slot))
        return freed[~np.isin(freed, pinned)] if pinned else freed


class _TableEntry(NamedTuple):
    """A table, its adapter, and the number of tokens of each sequence."""

    adapter: str | None
    table: BlockTable
    lengths: Integers64


class _TableReference:
    """A generation's reference to its table, which is released when the generation is dropped.

    Generations may be dropped on any thread, and during garbage collections in other calls.
    """

    __slots__ = ("_dropped", "key")

    def __init__(self, key: int, dropped: deque[int]) -> None:
        self.key, self._dropped = key, dropped

    def __del__(self) -> None:
        self._dropped.append(self.key)
