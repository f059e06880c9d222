"""Consumers of the logits of a batch: they are copied, or reduced to scores."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from genlm.plugin import Vocabulary
from genlm.prefix import PieceScores, ScoredText, TextResult
from genlm_llamacpp.batch import TokenBatch
from genlm_llamacpp.sequences import Integers

__all__ = ["Logits", "Receiver", "Scores"]


class Receiver(abc.ABC):
    """Takes the logits of requests.

    Attributes:
        is_marked: Whether the sequences of the requests are indexed by their keys.
    """

    is_marked = True

    @abc.abstractmethod
    def begin(self, batch: TokenBatch, first: int) -> None:
        """Record the entries of the logits of requests, from request `first` on."""

    @abc.abstractmethod
    def receive(self, entries: Sequence[int], logits: torch.Tensor) -> None:
        """Consume the logits of entries of the batch; keep no reference to them."""

    def committed(self, first: int, numbers: Integers, versions: Integers) -> None:  # noqa: B027 - optional
        """Record the sequences and versions that hold the requests from `first` on."""


class Logits(Receiver):
    """Copies the logits after the last token of each request to a row of an array.

    Args:
        logits: The array, shape `(n, width)`.
        places: The row of each request.
        is_marked: Whether the sequences of the requests are indexed by their keys.

    Attributes:
        numbers: The sequence that held each request after its pass, shape `(len(places),)`.
        versions: Its version at that time; it changes when the sequence is evicted.
    """

    def __init__(
        self, logits: NDArray[np.float32], places: Integers, *, is_marked: bool
    ) -> None:
        self.is_marked = is_marked
        self._logits, self._places = logits, places
        self.numbers = np.full(len(places), -1)
        self.versions = np.zeros(len(places), np.int64)

    def begin(self, batch: TokenBatch, first: int) -> None:
        """Record the row of each entry."""
        self._place_of = np.full(len(batch.tokens), -1)
        last = np.array([entries[-1] for entries in batch.entries])
        self._place_of[last] = self._places[first : first + len(last)]

    def receive(self, entries: Sequence[int], logits: torch.Tensor) -> None:
        """Copy the logits of entries."""
        self._logits[self._place_of[entries]] = logits.numpy()

    def committed(self, first: int, numbers: Integers, versions: Integers) -> None:
        """Note the sequences of requests."""
        part = slice(first, first + len(numbers))
        self.numbers[part], self.versions[part] = numbers, versions


class Scores(Receiver):
    """Reduces the logits at the positions of texts as they arrive, and keeps no rows.

    Args:
        texts: The texts of the requests.
        vocabulary: Vocabulary of the rows.
    """

    def __init__(self, texts: Sequence[ScoredText], vocabulary: Vocabulary) -> None:
        self._pieces = PieceScores(texts, vocabulary)

    def begin(self, batch: TokenBatch, first: int) -> None:
        """Record the targets that follow entries of the batch, from request `first` on."""
        begin, end = self._pieces.ends[[first, first + len(batch.entries)]]
        keys = np.concatenate(batch.entries).astype(np.int64)
        self._pieces.expect(keys, np.arange(begin, end))

    def receive(self, entries: Sequence[int], logits: torch.Tensor) -> None:
        """Reduce the rows of these entries."""
        self._pieces.add(np.asarray(entries, np.int64), logits)

    def result(self) -> list[TextResult]:
        """Return the results of each request."""
        return self._pieces.results()
