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

from genlm.core.engine.group_turns import GroupTurns, oldest_first
from genlm.core.queries.generations import NO_TOKEN, Integers64, Lineage
from genlm.core.queries.query import GroupQuery
from genlm.prefix.block_table import BlockTable, joined_rows
from genlm.prefix.continuation import Requested, continuation
from genlm.prefix.forward import TokenBatch
from genlm.prefix.node import Paths
from genlm.prefix.tables import Tables
from genlm.prefix.tree import OutOfSlotsError, PrefixTree

Run = Callable[[TokenBatch], torch.Tensor]
"""Function that computes a pass; returns logits, shape `(results, width)`."""

_Part = tuple[GroupQuery, Integers64]
"""A group, and indices into its `wanted`."""

_Extension = tuple[GroupQuery, Integers64, Integers64, Requested]
"""A group, rows of its table, their tokens to compute, and the tokens with requested logits."""

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
        scored_columns: Maximum number of rows of each sequence of a group.
    """

    def __init__(self, tree: PrefixTree, *, max_tokens: int, max_rows: int) -> None:
        self._tree, self._max_tokens, self._max_rows = tree, max_tokens, max_rows
        self._few = self.scored_columns = min(max_tokens, _MAX_NEW_TOKENS)
        self.tables = Tables(tree)
        self._turns = GroupTurns()

    def limit(self, group: GroupQuery) -> int:
        """Return the number of sequences of a group for one pass, or about one in the tree."""
        self.tables.collect()
        missing = self._missing(group)
        if missing is not None:
            few, count = np.clip(_new_tokens(group, missing), 1, self._few), len(missing)
            if count * int(few.max(initial=1)) > self._max_tokens:
                tokens = np.cumsum(np.sort(few)[::-1])  # of any 1, 2, ... sequences, at most
                count = int(np.searchsorted(tokens, self._max_tokens, side="right"))
            return min(self._max_rows, count)
        if self.is_long(group):
            return 1
        sequences = group.sequences(
            np.arange(0, len(group.wanted), -(-len(group.wanted) // _SAMPLE_SIZE))
        )
        mean = np.mean([1 + self._tree.missing(group.adapter, s) for s in sequences])
        return max(1, min(self._max_rows, int(self._max_tokens / mean)))

    def is_long(self, group: GroupQuery) -> bool:
        """Whether the tree must compute a sequence that is longer than a pass."""
        return self._missing(group) is None and any(
            self._tree.missing(group.adapter, sequence) > self._max_tokens
            for sequence in group.sequences(np.flatnonzero(group.lengths > self._max_tokens))
        )

    def choose(self, pending: Sequence[GroupQuery]) -> Sequence[GroupQuery]:
        """Choose groups that one pass computes: the first, and others of its adapter.

        All or none of them are continued from tables. If there are too few slots for all
        groups, the oldest populations are computed first, and the rows of the youngest ones are
        cut for them. The others wait; see `GroupTurns`.
        """
        self.tables.collect()
        groups = oldest_first(pending)
        costs, in_tree = self._costs(groups)
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
            costs, in_tree = self._costs(groups)
        else:
            groups = list(pending)
        first, *others = groups
        chosen, tokens, rows = [first], costs[first.query_id], len(first.wanted)
        for group in others:
            is_similar = (group.query_id in in_tree) == (first.query_id in in_tree)
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
        costs, _ = self._costs(pending)
        return min(costs.values()) > self._tree.available

    def logits(
        self, parts: Sequence[tuple[GroupQuery, Integers64]], run: Run
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
        extended: list[_Part] = []  # groups, and rows that lack several tokens
        for group, places in parts:
            missing = self._missing(group, places)
            if missing is None:
                return None
            if group.dropped is None and missing.max() > 1:
                extended.append((group, group.wanted[places[missing > 1]]))
        if extended:
            for (group, rows), is_longer in zip(
                extended, self.tables.find_longer(extended), strict=True
            ):
                shared = rows if is_longer else self._shared_with_tree(group, rows)
                if len(shared):
                    self._adopt(group, shared)
        try:
            return self._passes(parts, run)
        except OutOfSlotsError:
            if len(parts) > 1:
                raise
            return None

    def adopt(self, group: GroupQuery, places: Integers64) -> None:
        """Add a table with the sequences of a group that the tree contains."""
        self.tables.collect()
        self._adopt(group, np.unique(group.wanted[places]))

    # -- internals --------------------------------------------------------------------

    def _shared_with_tree(self, group: GroupQuery, rows: Integers64) -> Integers64:
        """Return the rows of which the tree may have more tokens than the table.

        The first token of these rows after their common slots follows the slots in the tree.
        Most often there are none, because the tree ends with the prompt.
        """
        table, lineage = self.tables.get(group), group.generation.lineage
        own = table.slots[rows, :1]
        count = len(table.trunk) + int((own == own[0]).all())
        prefix = lineage.sequence(int(rows[0])).prefix(count)
        followers = self._tree.followers(group.adapter, prefix)
        if not followers:
            return rows[:0]
        begins = np.full(len(rows), count)
        tokens = _tokens_between(lineage, rows, begins, begins + 1)
        return rows[np.isin(tokens[:, 0], followers)]

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

    def _costs(self, groups: Sequence[GroupQuery]) -> tuple[dict[int, int], set[int]]:
        """Return the number of tokens of a pass over each group, at most, by query id.

        The tables of the last groups are cut first, because they are visited first.

        Returns:
            The numbers, and the ids of the groups that the tree computes.
        """
        costs, in_tree = {}, set()
        for group in reversed(groups):
            missing = self._missing(group)
            if missing is None:
                in_tree.add(group.query_id)
                sequences = group.sequences(slice(None))
                missing = np.array(
                    [self._tree.missing(group.adapter, sequence) for sequence in sequences]
                )
            costs[group.query_id] = int(np.maximum(_new_tokens(group, missing), 1).sum())
        return costs, in_tree

    def _missing(
        self, group: GroupQuery, places: Integers64 | slice = slice(None)
    ) -> Integers64 | None:
        """Return the number of tokens of sequences that the table lacks.

        Returns None if the rows must be computed through the tree, as prefill chunks, because
        the group has no table, a row without cached tokens lacks many, or all rows were
        extended by many tokens.

        Args:
            group: The group.
            places: Indices into `wanted`; by default all.
        """
        table = self.tables.find(group)
        if table is None:
            return None
        cached = table.tokens[group.wanted[places]]
        missing: Integers64 = group.lengths[places] - cached
        if missing.max(initial=0) <= self._few:
            return missing
        is_long = missing > self._few
        uses_tree = (is_long & (cached == 0)).any() or (
            is_long.all() and group.dropped is None and not self.tables.is_cut(group)
        )
        return None if uses_tree else missing

    def _passes(self, parts: Sequence[_Part], run: Run) -> torch.Tensor:
        """Compute rows of groups in one pass, or those of one group in several, by the slots.

        Raises:
            OutOfSlotsError: There are too few slots for several groups or for a row.
        """
        self.tables.in_use = {
            group.generation.state.key: group.wanted[places] for group, places in parts
        }
        try:
            for group, places in parts:
                self._catch_up(group, places, run)
            return self._compute([self._extension(*part) for part in parts], run)
        except OutOfSlotsError:
            if len(parts) > 1 or len(parts[0][1]) == 1:
                raise
        finally:
            self.tables.in_use = {}
        [(group, places)] = parts
        missing = group.lengths[places] - self.tables.get(group).tokens[group.wanted[places]]
        order = np.argsort(missing, kind="stable")
        middle = np.searchsorted(missing[order], missing.min(), side="right")
        if middle == len(places):
            middle //= 2
        # A copy: the next pass overwrites the logits.
        logits = self._passes([(group, places[order[:middle]])], run).clone()
        logits = torch.cat([logits, self._passes([(group, places[order[middle:]])], run)])
        return logits[torch.from_numpy(np.argsort(order)).to(logits.device)]

    def _catch_up(self, group: GroupQuery, places: Integers64, run: Run) -> None:
        """Compute tokens of rows that lack many, until they lack few."""
        few, lineage, wanted = self._few, group.generation.lineage, group.wanted[places]
        while True:
            missing = group.lengths[places] - self.tables.get(group).tokens[wanted]
            rows = np.unique(wanted[missing > few])  # few enough for a pass; see `limit`
            if not len(rows):
                return
            begins = self.tables.get(group).tokens[rows]
            tokens = _tokens_between(lineage, rows, begins, begins + few)
            lasts = Requested(np.arange(len(rows)), np.full(len(rows), few - 1), tokens[:, -1])
            self._compute([(group, rows, tokens, lasts)], run)

    def _extension(self, group: GroupQuery, places: Integers64) -> _Extension:
        """Return the tokens of rows that lack few, and those with requested logits."""
        lineage, wanted = group.generation.lineage, group.wanted[places]
        if group.dropped is None:
            missing = lineage.lengths[wanted] - self.tables.get(group).tokens[wanted]
            tokens = lineage.last_tokens(wanted, np.maximum(missing, 1))
            lasts = Requested(np.arange(len(wanted)), missing - 1, tokens.max(axis=1))
            tokens[missing == 0] = NO_TOKEN
            return group, wanted, tokens, lasts
        lengths = group.lengths[places]
        rows, index = np.unique(wanted, return_inverse=True)
        ends = np.zeros(len(rows), np.int64)
        np.maximum.at(ends, index, lengths)
        table, first = self.tables.get(group), int(lengths.min()) - 1
        if first < len(table.trunk):
            self.tables.store(group, table.with_trunk(first))
        begins = table.tokens[rows]
        tokens = _tokens_between(lineage, rows, begins, ends)
        columns = lengths - 1 - begins[index]
        token_ids, is_cached = np.empty_like(columns), columns < 0
        ends = lengths[is_cached]
        cached_tokens = _tokens_between(lineage, wanted[is_cached], ends - 1, ends)
        token_ids[is_cached] = cached_tokens.max(axis=1, initial=NO_TOKEN)
        return group, rows, tokens, Requested(index, columns, token_ids)

    def _compute(self, extensions: Sequence[_Extension], run: Run) -> torch.Tensor:
        """Compute tokens after rows of tables, and store the longer tables.

        Returns:
            The logits after the last token of each row.

        Raises:
            OutOfSlotsError: There are too few slots; no row has changed.
        """
        tables = [self.tables.get(group) for group, *_ in extensions]
        table, rows, tokens, requested = _joined(tables, extensions)
        adapter = extensions[0][0].adapter
        step = continuation(
            table, rows, tokens, requested, adapter=adapter, allocate=self._tree.allocate
        )
        try:
            logits = run(step.batch)
        except BaseException:
            self._tree.free(step.new)
            raise
        self.tables.references.connect(step.new, step.parents)
        begin = 0
        for group, group_rows, *_ in extensions:
            group_table = self.tables.get(group)  # other rows may have been cut
            end = begin + len(group_rows)
            slots, lengths = step.batch.slots, step.lengths
            if len(extensions) > 1:
                first = len(group_table.trunk) - len(table.trunk)
                lengths = lengths[begin:end] - first
                slots = slots[begin:end, first : first + int(lengths.max())].copy()
            self.tables.store(group, group_table.extend(group_rows, slots, lengths))
            begin = end
        return logits


def _joined(
    tables: Sequence[BlockTable], extensions: Sequence[_Extension]
) -> tuple[BlockTable, Integers64, Integers64, Requested]:
    """Return the arguments of one `continuation` for extensions of several tables."""
    if len(extensions) == 1:
        [(_, rows, tokens, requested)] = extensions
        return tables[0], rows, tokens, requested
    table = joined_rows(
        [(each, part[1]) for each, part in zip(tables, extensions, strict=True)]
    )
    width = max(part[2].shape[1] for part in extensions)
    tokens, results, begin = np.full((len(table), width), NO_TOKEN), [], 0
    for _, rows, part, (result_rows, columns, token_ids) in extensions:
        tokens[begin : begin + len(rows), width - part.shape[1] :] = part
        results.append((result_rows + begin, columns, token_ids))
        begin += len(rows)
    requested = Requested(*map(np.concatenate, zip(*results, strict=True)))
    return table, np.arange(begin), tokens, requested


def _new_tokens(group: GroupQuery, missing: Integers64) -> Integers64:
    """Return the number of tokens that each row of a group adds to those before it."""
    if group.dropped is None:
        return missing
    follows = np.diff(group.wanted, prepend=-1) == 0  # another row of its sequence
    return np.where(follows, np.diff(group.lengths, prepend=0), missing)


def _tokens_between(
    lineage: Lineage, rows: Integers64, begins: Integers64, ends: Integers64
) -> Integers64:
    """Return the tokens of rows from `begins` up to `ends`, padded with `NO_TOKEN`."""
    tokens = lineage.last_tokens(rows, lineage.lengths[rows] - begins)
    in_order = np.argsort(tokens < 0, axis=1, kind="stable")
    width = int((ends - begins).max(initial=0))
    tokens = np.take_along_axis(tokens, in_order[:, :width], axis=1)
    tokens[np.arange(width) >= (ends - begins)[:, None]] = NO_TOKEN
    return tokens
