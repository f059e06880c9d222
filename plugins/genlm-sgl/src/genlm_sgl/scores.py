"""Scores of given tokens, computed from the hidden states of each of SGLang's passes.

SGLang computes the hidden states of all tokens of a pass and the logits of the last one of each
request. Here the logits of the wanted positions are computed as well, in pieces, before its
logits processor runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from genlm.plugin import EvaluationError, Query, Reduced, TokenScores, Vocabulary, device_index
from genlm.prefix import PieceScores, ScoredText
from genlm_sgl.score_api import ComputeLogits

__all__ = ["Span", "TextScores", "score_spans"]

_VALUES = 2**24
"""Maximum number of logits computed at once, for any text length: 64 MiB in float32."""


class TextScores:
    """The scores of one query, which SGLang may compute in several passes.

    Args:
        query: A query with targets.
        vocabulary: Decides which logits count, as for rows.
    """

    def __init__(self, query: Query, vocabulary: Vocabulary) -> None:
        self._targets = query.targets
        self._first = len(query) - len(query.targets)
        self._pieces = PieceScores([ScoredText.of(query)], vocabulary)
        self._known = 0

    def wanted(self, begin: int, length: int) -> range:
        """Return the targets without scores that follow some tokens of the query.

        Args:
            begin: Position of the first of these tokens.
            length: Number of tokens.
        """
        start = max(self._known, begin - self._first)
        return range(start, max(start, min(len(self._targets), begin + length - self._first)))

    def position(self, target: int) -> int:
        """Return the position of the token that a target follows."""
        return self._first + target

    def add(self, targets: range, logits: torch.Tensor) -> None:
        """Score targets, given the logits after the tokens before them."""
        self._pieces.add(np.arange(targets.start, targets.stop), logits)
        if targets.start == self._known:
            self._known = targets.stop

    def result(self) -> TokenScores | Reduced:
        """Return the scores.

        Raises:
            EvaluationError: A row is not a distribution, or SGLang did not compute a position.
        """
        if self._known < len(self._targets):
            raise EvaluationError(
                f"SGLang computed the positions of {self._known} of {len(self._targets)} "
                f"targets in order; the radix cache served others"
            )
        [found] = self._pieces.results()
        if isinstance(found, EvaluationError):
            raise found
        return found


class Span(NamedTuple):
    """Targets that follow tokens of one pass.

    Attributes:
        scores: Receiver of the scores.
        targets: Indices of the targets.
        row: Index of the first of the tokens among the hidden states of the pass.
    """

    scores: TextScores
    targets: range
    row: int


def score_spans(
    spans: Sequence[Span], states: torch.Tensor, compute_logits: ComputeLogits, width: int
) -> None:
    """Score the targets of a pass, in pieces of a bounded number of logits.

    Args:
        spans: Requested targets.
        states: Hidden states of all tokens of the pass.
        compute_logits: Computes logits of hidden states.
        width: Number of logits per position.
    """
    for piece in _pieces(spans, max(1, _VALUES // width)):
        rows = [each.row + place for each in piece for place in range(len(each.targets))]
        logits = compute_logits(states[device_index(rows, states.device)])
        parts = torch.split(logits, [len(each.targets) for each in piece])
        for each, part in zip(piece, parts, strict=True):
            each.scores.add(each.targets, part)


def _pieces(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    """Divide spans into groups of `size` targets."""
    piece: list[Span] = []
    room = size
    for scores, targets, row in spans:
        done = 0
        while done < len(targets):
            part = targets[done : done + room]
            piece.append(Span(scores, part, row + done))
            done += len(part)
            room -= len(part)
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece
