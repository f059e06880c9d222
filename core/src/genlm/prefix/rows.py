"""Next-token rows and scores of batches of sequences from a prefix tree.

`PrefixRows` owns the tree, its budget and its roll-backs, and divides sequences into passes. A
`ForwardFn` runs the model over the uncached tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from genlm.core.base.errors import EvaluationError
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.logits import rows_from_logits
from genlm.core.rows.text_scores import PieceScores
from genlm.core.vocab import Vocabulary
from genlm.prefix.forward import (
    ForwardFn,
    ForwardResult,
    TableBatch,
    TreeBatch,
)
from genlm.prefix.node import Node, Paths, Slots, slots_within
from genlm.prefix.populations import Populations
from genlm.prefix.tree import End, OutOfSlotsError, PrefixTree
from genlm.prefix.uncached import UncachedPath

if TYPE_CHECKING:
    import torch

    from genlm.core.queries.generations import Integers64
    from genlm.core.queries.query import GroupQuery, Query
    from genlm.core.rows.text_scores import TextResult

__all__ = ["PrefixRows"]

# Maximum number of sequences that `next_pass` skips: it takes microseconds for each.
_MAX_SKIPPED = 256


class _Part(NamedTuple):
    """A sequence of a pass, or its beginning.

    Attributes:
        place: Index of the sequence.
        sequence: Its tokens up to the end of the pass.
        first: First position whose logits are requested; the end if no logits are.
        node: Node from the tree's `insert`.
    """

    place: int
    sequence: TokenSequence
    first: int
    node: Node


@dataclass(slots=True)
class _Pass:
    """The current batch of the tree.

    Attributes:
        adapter: Adapter of the sequences.
        scored: As in `PrefixRows._passes`.
        parts: The sequences.
        recomputed: Slots of cached tokens that are recomputed for their logits.
        ends: Ends of sequences that are evicted before all other tokens.
    """

    adapter: str | None
    scored: bool
    parts: list[_Part] = field(default_factory=list)
    recomputed: set[int] = field(default_factory=set)
    ends: list[End] = field(default_factory=list)


_Result = tuple[Sequence[_Part], Slots, "torch.Tensor"]
"""The sequences of a pass, the slots of `TreeBatch.wanted`, and their logits."""


class PrefixRows:
    """Computes the rows of batches of sequences with a prefix tree.

    A batch that needs more slots than can be freed, or a context of more tokens than the
    maximum of a pass, is computed in several passes. The methods `..._by_pass` are generators
    that stop after each pass, so that other batches can be computed in between: the computed
    tokens of a long context are pinned until the generator ends or is closed.

    Args:
        forward: Function that runs the model over uncached tokens.
        uncached: Path that computes sequences which are too long for the whole budget.
        vocabulary: The tokenizer's vocabulary.
        budget_bytes: Maximum memory of keys and values.
        bytes_per_token: Memory of the keys and values of one token.
        max_tokens: Maximum number of new tokens in one pass.
        max_rows: Maximum number of results of one pass, which limits its logits.

    Attributes:
        forward: As above.
        populations: Block tables of populations.
    """

    def __init__(
        self,
        forward: ForwardFn,
        *,
        uncached: UncachedPath,
        vocabulary: Vocabulary,
        budget_bytes: int,
        bytes_per_token: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self.forward, self._uncached = forward, uncached
        self._vocabulary = vocabulary
        self._budget, self._token_bytes = budget_bytes, bytes_per_token
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._tree = PrefixTree(max(0, slots_within(budget_bytes, bytes_per_token) - 1))
        self._forwards = self._tokens_computed = self._contexts_without_cache = 0
        self._times_cleared = 0
        self.populations = Populations(self._tree, max_tokens=max_tokens, max_rows=max_rows)

    def rows(self, adapter: str | None, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """Compute the next-token rows of sequences; see `logits_by_pass`."""
        *_, logits = self.logits_by_pass(adapter, sequences)
        assert logits is not None  # noqa: S101 - the last result
        return rows_from_logits(logits, self._vocabulary)

    def logits_by_pass(
        self, adapter: str | None, sequences: Sequence[TokenSequence]
    ) -> Generator[torch.Tensor | None, None, None]:
        """Compute the next-token logits of sequences, in one or several passes.

        After an exception, the tree contains only computed tokens.

        Args:
            adapter: Name of the adapter that is active in the model during each pass.
            sequences: At least one sequence of ids that the model can embed.

        Yields:
            None after a pass over a part of a long context; at last the logits, shape
            `(len(sequences), width of the model's output)`. The next pass may overwrite them.
        """
        self.populations.tables.collect()
        logits: torch.Tensor | None = None
        lasts = [len(sequence) - 1 for sequence in sequences]
        with self._rolled_back_on_error():
            for result in self._passes(adapter, sequences, lasts, self._max_tokens):
                if isinstance(result, int):
                    places = [result]
                    [computed] = self._uncached.logits_by_pass(adapter, [sequences[result]])
                else:
                    parts, _, computed = result
                    places = [part.place for part in parts if part.first < len(part.sequence)]
                if not places:
                    yield None
                    continue
                if len(places) == len(sequences):
                    logits = computed
                    break
                if logits is None:
                    logits = computed.new_empty((len(sequences), computed.shape[1]))
                logits[places] = computed
        yield logits

    def is_long(self, query: Query) -> bool:
        """Whether a query takes more than one pass."""
        limit = self._score_limit if query.targets else self._max_tokens
        if len(query) <= limit:
            return False
        _, cached = self._tree.match(query.adapter, query.sequence)
        return len(query) - min(query.first_target, cached) > limit

    def next_pass(
        self,
        adapter: str | None,
        sequences: Sequence[TokenSequence],
        firsts: Sequence[int] | None = None,
    ) -> Sequence[int]:
        """Choose sequences for one pass: the first, and others that fit.

        A first sequence that is longer than a pass is chosen alone. Free slots are not
        considered.

        Args:
            adapter: Adapter of all sequences.
            sequences: At least one sequence, the most urgent first.
            firsts: The position in each sequence from which on logits are requested; None for
                the last positions only.

        Returns:
            Indices of the sequences, ascending, including 0.
        """
        limit = self._max_tokens if firsts is None else self._score_limit
        if len(sequences) <= self._max_rows and sum(map(len, sequences)) <= limit:
            return range(len(sequences))
        indices: list[int] = []
        skipped, room = 0, limit
        ahead: PrefixTree | None = None  # tokens of the pass, without repetition
        recomputed: set[int] = set()  # slots of cached tokens
        for index, sequence in enumerate(sequences):
            node, cached = self._tree.match(adapter, sequence)
            new, first = len(sequence) - cached, firsts[index] if firsts else len(sequence) - 1
            repeated = (
                node.computed_slots(first, cached) - recomputed if first < cached else set()
            )
            if new > 1:
                ahead = ahead or PrefixTree(sum(map(len, sequences)))
                new = min(new, len(sequence) - ahead.match(adapter, sequence)[1])
            cost = new + len(repeated)
            if not indices and cost > limit:
                return [0]
            if cost > room:
                skipped += 1
                if skipped > _MAX_SKIPPED:
                    break
                continue
            if ahead is not None:
                ahead.insert(adapter, sequence)
            recomputed |= repeated
            indices.append(index)
            room -= cost
            if not room or len(indices) == self._max_rows:
                break
        return indices

    def scores_by_pass(
        self, adapter: str | None, texts: Sequence[Query]
    ) -> Generator[list[TextResult] | None, None, None]:
        """Score texts in few passes, with one computation per uncached position.

        After an exception, the tree contains only computed tokens.

        Args:
            adapter: Name of the adapter that is active in the model during each pass.
            texts: At least one text of ids that the model can embed.

        Yields:
            None after each pass that is followed by others; at last `PieceScores.results`.
        """
        self.populations.tables.collect()
        scores = PieceScores(texts, self._vocabulary)
        sequences = [text.sequence for text in texts]
        firsts = [text.first_target for text in texts]
        passes = self._passes(adapter, sequences, firsts, self._score_limit, scored=True)
        with self._rolled_back_on_error():
            for result in passes:
                if isinstance(result, int):
                    [[score]] = self._uncached.scores_by_pass(adapter, [texts[result]])
                    scores.put(result, score)
                    continue
                parts, wanted, logits = result
                keys, members, paths = [], [], Paths()
                for index, sequence, first, node in parts:
                    keys.append(paths.slots(node, len(sequence))[first:])
                    before = scores.ends[index] - firsts[index]
                    members.append(before + np.arange(first, len(sequence)))
                scores.expect(np.concatenate(keys), np.concatenate(members))
                scores.add(wanted, logits)
                del result, logits  # before the next pass allocates its logits
                if not scores.is_complete:
                    yield None
        yield scores.results()

    @property
    def _score_limit(self) -> int:
        """Maximum number of tokens of a pass of texts; all of their logits may be requested."""
        return min(self._max_tokens, self._max_rows)

    def group_logits(
        self, parts: Sequence[tuple[GroupQuery, Integers64]]
    ) -> torch.Tensor | None:
        """Compute the logits of sequences of populations; see `Populations.logits`."""
        with self._rolled_back_on_error():
            return self.populations.logits(parts, self._table_pass)

    def pin(self, adapter: str | None, sequence: TokenSequence) -> None:
        """Compute a prefix and pin it until `clear`.

        Raises:
            EvaluationError: The prefix does not fit into the budget with the pinned prefixes.
        """
        before = self._contexts_without_cache
        list(self.logits_by_pass(adapter, [sequence]))
        if self._contexts_without_cache > before:
            raise EvaluationError(
                f"a prefix of {len(sequence)} tokens does not fit into the "
                f"{self._tree.capacity} tokens of kv_budget_bytes={self._budget} beside "
                f"the pinned prefixes; raise kv_budget_bytes or call clear_kv_cache first"
            )
        self._tree.pin(adapter, sequence)

    def release(self, adapter: str | None, key: bytes) -> None:
        """Evict a context before other tokens; see `PrefixTree.release`."""
        self._tree.release(adapter, key)

    def drop(self, adapter: str) -> None:
        """Remove all tokens computed with an adapter, including pinned prefixes."""
        self.populations.tables.drop(adapter)
        self._tree.drop(adapter)

    def clear(self) -> None:
        """Remove all computed tokens, including pinned prefixes."""
        self._times_cleared += 1
        self.populations.tables.clear()
        self._tree.clear()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counters and the state of the cache. Thread-safe."""
        used = self._tree.slots_used
        return {
            "tokens_computed": self._tokens_computed,
            "tokens_evicted": self._tree.tokens_evicted,
            "forwards": self._forwards,
            "contexts_without_cache": self._contexts_without_cache,
            "kv_tokens": used,
            "kv_bytes_used": used * self._token_bytes,
            "kv_budget_bytes": self._budget,
        }

    def restore(self) -> None:
        """Remove tokens that were not computed, after a failed pass."""
        self._tree.roll_back()

    @contextmanager
    def _rolled_back_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def _passes(
        self,
        adapter: str | None,
        sequences: Sequence[TokenSequence],
        firsts: Sequence[int],
        limit: int,
        *,
        scored: bool = False,
    ) -> Iterator[_Result | int]:
        """Compute sequences in passes.

        Args:
            adapter: Adapter of the sequences.
            sequences: The sequences.
            firsts: The position in each sequence from which on logits are requested.
            limit: Maximum number of tokens of a pass.
            scored: Whether sequences may share requested positions, and their new tokens after
                the first requested one are evicted before all other tokens.

        Yields:
            The results of a pass, or the index of a sequence for which there are too few slots.
        """
        current = _Pass(adapter, scored)
        for index, (sequence, first) in enumerate(zip(sequences, firsts, strict=True)):
            retained = max(first, self._tree.match(adapter, sequence)[1]) if scored else 0
            part = (index, sequence, first)
            if current.parts:
                if self._add(current, part, retained, limit=limit):
                    continue
                yield self._run(current)
                current = _Pass(adapter, scored)
            is_computed = self._add(current, part, retained)
            if is_computed:
                if self._tokens(current) <= limit:
                    continue
                self._tree.roll_back()  # frees its slots, which are sufficient for every part
                is_computed = yield from self._parts(adapter, part, retained, limit, scored)
            if not is_computed:
                # There are no uncached tokens, so this releases the cached prefix.
                self._tree.roll_back()
                self._contexts_without_cache += 1
                yield index
            current = _Pass(adapter, scored)
        if current.parts:
            yield self._run(current)

    def _parts(
        self,
        adapter: str | None,
        part: tuple[int, TokenSequence, int],
        retained: int,
        limit: int,
        scored: bool,
    ) -> Generator[_Result, None, bool]:
        """Compute a sequence in several passes, between which its computed tokens are pinned.

        Returns:
            False if there are too few slots, because others were pinned between two passes.
        """
        index, sequence, first = part
        ids, length, end = sequence.token_ids, len(sequence), 0
        with ExitStack() as pins:
            while end < length:
                begin = min(first, self._tree.match(adapter, sequence)[1])
                end = min(begin + limit, length)
                whole = sequence if end == length else TokenSequence.of(ids[:end])
                current = _Pass(adapter, scored)
                is_added = self._add(current, (index, whole, min(first, end)), retained)
                pins.close()  # the tokens are in use until the end of the pass
                if not is_added:
                    return False
                if end < length:
                    pins.enter_context(self._pinned(adapter, whole))
                yield self._run(current)
                first = max(first, end)
        return True

    @contextmanager
    def _pinned(self, adapter: str | None, sequence: TokenSequence) -> Iterator[None]:
        """Pin a sequence of the tree until the end of the context or until `clear`."""
        times_cleared = self._times_cleared
        self._tree.pin(adapter, sequence)
        try:
            yield
        finally:
            if times_cleared == self._times_cleared:
                self._tree.unpin(adapter, sequence)

    def _add(
        self,
        current: _Pass,
        part: tuple[int, TokenSequence, int],
        retained: int,
        *,
        limit: int | None = None,
    ) -> bool:
        """Add a sequence to a pass unless this exceeds the limit or the available slots.

        Args:
            current: The pass.
            part: Index, tokens and first requested position of the sequence.
            retained: Number of its tokens that are not evicted before all other tokens.
            limit: Maximum number of tokens of the pass; None for no limit.
        """
        index, sequence, first = part
        match = node, cached = self._tree.match(current.adapter, sequence)
        repeated: set[int] = set()
        if first < cached:
            repeated = node.computed_slots(first, cached) - current.recomputed
        if limit is not None:
            tokens = self._tokens(current) + len(sequence) - cached + len(repeated)
            if tokens > limit or len(current.parts) >= self._max_rows:
                return False
        try:
            node = self._tree.insert(current.adapter, sequence, match)
        except OutOfSlotsError:
            return False
        current.recomputed |= repeated
        current.parts.append(_Part(index, sequence, first, node))
        if current.scored:
            current.ends.append(End(node, retained, len(sequence)))
        return True

    def _tokens(self, current: _Pass) -> int:
        """Return the number of tokens that the current pass computes."""
        return self._tree.uncached_tokens + len(current.recomputed)

    def _run(self, current: _Pass) -> _Result:
        """Compute a pass and end it."""
        parts = current.parts
        batch = TreeBatch.of(
            self._tree,
            current.adapter,
            [part.sequence for part in parts],
            [part.node for part in parts],
            [min(p.first, len(p.sequence) - 1) for p in parts] if current.scored else (),
        )
        result = self.forward(batch)
        self._tree.commit(current.ends)
        self._count(result)
        return parts, batch.wanted, result.logits

    def _table_pass(self, batch: TableBatch, adapter: str | None) -> torch.Tensor:
        """Compute a pass of a population and return its logits."""
        result = self.forward.run_table(batch, adapter)
        self._count(result)
        return result.logits

    def _count(self, result: ForwardResult) -> None:
        self._forwards += result.forwards
        self._tokens_computed += result.tokens
