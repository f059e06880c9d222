"""What SGLang reads from a checkpoint and its model does not hold: biases, single numbers.

The weight loaders of SGLang's models pass over a bias that the model has no parameter for,
because quantised checkpoints bring biases of zeros, and no linear layer of SGLang's heads adds
one. A model with other biases then computes something else, without any message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["OUTPUT_BIAS", "CheckpointVectors"]

OUTPUT_BIAS = "lm_head.bias"
"""Name of the bias of the logits, as transformers calls it."""

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")

_Counts = tuple[Any, Any]
"""The different values of a tensor, ascending, and how often it has each."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CheckpointVectors:
    """The biases and single numbers that pass by while SGLang loads a model.

    They are few and small, so copies are kept until `lost` was asked.

    Args:
        numbers: Whether to look at single numbers; quantised checkpoints have many, which
            SGLang stores in ways of its own.

    Attributes:
        output_bias: The bias of the logits, if the checkpoint has one that is not zero.
    """

    def __init__(self, *, numbers: bool = True) -> None:
        self._numbers = numbers
        self._found: dict[str, torch.Tensor] = {}
        self.output_bias: torch.Tensor | None = None

    def watching(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the weights as they are, and keep copies of the biases among them."""
        for name, tensor in weights:
            if name == OUTPUT_BIAS:
                self.output_bias = tensor.clone() if tensor.any() else None
            elif self._is_wanted(name, tensor) and tensor.any():
                self._found[name] = tensor.clone()
            yield name, tensor

    def lost(self, model: torch.nn.Module, *, layers: int, dtype: torch.dtype) -> list[str]:
        """List the tensors whose values are nowhere in the loaded model.

        A model may store several as one and in another order. Layers beyond the model's own
        belong to drafts of speculative decoding, which are not loaded.

        Args:
            model: What SGLang built.
            layers: How many layers its config states.
            dtype: Of the model.

        Returns:
            Their names in the checkpoint.
        """
        own = {_layer(name) for name in self._found}
        held: dict[str | None, list[_Counts]] = {layer: [] for layer in own}
        for name, tensor in _vectors(model):
            if _layer(name) in own:
                held[_layer(name)].append(_counts(tensor))
        return [
            name
            for name, tensor in self._found.items()
            if int(_layer(name) or 0) < layers
            and not _is_held(_counts(tensor), held[_layer(name)])
            and not _is_held(_counts(tensor.to(dtype)), held[_layer(name)])
        ]

    def _is_wanted(self, name: str, tensor: torch.Tensor) -> bool:
        # Old checkpoints call a causal mask `attn.bias`: it has four dimensions.
        bias = name.endswith(".bias") and tensor.ndim == 1
        number = self._numbers and tensor.numel() == 1 and _layer(name) is not None
        return tensor.dtype in _DTYPES and (bias or number)


def _vectors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (model.named_parameters(), model.named_buffers()):
        yield from ((name, each) for name, each in tensors if each.ndim <= 1 or "bias" in name)


def _layer(name: str) -> str | None:
    found = _BLOCK.search(name)
    return None if found is None else found.group(1)


def _counts(tensor: torch.Tensor) -> _Counts:
    return np.unique(tensor.detach().float().cpu().numpy(), return_counts=True)


def _is_held(wanted: _Counts, held: Iterable[_Counts]) -> bool:
    """Whether one of the tensors has these values among its own, as often, in any order."""
    values, counts = wanted
    for found, found_counts in held:
        places = np.searchsorted(found, values).clip(max=len(found) - 1)
        if ((found[places] == values) & (found_counts[places] >= counts)).all():
            return True
    return False
