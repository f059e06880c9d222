"""Logits of many positions, a few at a time.

A pass has small hidden states for all its positions, but logits of the vocabulary's width. The
model's decoder is run once; then the model is called for each few positions, with a stand-in
for its decoder that returns the hidden states of these. So the model itself applies the output
embedding and any scaling or capping of logits. A test, once per model, checks the logits;
models that fail it compute all logits of a pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.nn.layers.base import Module

__all__ = ["OutputPieces", "as_tensor"]

_logger = logging.getLogger("genlm_mlx")

# Logits at once: 32 MiB in float32. Each piece reads the whole output embedding.
_LOGITS_AT_ONCE = 2**23

# Largest difference from the ordinary logits, relative to the largest of those.
_TOLERANCE, _COARSE_TOLERANCE = 1e-4, 0.05

Take = Callable[[mx.array], mx.array]
Receive = Callable[[slice, torch.Tensor], None]


class OutputPieces:
    """Applies the output embedding of a model to many positions, a few at a time.

    Args:
        model: An mlx-lm model.
        width: Width of its output; None to determine it.
    """

    def __init__(self, model: Any, width: int | None = None) -> None:
        self._model, self._width = model, width
        self._decoder: tuple[Any, str] | None = None
        self._is_tested = False

    @property
    def are_small(self) -> bool:
        """Whether the logits of a pass are never in memory at once.

        The first time this runs the model on a few tokens.
        """
        if not self._is_tested:
            self._decoder = next(self._tested_decoders(), None)
            self._is_tested = True
        return self._decoder is not None

    def compute(
        self,
        run: Callable[[], mx.array],
        take: Take,
        settle: Callable[[mx.array], None],
        receive: Receive,
    ) -> None:
        """Run a pass and pass on the logits of some positions.

        Args:
            run: Calls the model; the caches of later calls are not used.
            take: Selects n positions of an array of shape `(sequences, tokens, width)`;
                returns `(1, n, width)`.
            settle: Evaluates the given array and the stored keys and values.
            receive: Receives indices into the n positions, and their logits, shape
                `(positions, width of the model's output)`, float32, on the CPU.
        """
        if not self.are_small or self._decoder is None:
            logits = take(run())[0].astype(mx.float32)
            settle(logits)
            receive(slice(0, logits.shape[0]), as_tensor(logits))
            return
        step = max(1, _LOGITS_AT_ONCE // (self._width or 1))
        self._compute(self._decoder, run, take, settle, receive, step)

    @staticmethod
    def _compute(  # noqa: PLR0917 - the parts of `compute`
        decoder: tuple[Any, str],
        run: Callable[[], mx.array],
        take: Take,
        settle: Callable[[mx.array], None],
        receive: Receive,
        step: int,
    ) -> int:
        """Pass on logits of `step` positions at a time; return how often the decoder ran."""
        parent, name = decoder
        module = parent[name]
        states: mx.array | None = None
        runs = first = 0

        def decode(*args: Any, **kwargs: Any) -> mx.array:
            nonlocal states, runs
            if states is None:
                if not args or args[0].dtype != mx.int32:
                    raise ValueError("it does not take token ids, so others run before it")
                states, runs = take(module(*args, **kwargs)), runs + 1
            return states[:, first : first + step]

        with _replaced(parent, name, _StandIn(module, decode)):
            logits = run()
            if states is None:
                return 0
            settle(states)
            while True:
                part = logits[0].astype(mx.float32)
                receive(slice(first, first + part.shape[0]), as_tensor(part))
                first += step
                if first >= states.shape[1]:
                    return runs
                logits = run()

    def _tested_decoders(self) -> Iterator[tuple[Any, str]]:
        """Yield the modules whose hidden states give the ordinary logits."""
        for parent, name in _modules(self._model):
            try:
                if self._is_right((parent, name)):
                    yield parent, name
            except Exception as error:  # noqa: BLE001 - the model has another form
                _logger.debug("not %s: %s: %s", name, type(error).__name__, error)

    def _is_right(self, decoder: tuple[Any, str]) -> bool:
        ids = mx.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]], mx.int32)

        def run() -> mx.array:
            logits: mx.array = self._model(ids)
            return logits

        def take(states: mx.array) -> mx.array:
            return states.reshape(1, -1, states.shape[-1])

        found: list[torch.Tensor] = []
        runs = self._compute(
            decoder, run, take, mx.eval, lambda _, logits: found.append(logits), 3
        )
        logits = take(run())[0]
        self._width = int(logits.shape[-1])
        if runs != 1 or [len(part) for part in found] != [3, 3, 3, 1]:
            return False
        expected = as_tensor(logits.astype(mx.float32))
        tolerance = _TOLERANCE if logits.dtype == mx.float32 else _COARSE_TOLERANCE
        difference = (torch.cat(found) - expected).abs().max()
        return bool(difference <= tolerance * expected.abs().max().clamp(min=1))


class _StandIn:
    """Stand-in for a module: same attributes, another `__call__`."""

    def __init__(self, module: Any, call: Callable[..., mx.array]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _modules(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield the modules in a model and in these, as parents and names, inner ones first."""
    for name, child in model.children().items():
        if isinstance(child, Module):
            for inner, module in child.children().items():
                if isinstance(module, Module):
                    yield child, inner
            yield model, name


@contextmanager
def _replaced(parent: Any, name: str, stand_in: _StandIn) -> Iterator[None]:
    """Replace a child of a module within this context; modules are dictionaries."""
    module = parent[name]
    parent[name] = stand_in
    try:
        yield
    finally:
        parent[name] = module


def as_tensor(array: mx.array) -> torch.Tensor:
    """Return a float32 array as a tensor on the CPU."""
    mx.eval(array)
    return torch.from_numpy(np.array(array))
