"""Next-token rows of batches of sequences from a prefix tree.

`PrefixRows` owns the tree, its budget and its roll-backs. A `ForwardFn` runs the model over
the uncached tokens. `TextScorer` scores texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from genlm.core.base.errors import EvaluationError
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.logits import rows_from_logits
from genlm.core.vocab import Vocabulary
from genlm.prefix.continuation import TableBatch
from genlm.prefix.forward import ForwardFn, ForwardResult, TableForward, TreeBatch
from genlm.prefix.node import Node, slots_within
from genlm.prefix.populations import Populations
from genlm.prefix.scoring import TextScorer
from genlm.prefix.tree import End, OutOfSlotsError, PrefixTree, Tokens
from genlm.prefix.uncached import UncachedPath

if TYPE_CHECKING:
    import torch

    from genlm.core.queries.generations import Integers64
    from genlm.core.queries.query import GroupQuery
    from genlm.core.rows.text_scores import ScoredText, TextResult

__all__ = ["PrefixRows"]

_Batch = list[tuple[int, Node]]
"""Index of a sequence and its node from the tree's `insert`."""

# Limit of the time of `next_pass`, which takes microseconds per pending sequence.
_MOST_PASSED_OVER = 256


class PrefixRows:
    """Computes the rows of batches of sequences with a prefix tree.

    A batch that needs more slots than can be freed, or a context of more tokens than the
    maximum of a pass, is computed in several passes.

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
        populations: Block tables of populations, if `forward` is a `TableForward`.
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
        self.populations: Populations | None = None
        if isinstance(forward, TableForward):
            self.populations = Populations(self._tree, max_tokens=max_tokens, max_rows=max_rows)

    def rows(self, adapter: str | None, sequences: Sequence[Tokens]) -> torch.Tensor:
        """Compute the next-token rows of sequences, in one or several passes.

        After an exception, the tree contains only computed tokens.

        Args:
            adapter: Name of the adapter that is active in the model.
            sequences: At least one sequence of at least one id that the model can embed. The
                tree finds a `TokenSequence` without reading its ids.

        Returns:
            Shape `(len(sequences), vocabulary.size)`, float32, on the device of the logits.
        """
        self._collect()
        rows: torch.Tensor | None = None
        packed = [
            each if isinstance(each, TokenSequence) else TokenSequence.of(each)
            for each in sequences
        ]
        with self._restored():
            for chosen, found in self._parts(adapter, packed):
                if len(chosen) == len(sequences):
                    return found
                if rows is None:
                    rows = found.new_empty((len(sequences), found.shape[1]))
                rows[chosen] = found
        assert rows is not None  # noqa: S101 - there is at least one sequence
        return rows

    def next_pass(
        self,
        adapter: str | None,
        sequences: Sequence[Tokens],
        firsts: Sequence[int] | None = None,
    ) -> Sequence[int]:
        """Choose sequences that take one pass: the first, then others that fit.

        The beginning of a first sequence that is longer than a pass takes separate passes. Free
        slots are not considered.

        Args:
            adapter: Adapter of all sequences.
            sequences: At least one sequence, the most urgent first.
            firsts: The position in each sequence from which on logits are requested; None for
                the last positions only.

        Returns:
            Indices of the chosen sequences, ascending, including 0.
        """
        total, limit, extra = sum(map(len, sequences)), self._score_limit, 0
        if firsts is None:
            limit, extra = self._max_tokens, 1  # a cached last token is recomputed
        if len(sequences) <= self._max_rows and total + extra * len(sequences) <= limit:
            return range(len(sequences))
        chosen: list[int] = []
        passed_over, room = 0, limit
        ahead: PrefixTree | None = None  # tokens of the pass, without repetition
        recomputed: set[int] = set()  # slots of cached tokens
        for index, sequence in enumerate(sequences):
            new = self._tree.missing(adapter, sequence)
            first = len(sequence) if firsts is None else firsts[index]
            again = self._tree.slots(adapter, sequence, first, len(sequence) - new) - recomputed
            if new > 1:
                ahead = ahead or PrefixTree(total)
                new = min(new, ahead.missing(adapter, sequence))
            cost = new + len(again)
            if chosen and cost > room:
                passed_over += 1
                if passed_over > _MOST_PASSED_OVER:
                    break
                continue
            while cost > room:
                cost -= room
            if ahead is not None:
                ahead.insert(adapter, sequence)
            recomputed |= again
            chosen.append(index)
            room -= cost + extra
            if room <= 0 or len(chosen) == self._max_rows:
                break
        return chosen

    def scores(self, adapter: str | None, texts: Sequence[ScoredText]) -> list[TextResult]:
        """Score texts in few passes, with one computation per uncached position.

        After an exception, the tree contains only computed tokens.

        Args:
            adapter: Name of the adapter that is active in the model.
            texts: At least one text of ids that the model can embed.

        Returns:
            As `PieceScores.results`.
        """
        self._collect()
        with self._restored():
            return self._scorer().scores(adapter, texts)

    @property
    def _score_limit(self) -> int:
        """Maximum number of tokens of a pass of texts; all of their logits may be requested."""
        return min(self._max_tokens, self._max_rows)

    def _scorer(self) -> TextScorer:
        # Not stored: it refers to this object, and the cycle would delay freeing it.
        return TextScorer(
            self._tree,
            self._compute,
            without_cache=self._scored_alone,
            vocabulary=self._vocabulary,
            limit=self._score_limit,
        )

    def group_logits(self, group: GroupQuery, places: Integers64) -> torch.Tensor | None:
        """Compute the logits of sequences of a population; see `Populations.logits`."""
        assert self.populations is not None  # noqa: S101 - our own mistake
        with self._restored():
            return self.populations.logits(group, places, self._table_pass)

    def keep(self, adapter: str | None, token_ids: tuple[int, ...]) -> None:
        """Compute a prefix and pin it until `clear`.

        Raises:
            EvaluationError: The prefix does not fit into the budget with the pinned prefixes.
        """
        before = self._contexts_without_cache
        self.rows(adapter, [token_ids])
        if self._contexts_without_cache > before:
            raise EvaluationError(
                f"a prefix of {len(token_ids)} tokens does not fit into the "
                f"{self._tree.capacity} tokens of kv_budget_bytes={self._budget} beside "
                f"the prefixes kept already; raise kv_budget_bytes or call clear_kv_cache first"
            )
        self._tree.pin(adapter, token_ids)

    def release(self, adapter: str | None, key: bytes) -> None:
        """Evict a context before others; see `PrefixTree.release`."""
        self._tree.release(adapter, key)

    def drop(self, adapter: str) -> None:
        """Remove all tokens computed with an adapter, including pinned prefixes."""
        if self.populations is not None:
            self.populations.drop(adapter)
        self._tree.drop(adapter)

    def clear(self) -> None:
        """Remove all computed tokens, including pinned prefixes."""
        if self.populations is not None:
            self.populations.clear()
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
    def _restored(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def _collect(self) -> None:
        """Free the slots of populations that were dropped."""
        if self.populations is not None:
            self.populations.collect()

    def _parts(
        self, adapter: str | None, sequences: Sequence[TokenSequence]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield places of sequences, oldest first, and their rows."""
        batch: _Batch = []
        for index, sequence in enumerate(sequences):
            node = self._insert(adapter, sequence, len(batch))
            if node is None and batch:
                yield self._run(adapter, sequences, batch)
                batch = []
                node = self._insert(adapter, sequence, 0)
            if node is not None and self._tree.uncached_tokens > self._max_tokens:
                node = self._insert_in_pieces(adapter, sequence)
            if node is None:
                # No token is uncached: this releases the cached prefix.
                self._tree.roll_back()
                self._contexts_without_cache += 1
                yield [index], self._uncached.rows(adapter, [sequence.token_ids])
            else:
                batch.append((index, node))
        if batch:
            yield self._run(adapter, sequences, batch)

    def _insert(
        self, adapter: str | None, sequence: TokenSequence, members: int
    ) -> Node | None:
        """Insert a sequence unless the batch would exceed a pass or the available slots.

        The first sequence of a batch may have any length.
        """
        room = None
        if members:
            room = self._max_tokens - self._tree.uncached_tokens - members
            if members >= self._max_rows or room < 0:
                return None
        try:
            return self._tree.insert(adapter, sequence, at_most=room)
        except OutOfSlotsError:
            return None

    def _insert_in_pieces(self, adapter: str | None, sequence: TokenSequence) -> Node:
        """Compute the beginning of a batch's only sequence in passes of the largest size.

        Returns:
            The node of the whole sequence, inserted again.
        """
        self._tree.roll_back()  # frees its slots, which suffice for every piece
        limit, ids = self._max_tokens, sequence.token_ids
        while (missing := self._tree.missing(adapter, sequence)) > limit:
            piece = TokenSequence.of(ids[: len(ids) - missing + limit])
            node = self._tree.insert(adapter, piece)
            self._compute(TreeBatch(self._tree, adapter, [piece], [node]))
        return self._tree.insert(adapter, sequence)

    def _run(
        self, adapter: str | None, sequences: Sequence[TokenSequence], batch: _Batch
    ) -> tuple[list[int], torch.Tensor]:
        """Compute the rows of a batch and end it."""
        chosen = [index for index, _ in batch]
        wanted = TreeBatch(
            self._tree, adapter, [sequences[i] for i in chosen], [node for _, node in batch]
        )
        return chosen, rows_from_logits(self._compute(wanted), self._vocabulary)

    def _compute(self, wanted: TreeBatch, ends: Sequence[End] = ()) -> torch.Tensor:
        """Compute a batch of the tree, end it, and return the requested logits."""
        result = self.forward(wanted)
        self._tree.commit(ends)
        self._count(result)
        return result.logits

    def _table_pass(self, batch: TableBatch, adapter: str | None) -> torch.Tensor:
        """Compute a pass of a population and return its logits."""
        assert isinstance(self.forward, TableForward)  # noqa: S101 - our own mistake
        result = self.forward.run_table(batch, adapter)
        self._count(result)
        return result.logits

    def _scored_alone(self, adapter: str | None, text: ScoredText) -> TextResult:
        self._contexts_without_cache += 1
        return self._uncached.scores(adapter, [text])[0]

    def _count(self, result: ForwardResult) -> None:
        self._forwards += result.forwards
        self._tokens_computed += result.tokens
