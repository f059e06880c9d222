"""`Populations`: next-token logits of generations from block tables.

The slots come from the pool of a prefix tree. The tree computes the first sequences of a
population and pins them while rows refer to them; their extensions have slots here, without an
object per sequence. The tree also recomputes the sequences of an evicted table. Sequences that
are requested otherwise, too, are shared with the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from genlm.core.engine.group_turns import GroupTurns, oldest_first
from genlm.core.queries.generations import NO_TOKEN, Integers64
from genlm.core.queries.query import GroupQuery
from genlm.prefix.block_table import BlockTable
from genlm.prefix.continuation import Continuation, continuation, joined
from genlm.prefix.forward import TableBatch
from genlm.prefix.node import Paths
from genlm.prefix.tables import Tables
from genlm.prefix.tree import OutOfSlotsError, PrefixTree

RunTable = Callable[[TableBatch, str | None], torch.Tensor]
"""Function that computes a pass of an adapter; returns logits, shape `(results, width)`."""

_Part = tuple[GroupQuery, Integers64]
"""A group, and indices of rows of its table."""

_Extension = tuple[GroupQuery, Integers64, Integers64, NDArray[np.bool_]]
"""A group, rows of its table, their tokens to compute, and which of them are cached."""

# Maximum number of new tokens of a row in a pass over tables.
_MAX_NEW_TOKENS = 32

# Number of sequences used to estimate the number of new tokens of a first generation.
_SAMPLE_SIZE = 32


class Populations:
    """Computes generations whose sequences are stored in block tables.

    Args:
        tree: Tree that provides slots and contains the first sequences of populations.
        max_tokens: Maximum number of tokens of a pass.
        max_rows: Maximum number of results of a pass.

    Attributes:
        tables: The block tables.
    """

    def __init__(self, tree: PrefixTree, *, max_tokens: int, max_rows: int) -> None:
        self._tree, self._max_tokens, self._max_rows = tree, max_tokens, max_rows
        self._few = min(max_tokens, _MAX_NEW_TOKENS)
        self.tables = Tables(tree)
        self._turns = GroupTurns()

    def limit(self, group: GroupQuery) -> int:
        """Return the number of sequences of a group for one pass, or about one in the tree."""
        self.tables.collect()
        lineage, wanted = group.generation.lineage, group.wanted
        missing = self._missing(group, wanted)
        if missing is not None:
            few, count = np.clip(missing, 1, self._few), len(missing)
            if count * int(few.max(initial=1)) > self._max_tokens:
                tokens = np.cumsum(np.sort(few)[::-1])  # of any 1, 2, ... sequences, at most
                count = int(np.searchsorted(tokens, self._max_tokens, side="right"))
            return max(1, min(self._max_rows, count))
        if self.is_long(group):
            return 1
        sequences = lineage.sequences(wanted[:: -(-len(wanted) // _SAMPLE_SIZE)])
        mean = np.mean([1 + self._tree.missing(group.adapter, s) for s in sequences])
        return max(1, min(self._max_rows, int(self._max_tokens / mean)))

    def is_long(self, group: GroupQuery) -> bool:
        """Whether the tree must compute a sequence that is longer than a pass."""
        lineage, wanted = group.generation.lineage, group.wanted
        return self._missing(group, wanted) is None and any(
            self._tree.missing(group.adapter, sequence) > self._max_tokens
            for sequence in lineage.sequences(
                wanted[lineage.lengths[wanted] > self._max_tokens]
            )
        )

    def choose(self, pending: Sequence[GroupQuery]) -> Sequence[GroupQuery]:
        """Choose groups that one pass computes: the first, and others of its adapter.

        All or none of them are continued from tables. If there are too few slots for all
        groups, the oldest populations are computed first, and the rows of the youngest ones are
        cut for them. The others wait; see `GroupTurns`.
        """
        self.tables.collect()
        groups = oldest_first(pending)
        costs = self._costs(groups)
        self.tables.expect(groups)
        is_short = sum(costs.values()) > self._tree.available
        if is_short:
            groups = self._turns.order(
                groups, lambda group: costs[group.query_id] <= self._tree.available
            )
            first = groups[0]
            step = costs[first.query_id] + sum(len(group.wanted) for group in groups)
            while costs[first.query_id] > self._tree.available:
                if not self.tables.evict(step):
                    break
            costs = self._costs(groups)
        else:
            groups = list(pending)
        first, *others = groups
        chosen, tokens, rows = [first], costs[first.query_id], len(first.wanted)
        uses_table = self._missing(first, first.wanted) is not None
        for group in others:
            is_similar = (self._missing(group, group.wanted) is not None) == uses_table
            is_evicted = is_short and costs[group.query_id] > len(group.wanted)
            if group.adapter != first.adapter or not is_similar or is_evicted:
                continue
            tokens += costs[group.query_id]
            rows += len(group.wanted)
            if rows > self._max_rows or tokens > min(self._max_tokens, self._tree.available):
                break
            chosen.append(group)
        self._turns.record(groups, chosen, is_short=is_short)
        return chosen

    def defers(self, pending: Sequence[GroupQuery]) -> bool:
        """Whether groups should wait for the next requests of other populations.

        This is the case if there are too few slots for any of them: their computation would
        free tokens that these requests continue.
        """
        self.tables.collect()
        return min(self._costs(pending).values()) > self._tree.available

    def logits(
        self, parts: Sequence[tuple[GroupQuery, Integers64]], run: RunTable
    ) -> torch.Tensor | None:
        """Compute the next-token logits of sequences of groups, in one pass if there are slots.

        Args:
            parts: Groups of one adapter, which is active, with different generations; and
                places of sequences in their `wanted`, at most `limit` for one group, or all
                places of groups from `choose`.
            run: Function that computes a pass.

        Returns:
            Shape `(number of places, width of the model's output)`, one group after the other.
            None if the sequences must be computed through the tree, after which `adopt` is
            called, or if there are too few slots for a row of a single group.

        Raises:
            OutOfSlotsError: There are too few slots for several groups.
        """
        self.tables.collect()
        selected = [(group, group.wanted[places]) for group, places in parts]
        for group, rows in selected:
            missing = self._missing(group, rows)
            if missing is None:
                return None
            if (missing > 1).any():
                self._adopt(group, rows[missing > 1])
        try:
            return self._passes(selected, run)
        except OutOfSlotsError:
            if len(parts) > 1:
                raise
            return None

    def adopt(self, group: GroupQuery, places: Integers64) -> None:
        """Add a table with the sequences of a group that the tree contains."""
        self.tables.collect()
        self._adopt(group, group.wanted[places])

    # -- internals --------------------------------------------------------------------

    def _adopt(self, group: GroupQuery, rows: Integers64) -> None:
        """Replace rows of which the tree contains more tokens than the group's table."""
        lineage, adapter = group.generation.lineage, group.adapter
        sequences = lineage.sequences(rows)
        self.tables.share_prefixes(adapter, sequences)
        table = self.tables.find(group) or BlockTable.empty(len(lineage))
        longer, slots, paths = [], [], Paths()
        for row, sequence, cached in zip(rows, sequences, table.tokens[rows], strict=True):
            node, length = self._tree.match(adapter, sequence)
            if length > cached:
                longer.append(row)
                slots.append(paths.slots(node, length))
                self.tables.pin(adapter, sequence.prefix(length), int(slots[-1][-1]))
        if longer:
            self.tables.store(group, table.replace(np.array(longer, np.int64), slots))

    def _costs(self, groups: Sequence[GroupQuery]) -> dict[int, int]:
        """Return the number of tokens of a pass over each group, at most, by query id.

        The tables of the last groups are cut first, because they are visited first.
        """
        costs = {}
        for group in reversed(groups):
            missing = self._missing(group, group.wanted)
            if missing is None:
                sequences = group.generation.lineage.sequences(group.wanted)
                missing = np.array(
                    [self._tree.missing(group.adapter, sequence) for sequence in sequences]
                )
            costs[group.query_id] = int(np.maximum(missing, 1).sum())
        return costs

    def _missing(self, group: GroupQuery, rows: Integers64) -> Integers64 | None:
        """Return the number of tokens that each row's table lacks.

        Returns None if the rows must be computed through the tree, as prefill chunks, because
        the group has no table, a row without cached tokens lacks many, or all rows were
        extended by many tokens.
        """
        table = self.tables.find(group)
        if table is None:
            return None
        cached = table.tokens[rows]
        missing: Integers64 = group.generation.lineage.lengths[rows] - cached
        is_long = missing > self._few
        uses_tree = (is_long & (cached == 0)).any() or (
            is_long.all() and not self.tables.is_cut(group)
        )
        return None if uses_tree else missing

    def _passes(self, parts: Sequence[_Part], run: RunTable) -> torch.Tensor:
        """Compute rows of groups in one pass, or in several if there are too few slots.

        Raises:
            OutOfSlotsError: There are too few slots for a row, or a table was evicted.
        """
        self.tables.in_use = {group.generation.state.key: rows for group, rows in parts}
        try:
            for group, rows in parts:
                self._catch_up(group, rows, run)
            return self._pass(parts, run)
        except OutOfSlotsError:
            if len(parts) == len(parts[0][1]) == 1:
                raise
        finally:
            self.tables.in_use = {}
        if len(parts) > 1:
            middle = len(parts) // 2
            logits = self._passes(parts[:middle], run).clone()  # the next pass overwrites them
            return torch.cat([logits, self._passes(parts[middle:], run)])
        [(group, rows)] = parts
        missing = group.generation.lineage.lengths[rows] - self.tables.get(group).tokens[rows]
        order = np.argsort(missing, kind="stable")
        middle = np.searchsorted(missing[order], missing.min(), side="right")
        if middle == len(rows):
            middle //= 2
        logits = self._passes([(group, rows[order[:middle]])], run).clone()
        logits = torch.cat([logits, self._passes([(group, rows[order[middle:]])], run)])
        return logits[torch.from_numpy(np.argsort(order)).to(logits.device)]

    def _catch_up(self, group: GroupQuery, rows: Integers64, run: RunTable) -> None:
        """Compute tokens of rows that lack many, until they lack few."""
        few, lengths = self._few, group.generation.lineage.lengths
        while True:
            missing = lengths[rows] - self.tables.get(group).tokens[rows]
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
            missing = lineage.lengths[rows] - self.tables.get(group).tokens[rows]
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
                table = self.tables.get(group)
                steps.append(continuation(table, rows, tokens, repeated, self._tree.allocate))
            logits = run(joined([step.batch for step in steps]), extensions[0][0].adapter)
        except BaseException:
            for step in steps:
                self._tree.free(step.new)
            raise
        for (group, rows, _, _), step in zip(extensions, steps, strict=True):
            self.tables.references.connect(step.new, step.parents)
            table = self.tables.get(group)
            self.tables.store(group, table.extend(rows, step.batch.slots, step.lengths))
        return logits
