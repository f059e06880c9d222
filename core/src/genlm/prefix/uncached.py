"""The execution path of engines that computes every context whole, without a cache."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from genlm.core.rows.logits import rows_from_logits
from genlm.core.rows.text_scores import PieceScores, ScoredText, TextResult
from genlm.core.vocab import Vocabulary
from genlm.prefix.padding import BatchLimits, plan_batches

if TYPE_CHECKING:
    import torch

__all__ = ["UncachedPath"]


class UncachedPath(abc.ABC):
    """Computes the rows and scores of sequences whole, similar lengths together.

    It supports every model of an engine and is the reference for faster paths.

    Args:
        vocabulary: The tokenizer's vocabulary.
        limits: Limits of a batch.
        scores_by_rows: Whether a row depends on the length of its sequence, so that texts are
            scored from the rows of all their positions.

    Attributes:
        limits, scores_by_rows: As above; a subclass may change them before the first batch.
        can_score: True.
    """

    can_score = True

    def __init__(
        self, vocabulary: Vocabulary, limits: BatchLimits, *, scores_by_rows: bool = False
    ) -> None:
        self._vocabulary = vocabulary
        self.limits, self.scores_by_rows = limits, scores_by_rows
        self._forwards = self._tokens_computed = self._tokens_padded = 0

    @abc.abstractmethod
    def batch_logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits after each sequence of one batch, in passes that it counts."""

    @abc.abstractmethod
    def score_batch(self, texts: Sequence[tuple[ScoredText, int]], scores: PieceScores) -> None:
        """Add the logits of one batch of texts to `scores`, in passes that it counts.

        Args:
            texts: Texts, and the key of the first target of each.
            scores: Receives the logits; their keys continue the first key of each text.
        """

    def score_limits(self) -> BatchLimits:
        """Return the limits of a batch of `score_batch`."""
        return self.limits

    def rows(self, adapter: str | None, sequences: Sequence[Sequence[int]]) -> torch.Tensor:  # noqa: ARG002 - see ExecutionPath
        """Compute rows in as few batches as the limits allow."""
        batches = list(plan_batches([len(sequence) for sequence in sequences], self.limits))
        if len(batches) == 1:
            return rows_from_logits(self.batch_logits(sequences), self._vocabulary)
        rows: torch.Tensor | None = None
        for batch in batches:
            logits = self.batch_logits([sequences[i] for i in batch])
            found = rows_from_logits(logits, self._vocabulary)
            if rows is None:
                rows = found.new_empty((len(sequences), found.shape[1]))
            rows[batch] = found
        assert rows is not None  # noqa: S101 - there is at least one sequence
        return rows

    def next_pass(self, adapter: str | None, sequences: Sequence[Sequence[int]]) -> list[int]:  # noqa: ARG002 - see ExecutionPath
        """Choose the first context and those that share its batch."""
        batches = plan_batches([len(sequence) for sequence in sequences], self.limits)
        return next(batch for batch in batches if 0 in batch)

    def scores(self, adapter: str | None, texts: Sequence[ScoredText]) -> list[TextResult]:
        """Score texts in few batches, or one by one by the rows of all their positions."""
        scores = PieceScores(texts, self._vocabulary)
        if self.scores_by_rows:
            for text, first in zip(texts, scores.ends.tolist(), strict=False):
                self._score_by_rows(adapter, text, first, scores)
        else:
            lengths = [len(text.sequence) for text in texts]
            for batch in plan_batches(lengths, self.score_limits()):
                self.score_batch([(texts[i], int(scores.ends[i])) for i in batch], scores)
        return scores.results()

    def next_score_pass(self, adapter: str | None, texts: Sequence[ScoredText]) -> list[int]:
        """Choose the first text and those that share its batch; only it if rows score it."""
        if self.scores_by_rows:
            return [0]
        return self.next_pass(adapter, [text.sequence.token_ids for text in texts])

    def _score_by_rows(
        self, adapter: str | None, text: ScoredText, first_key: int, scores: PieceScores
    ) -> None:
        ids, most = text.sequence.token_ids, self.limits.max_rows
        for begin in range(0, len(text.targets), most):
            end = min(begin + most, len(text.targets))
            lengths = range(text.first + 1 + begin, text.first + 1 + end)
            rows = self.rows(adapter, [ids[:length] for length in lengths])
            scores.add(first_key + np.arange(begin, end), rows)

    def count(self, sequences: Sequence[Sequence[int]], forwards: int = 1) -> None:
        """Count the passes over a batch of sequences for `statistics`."""
        tokens = sum(map(len, sequences))
        self._forwards += forwards
        self._tokens_computed += tokens
        self._tokens_padded += len(sequences) * max(map(len, sequences)) - tokens

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of the tokens of contexts, of padding, and of passes."""
        return {
            "tokens_computed": self._tokens_computed,
            "tokens_padded": self._tokens_padded,
            "forwards": self._forwards,
        }
