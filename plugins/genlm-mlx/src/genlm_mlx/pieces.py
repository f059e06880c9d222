"""Logits of many positions of an mlx-lm model, a few at a time; see `genlm.prefix`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.nn.layers.base import Module

from genlm import prefix

__all__ = ["OutputPieces", "as_tensor"]

# Logits at once: 32 MiB in float32. Each piece reads the whole output embedding.
_LOGITS_AT_ONCE = 2**23

Run = Callable[[], mx.array]


class OutputPieces(prefix.OutputPieces[Run, tuple[Any, str]]):
    """Applies the output embedding of a model to many positions, a few at a time.

    A pass is a function that calls the model; the caches of its later calls are not used. A
    decoder is the parent and the name of a module.

    Args:
        model: An mlx-lm model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(logging.getLogger("genlm_mlx"))
        self._model = model

    def sample(self) -> Run:
        """Return a pass over two sequences of five tokens."""
        ids = mx.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]], mx.int32)
        return lambda: self._model(ids)

    def run(self, work: Run) -> mx.array:
        """Call the model and return its logits."""
        return work()

    def decoders(self) -> Iterator[tuple[Any, str]]:
        """Yield the modules in a model and in these, inner ones first."""
        for name, child in self._model.children().items():
            if isinstance(child, Module):
                for inner, module in child.children().items():
                    if isinstance(module, Module):
                        yield child, inner
                yield self._model, name

    @contextmanager
    def replaced(
        self, decoder: tuple[Any, str], states: Callable[[Run], mx.array]
    ) -> Iterator[None]:
        """Let `states` replace the result of a module; modules are dictionaries."""
        parent, name = decoder
        module = parent[name]

        def call(*args: Any, **kwargs: Any) -> mx.array:
            if not args or args[0].dtype != mx.int32:
                raise ValueError("it does not take token ids, so others run before it")
            return states(lambda: module(*args, **kwargs))

        parent[name] = _StandIn(module, call)
        try:
            yield
        finally:
            parent[name] = module

    def positions_at_once(self, width: int) -> int:
        """Return the number of positions of a piece."""
        return max(1, _LOGITS_AT_ONCE // width)

    def is_exact(self, logits: mx.array) -> bool:
        """Whether the model computes in float32."""
        return bool(logits.dtype == mx.float32)

    def as_tensor(self, logits: mx.array) -> torch.Tensor:
        """Return logits in float32, on the CPU."""
        return as_tensor(logits)


class _StandIn:
    """Stand-in for a module: same attributes, another `__call__`."""

    def __init__(self, module: Any, call: Callable[..., mx.array]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def as_tensor(array: mx.array) -> torch.Tensor:
    """Return an array as a float32 tensor on the CPU."""
    array = array.astype(mx.float32)
    mx.eval(array)
    return torch.from_numpy(np.array(array))
