"""Logits of many positions, a few at a time.

A pass has small hidden states for all its positions, but logits of the vocabulary's width. The
model's decoder runs once; then the model runs for each few positions, with the decoder
replaced by a function that returns the hidden states of these. So the model itself applies the
output embedding and any scaling or capping of logits. A test, once per model, checks the
logits; models that fail it compute all logits of a pass.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["OutputPieces"]

Pass = TypeVar("Pass")
Decoder = TypeVar("Decoder")

# Largest difference from the ordinary logits, relative to the largest of those.
_TOLERANCE, _COARSE_TOLERANCE = 1e-4, 0.05

# Number of tested positions at a time.
_TESTED_AT_ONCE = 3


class OutputPieces(abc.ABC, Generic[Pass, Decoder]):
    """Applies the output embedding of a model to many positions, a few at a time.

    Subclasses run the models of one library, whose arrays have `shape`, `reshape` and slices.

    Args:
        logger: Logger of the reasons for which decoders are not used.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._decoder: Decoder | None = None
        self._is_tested = False
        self._step = 1

    @property
    def are_small(self) -> bool:
        """Whether the logits of a pass are never in memory at once.

        The first time this runs the model on a few tokens.
        """
        if not self._is_tested:
            self._decoder = next(self._right_decoders(), None)
            self._is_tested = True
            if self._decoder is None:
                self._logger.info("logits are computed for all positions of a pass at once")
        return self._decoder is not None

    def compute(
        self, work: Pass, take: Callable[[Any], Any], receive: Callable[[slice, Any], None]
    ) -> None:
        """Run a pass and pass on the logits of some positions.

        Args:
            work: The pass, as `run` takes it.
            take: Selects n positions of arrays of shape `(*shape of the ids, width)`; returns
                `(1, n, width)`.
            receive: Receives indices into the n positions, and their logits, shape
                `(positions, width of the model's output)`.
        """
        if self.are_small and self._decoder is not None:
            self._compute(self._decoder, work, take, receive, self._step)
        else:
            logits = self.as_tensor(self.run_whole(work, take)[0])
            receive(slice(0, len(logits)), logits)

    # -- the library ------------------------------------------------------------------

    @abc.abstractmethod
    def sample(self) -> Pass:
        """Return a pass over two short sequences of equal length."""

    @abc.abstractmethod
    def run(self, work: Pass) -> Any:
        """Run the model and return its logits."""

    def run_whole(self, work: Pass, take: Callable[[Any], Any]) -> Any:
        """Run the model without pieces and return the logits of some positions."""
        return take(self.run(work))

    @abc.abstractmethod
    def decoders(self) -> Iterator[Decoder]:
        """Yield the modules that may return the hidden states of the last layer."""

    @abc.abstractmethod
    def replaced(
        self, decoder: Decoder, states: Callable[[Callable[[], Any]], Any]
    ) -> AbstractContextManager[None]:
        """Let `states` of a function that runs the decoder replace its hidden states."""

    @abc.abstractmethod
    def positions_at_once(self, width: int) -> int:
        """Return the number of positions of a piece by the width of the model's output."""

    @abc.abstractmethod
    def is_exact(self, logits: Any) -> bool:
        """Whether the model computes these logits in float32 or more."""

    @abc.abstractmethod
    def as_tensor(self, logits: Any) -> torch.Tensor:
        """Return logits as a tensor."""

    # -- internals --------------------------------------------------------------------

    def _compute(
        self,
        decoder: Decoder,
        work: Pass,
        take: Callable[[Any], Any],
        receive: Callable[[slice, Any], None],
        step: int,
    ) -> int:
        """Pass on logits of `step` positions at a time; return how often the decoder ran."""
        taken: Any = None
        runs = first = 0

        def states(run_decoder: Callable[[], Any]) -> Any:
            nonlocal taken, runs
            if taken is None:
                taken, runs = take(run_decoder()), runs + 1
            return taken[:, first : first + step]

        with self.replaced(decoder, states):
            while not first or first < taken.shape[1]:
                logits = self.as_tensor(self.run(work)[0])
                if taken is None:  # the model does not run this module
                    break
                receive(slice(first, first + len(logits)), logits)
                del logits
                first += step
        return runs

    def _right_decoders(self) -> Iterator[Decoder]:
        """Yield the modules whose hidden states give the ordinary logits."""
        for decoder in self.decoders():
            try:
                if self._is_right(decoder):
                    yield decoder
            except Exception as error:  # noqa: BLE001 - the model has another form
                self._logger.info("not in pieces: %s: %s", type(error).__name__, error)

    def _is_right(self, decoder: Decoder) -> bool:
        def take(states: Any) -> Any:
            return states.reshape(1, -1, states.shape[-1])

        work, step = self.sample(), _TESTED_AT_ONCE
        whole = self.run_whole(work, take)[0]
        expected = self.as_tensor(whole)
        self._step = self.positions_at_once(expected.shape[1])
        pieces: list[tuple[slice, torch.Tensor]] = []
        runs = self._compute(
            decoder, work, take, lambda part, found: pieces.append((part, found.clone())), step
        )
        ends = [min(first + step, len(expected)) for first in range(0, len(expected), step)]
        if runs != 1 or [part.stop for part, _ in pieces] != ends:
            return False
        difference = max(float((found - expected[part]).abs().max()) for part, found in pieces)
        tolerance = _TOLERANCE if self.is_exact(whole) else _COARSE_TOLERANCE
        return difference <= tolerance * max(1.0, float(expected.abs().max()))
