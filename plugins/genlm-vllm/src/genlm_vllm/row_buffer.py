"""`ROW_BUFFER`: the ids of rows, and scores of requests until the engine fetches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from genlm.plugin import EvaluationError, Reduction
from genlm.prefix import PieceScores, TextResult

__all__ = [
    "ROW_BUFFER",
    "Outputs",
    "RowBuffer",
    "VocabularyIds",
    "without_frames",
]

Outputs = tuple[Reduction | None, ...]
"""Requested outputs of a row, see `genlm.plugin.Query`."""


@dataclass(frozen=True)
class VocabularyIds:
    """The part of a vocabulary that makes rows; a worker has no tokenizer.

    Attributes:
        size: Number of ids.
        missing_ids: Ids below `size` without a token.
    """

    size: int
    missing_ids: tuple[int, ...] = ()


class RowBuffer:
    """The ids of rows, and scores by the key of their request.

    A request may be computed in several steps and, after it was preempted, begin again.

    Attributes:
        ids: The ids of the rows.
        active: Whether this process reduces rows: one of several tensor-parallel ranks does.
        alone: Whether no other rank computes the same logits, so that an error here may be
            handled here.
    """

    def __init__(self) -> None:
        self.reset(VocabularyIds(0), active=False)

    def reset(self, ids: VocabularyIds, *, active: bool, alone: bool = True) -> None:
        """Drop all scores and set the attributes."""
        self._results: dict[int, PieceScores | Exception] = {}
        self.ids = ids
        self.active = active
        self.alone = alone

    def add_scores(
        self,
        key: int,
        begin: Callable[[], PieceScores],
        wanted: range,
        logits: torch.Tensor,
    ) -> None:
        """Score some targets of a text, or reduce the rows that predict them.

        Args:
            key: Key of the text's request.
            begin: Returns the scorer of the text, or raises `EvaluationError`.
            wanted: Numbers of the targets.
            logits: Logits that predict them, shape `(len(wanted), width)`.
        """
        if key not in self._results:
            try:
                self._results[key] = begin()
            except EvaluationError as error:
                self.fail([key], error)
        scores = self._results[key]
        if isinstance(scores, PieceScores):
            scores.add(np.arange(wanted.start, wanted.stop), logits)

    def fail(self, keys: list[int], error: Exception) -> None:
        """Store an error, such as out of memory, which would end vLLM if it were raised."""
        self._results.update(dict.fromkeys(keys, without_frames(error)))

    def take(self, key: int) -> TextResult | Exception | None:
        """Remove and return the scores of a text, or the error that was stored.

        Returns None if some are missing: positions that vLLM's prefix cache served have none.
        """
        found = self._results.pop(key, None)
        if isinstance(found, PieceScores):
            return found.results()[0] if found.is_complete else None
        return found

    def __len__(self) -> int:
        return len(self._results)


def without_frames(error: Exception) -> Exception:
    """Return an error without the frames of its traceback, which would keep tensors alive."""
    error.__context__ = None
    return error.with_traceback(None)


ROW_BUFFER = RowBuffer()
"""The buffer of this process: of one live engine."""
