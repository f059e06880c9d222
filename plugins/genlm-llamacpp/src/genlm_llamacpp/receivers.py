"""What becomes of the logits of a batch: rows, scores, or logits of a population."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from genlm.plugin import Vocabulary, rows_from_logits
from genlm.prefix import PieceScores, ScoredText, TextResult
from genlm_llamacpp.batch import TokenBatch
from genlm_llamacpp.sequences import Integers

__all__ = ["GroupLogits", "Receiver", "Rows", "Scores"]


class Receiver(abc.ABC):
    """Takes the logits of requests.

    Attributes:
        is_marked: Whether the sequences of the requests are found by their keys later.
    """

    is_marked: ClassVar[bool] = True

    @abc.abstractmethod
    def begin(self, batch: TokenBatch, first: int) -> None:
        """Note where the logits of requests will be, from request `first` on."""

    @abc.abstractmethod
    def receive(self, entries: Sequence[int], logits: torch.Tensor) -> None:
        """Take the logits of entries of the batch; they are not referred to afterwards."""

    def committed(self, first: int, numbers: Integers, versions: Integers) -> None:  # noqa: B027 - optional
        """Note which sequences, in which versions, hold the requests from `first` on."""


class GroupLogits(Receiver):
    """Copies logits to rows of an array, and notes which sequences hold them.

    Args:
        logits: The array.
        places: The row of each request.

    Attributes:
        numbers: The sequence that held each request after its pass, shape `(len(places),)`.
        versions: Its version then, which is another one if it was evicted since.
    """

    is_marked = False

    def __init__(self, logits: NDArray[np.float32], places: Integers) -> None:
        self._logits, self._places = logits, places
        self.numbers = np.full(len(places), -1)
        self.versions = np.zeros(len(places), np.int64)

    def begin(self, batch: TokenBatch, first: int) -> None:
        """Note which row belongs to which entry."""
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


class Rows(Receiver):
    """Collects a row for each request.

    Args:
        vocabulary: Of the rows.
        count: Number of requests.
    """

    def __init__(self, vocabulary: Vocabulary, count: int) -> None:
        self._vocabulary = vocabulary
        self._count = count
        self._rows: torch.Tensor | None = None

    def begin(self, batch: TokenBatch, first: int) -> None:
        """Note where the logits of requests will be, from request `first` on."""
        self._request_of = {
            int(entries[0]): first + index for index, entries in enumerate(batch.entries)
        }

    def receive(self, entries: Sequence[int], logits: torch.Tensor) -> None:
        """Normalise the logits of entries; they are not referred to afterwards."""
        rows = rows_from_logits(logits, self._vocabulary)
        indices = [self._request_of[entry] for entry in entries]
        if self._rows is None and indices == list(range(self._count)):
            self._rows = rows
            return
        if self._rows is None:
            self._rows = rows.new_empty((self._count, rows.shape[1]))
        self._rows[indices] = rows

    def result(self) -> torch.Tensor:
        """Return all rows, in the order of the requests."""
        assert self._rows is not None  # noqa: S101 - there is at least one request
        return self._rows


class Scores(Receiver):
    """Collects what is computed of the rows of texts, and keeps no rows.

    Args:
        texts: The texts of the requests.
        vocabulary: Of the rows.
    """

    def __init__(self, texts: Sequence[ScoredText], vocabulary: Vocabulary) -> None:
        self._pieces = PieceScores(texts, vocabulary)

    def begin(self, batch: TokenBatch, first: int) -> None:
        """Note which targets follow which entries of the batch, from request `first` on."""
        begin, end = self._pieces.ends[[first, first + len(batch.entries)]]
        keys = np.concatenate(batch.entries).astype(np.int64)
        self._pieces.expect(keys, np.arange(begin, end))

    def receive(self, entries: Sequence[int], logits: torch.Tensor) -> None:
        """Compute what is wanted of the rows of these entries."""
        self._pieces.add(np.asarray(entries, np.int64), logits)

    def result(self) -> list[TextResult]:
        """Return what was computed for each request."""
        return self._pieces.results()
