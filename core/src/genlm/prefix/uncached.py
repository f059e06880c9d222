"""The execution path of engines that computes all tokens of every context, without a cache."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from genlm.core.base.statistics import Count
from genlm.core.queries.generations import Integers64
from genlm.core.queries.query import Query
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.logits import rows_from_logits
from genlm.core.rows.text_scores import PieceScores, TextResult
from genlm.core.vocab import Vocabulary
from genlm.prefix.padding import BatchLimits, plan_batches
from genlm.prefix.segment_forward import PassLogits

if TYPE_CHECKING:
    import torch


class UncachedPath(abc.ABC):
    """Computes all tokens of sequences; sequences of similar lengths share a batch.

    It supports every model of an engine and is the reference for faster paths.

    Args:
        vocabulary: The tokenizer's vocabulary.
        limits: Limits of a batch.

    Attributes:
        limits: As above; a subclass may change them before the first batch.
        scores_by_rows: Whether a row depends on the length of its sequence, so that texts are
            scored from the rows of all their positions; set by a subclass.
    """

    scores_by_rows = False

    def __init__(self, vocabulary: Vocabulary, limits: BatchLimits) -> None:
        self._vocabulary, self.limits = vocabulary, limits
        self._forwards = self._tokens_computed = self._tokens_padded = 0

    @abc.abstractmethod
    def run(
        self, sequences: Sequence[Sequence[int]], firsts: Integers64
    ) -> Iterator[tuple[Integers64, torch.Tensor]]:
        """Compute one batch, in passes that it counts, and yield the requested logits.

        Args:
            sequences: The sequences.
            firsts: The position in each sequence from which on logits are requested.

        Yields:
            Sequences and positions in them, shape `(2, n)`, and their logits. If only the last
            positions are requested, the logits of all sequences at once, in order.
        """

    def rows(self, adapter: str | None, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """Compute rows in as few batches as the limits allow."""
        [logits] = self.logits_by_pass(adapter, sequences)
        return rows_from_logits(logits, self._vocabulary)

    def logits_by_pass(
        self,
        adapter: str | None,  # noqa: ARG002 - see PrefixRows
        sequences: Sequence[TokenSequence],
    ) -> Generator[torch.Tensor, None, None]:
        """Yield the last logits of sequences, in as few batches as the limits allow."""
        requested = PassLogits(np.arange(len(sequences)))
        for batch in plan_batches([len(sequence) for sequence in sequences], self.limits):
            lasts = np.array([len(sequences[i]) - 1 for i in batch])
            [(_, logits)] = self.run([sequences[i].token_ids for i in batch], lasts)
            requested.add(np.array(batch), logits)
        yield requested.logits

    def next_pass(
        self,
        adapter: str | None,  # noqa: ARG002 - see PrefixRows
        sequences: Sequence[TokenSequence],
        firsts: Sequence[int] | None = None,
    ) -> Sequence[int]:
        """Choose the first sequence and those that share its batch; see `PrefixRows`."""
        if firsts is not None and self.scores_by_rows:
            return [0]
        limits = self.limits if firsts is None else self.score_limits
        batches = plan_batches([len(sequence) for sequence in sequences], limits)
        return next(batch for batch in batches if 0 in batch)

    def scores_by_pass(
        self, adapter: str | None, texts: Sequence[Query]
    ) -> Generator[list[TextResult], None, None]:
        """Yield scores, computed in few batches, or by the rows of all positions of a text."""
        scores = PieceScores(texts, self._vocabulary)
        if self.scores_by_rows:
            for text, first in zip(texts, scores.ends.tolist(), strict=False):
                self._score_by_rows(adapter, text, first, scores)
            yield scores.results()
            return
        for batch in plan_batches([len(text.sequence) for text in texts], self.score_limits):
            firsts = np.array([texts[i].first_target for i in batch])
            sequences = [texts[i].sequence.token_ids for i in batch]
            for (rows, positions), logits in self.run(sequences, firsts):
                scores.add(scores.ends[batch][rows] + positions - firsts[rows], logits)
        yield scores.results()

    @property
    def score_limits(self) -> BatchLimits:
        """Limits of a batch of texts; the logits of all its positions may be requested."""
        max_tokens = min(self.limits.max_tokens, self.limits.max_rows)
        return dataclasses.replace(self.limits, max_tokens=max_tokens)

    def _score_by_rows(
        self, adapter: str | None, text: Query, first_key: int, scores: PieceScores
    ) -> None:
        ids, max_rows = text.sequence.token_ids, self.limits.max_rows
        for begin in range(0, len(text.targets), max_rows):
            end = min(begin + max_rows, len(text.targets))
            lengths = range(text.first_target + 1 + begin, text.first_target + 1 + end)
            prefixes = [TokenSequence.of(ids[:length]) for length in lengths]
            [logits] = self.logits_by_pass(adapter, prefixes)
            scores.add(first_key + np.arange(begin, end), logits)

    def count(self, sequences: Sequence[Sequence[int]], forwards: int = 1) -> None:
        """Count the passes over a batch of sequences for `statistics`."""
        tokens = sum(map(len, sequences))
        self._forwards += forwards
        self._tokens_computed += tokens
        self._tokens_padded += len(sequences) * max(map(len, sequences)) - tokens

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of the tokens of contexts, of padding, and of passes."""
        return {
            "tokens_computed": Count(self._tokens_computed),
            "tokens_padded": Count(self._tokens_padded),
            "forwards": Count(self._forwards),
        }
