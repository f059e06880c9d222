"""Next-token rows of batches of sequences from a prefix tree.

`PrefixRows` owns the tree, its budget and its roll-backs. A `ForwardFn` runs the model over
the tokens that the tree does not have yet. Texts are scored by `TextScorer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from genlm.core.errors import EvaluationError
from genlm.core.rows import rows_from_logits
from genlm.core.sequence import TokenSequence
from genlm.core.vocab import Vocabulary
from genlm.prefix.continuation import TableBatch
from genlm.prefix.forward import ForwardFn, Receive, ScoringForward, TableForward, TreeBatch
from genlm.prefix.node import Node, slots_within
from genlm.prefix.populations import Populations
from genlm.prefix.scoring import TextScorer
from genlm.prefix.tree import End, OutOfSlotsError, PrefixTree, Tokens

if TYPE_CHECKING:
    import torch

    from genlm.core.generations import Integers64
    from genlm.core.query import GroupQuery
    from genlm.core.text_scores import ScoredText, TextResult

__all__ = ["PrefixRows"]

_Batch = list[tuple[int, Node]]
"""Index of a sequence and what the tree's `insert` returned for it."""

# `next_pass` looks at each pending sequence for microseconds; this bounds the total.
_MOST_PASSED_OVER = 256


class PrefixRows:
    """Answers batches of sequences from a prefix tree.

    A batch that needs more slots than can be freed is computed in several passes, and so
    is a context of more tokens than one pass may have.

    Args:
        forward: Runs the model over the tokens that are not in the tree yet.
        without_cache: Returns the row of a sequence too long for the whole budget, shape
            `(1, vocabulary.size)`, float32.
        score_without_cache: Scores a text too long for the whole budget; texts are scored only
            if it is given, and `forward` is a `ScoringForward`.
        vocabulary: The tokenizer's vocabulary.
        budget_bytes: Upper bound of the memory of keys and values.
        bytes_per_token: Memory of the keys and values of one token.
        max_tokens: Upper bound of the new tokens in one pass.
        max_rows: Upper bound of the results of one pass, which bounds its logits.

    Attributes:
        forward: As above.
        populations: Block tables of populations, if `forward` is a `TableForward`.
    """

    def __init__(
        self,
        forward: ForwardFn,
        *,
        without_cache: Callable[[tuple[int, ...]], torch.Tensor],
        vocabulary: Vocabulary,
        budget_bytes: int,
        bytes_per_token: int,
        max_tokens: int,
        max_rows: int,
        score_without_cache: Callable[[ScoredText], TextResult] | None = None,
    ) -> None:
        self.forward, self._without_cache = forward, without_cache
        self._vocabulary = vocabulary
        self._budget, self._token_bytes = budget_bytes, bytes_per_token
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._tree = PrefixTree(max(0, slots_within(budget_bytes, bytes_per_token) - 1))
        self._forwards = self._tokens_computed = self._contexts_without_cache = 0
        self._score_without_cache = score_without_cache
        self.populations: Populations | None = None
        if isinstance(forward, TableForward):
            self.populations = Populations(self._tree, max_tokens=max_tokens, max_rows=max_rows)

    def rows(self, adapter: str | None, sequences: Sequence[Tokens]) -> torch.Tensor:
        """Compute the next-token row of each sequence, in one pass or in several.

        When this raises, the tree holds computed tokens only.

        Args:
            adapter: Name of the adapter that is active in the model.
            sequences: At least one; ids that the model can embed, none empty. Those given as
                `TokenSequence` are found without a look at their ids.

        Returns:
            Shape `(len(sequences), vocabulary.size)`, float32, where the logits are.
        """
        self._collect()
        rows: torch.Tensor | None = None
        packed = [
            each if isinstance(each, TokenSequence) else TokenSequence.of(each)
            for each in sequences
        ]
        try:
            for chosen, found in self._parts(adapter, packed):
                if len(chosen) == len(sequences):
                    return found
                if rows is None:
                    rows = found.new_empty((len(sequences), found.shape[1]))
                rows[chosen] = found
        except BaseException:
            self._tree.roll_back()
            raise
        assert rows is not None  # noqa: S101 - there is at least one sequence
        return rows

    def next_pass(self, adapter: str | None, sequences: Sequence[Tokens]) -> Sequence[int]:
        """Choose sequences whose rows take one pass: the first, then those that still fit.

        The beginning of a first sequence longer than a pass takes passes of its own. Free
        slots are not considered.

        Args:
            adapter: Adapter of all sequences.
            sequences: At least one, the most urgent first.

        Returns:
            Their indices, in order, 0 among them.
        """
        total = sum(map(len, sequences))
        if len(sequences) <= self._max_rows and total + len(sequences) <= self._max_tokens:
            return range(len(sequences))
        chosen: list[int] = []
        passed_over, room = 0, self._max_tokens
        ahead: PrefixTree | None = None  # what the pass will compute, each token once
        for index, sequence in enumerate(sequences):
            new = self._tree.missing(adapter, sequence)
            if new > 1:
                ahead = ahead or PrefixTree(total)
                new = min(new, ahead.missing(adapter, sequence))
            if chosen and new > room:
                passed_over += 1
                if passed_over > _MOST_PASSED_OVER:
                    break
                continue
            while new > room:
                new -= room
            if ahead is not None:
                ahead.insert(adapter, sequence)
            chosen.append(index)
            room -= new + 1  # a cached last token is run again
            if len(chosen) == self._max_rows:
                break
        return chosen

    @property
    def can_score(self) -> bool:
        """Whether it scores texts."""
        return self._score_without_cache is not None and isinstance(
            self.forward, ScoringForward
        )

    def scores(self, adapter: str | None, texts: Sequence[ScoredText]) -> list[TextResult]:
        """Score texts: each position that is not cached is computed once, in few passes.

        When this raises, the tree holds computed tokens only.

        Args:
            adapter: Name of the adapter that is active in the model.
            texts: At least one; ids that the model can embed.

        Returns:
            As `PieceScores.results`.
        """
        assert isinstance(self.forward, ScoringForward)  # noqa: S101 - our own mistake
        self._collect()
        limit = self._max_tokens
        if not self.forward.scores_in_pieces():
            limit = min(limit, self._max_rows)
        return self._scorer().scores(adapter, texts, limit)

    def next_score_pass(
        self, adapter: str | None, texts: Sequence[ScoredText]
    ) -> Sequence[int]:
        """Choose texts whose scores take one pass: the first, then those that still fit.

        Args:
            adapter: Adapter of all texts.
            texts: At least one, the most urgent first.

        Returns:
            Their indices, in order, 0 among them.
        """
        return self._scorer().next_pass(adapter, texts, self._max_tokens)

    def _scorer(self) -> TextScorer:
        # Not kept: it refers to this object, which would then live until a garbage collection.
        return TextScorer(
            self._tree,
            self._score_pass,
            without_cache=self._scored_alone,
            vocabulary=self._vocabulary,
        )

    def group_logits(self, group: GroupQuery, places: Integers64) -> torch.Tensor | None:
        """Compute the logits of sequences of a population; see `Populations.logits`."""
        assert self.populations is not None  # noqa: S101 - our own mistake
        return self.populations.logits(group, places, self._table_pass)

    def keep(self, adapter: str | None, token_ids: tuple[int, ...]) -> None:
        """Compute a prefix and keep it until `clear`.

        Raises:
            EvaluationError: It does not fit into the budget beside the prefixes kept already.
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
        """Remove everything computed with an adapter, kept prefixes included."""
        if self.populations is not None:
            self.populations.drop(adapter)
        self._tree.drop(adapter)

    def clear(self) -> None:
        """Remove everything computed from the tree, kept prefixes included."""
        if self.populations is not None:
            self.populations.clear()
        self._tree.clear()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of work and the state of the cache. Thread-safe."""
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
                yield [index], self._without_cache(sequence.token_ids)
            else:
                batch.append((index, node))
        if batch:
            yield self._run(adapter, sequences, batch)

    def _insert(
        self, adapter: str | None, sequence: TokenSequence, members: int
    ) -> Node | None:
        """Insert a sequence unless it makes the batch larger than a pass, or slots are few.

        The first of a batch's members may be of any length.
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
            What the tree returns for the whole sequence, inserted again.
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

    def _compute(self, wanted: TreeBatch) -> torch.Tensor:
        """Compute a batch of the tree, end it, and return the requested logits."""
        result = self.forward(wanted)
        self._commit(result.tokens, result.forwards)
        return result.logits

    def _table_pass(self, batch: TableBatch, adapter: str | None) -> torch.Tensor:
        """Compute a pass of a population and return its logits."""
        assert isinstance(self.forward, TableForward)  # noqa: S101 - our own mistake
        result = self.forward.run_table(batch, adapter)
        self._forwards += result.forwards
        self._tokens_computed += result.tokens
        return result.logits

    def _score_pass(self, wanted: TreeBatch, ends: Sequence[End], receive: Receive) -> None:
        """Compute a batch of the tree, end it, and give the wanted logits to `receive`."""
        assert isinstance(self.forward, ScoringForward)  # noqa: S101 - our own mistake
        self._commit(*self.forward.score(wanted, receive), ends)

    def _scored_alone(self, text: ScoredText) -> TextResult:
        assert self._score_without_cache is not None  # noqa: S101 - our own mistake
        self._contexts_without_cache += 1
        return self._score_without_cache(text)

    def _commit(self, tokens: int, forwards: int, ends: Sequence[End] = ()) -> None:
        self._tree.commit(ends)
        self._forwards += forwards
        self._tokens_computed += tokens
