"""Biases of a checkpoint that SGLang's model does not have.

The weight loaders of SGLang's models skip a bias without a parameter, because quantised
checkpoints contain biases of zeros, and SGLang's output heads add no bias. Rows of a model with
other biases would be wrong without a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["OUTPUT_BIAS", "CheckpointBiases"]

OUTPUT_BIAS = "lm_head.bias"
"""Transformers' name of the bias of the logits."""

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")

_Counts = tuple[Any, Any]
"""The distinct values of a tensor, ascending, and their counts."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CheckpointBiases:
    """Copies of the biases that SGLang reads while it loads a model.

    Attributes:
        output_bias: The bias of the logits, None if the checkpoint has none but zeros.
    """

    def __init__(self) -> None:
        self._found: dict[str, torch.Tensor] = {}
        self.output_bias: torch.Tensor | None = None

    def record(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the weights unchanged, and copy the biases among them."""
        for name, tensor in weights:
            if name == OUTPUT_BIAS:
                self.output_bias = tensor.clone() if tensor.any() else None
            elif _is_bias(name, tensor) and tensor.any():
                self._found[name] = tensor.clone()
            yield name, tensor

    def lost(self, model: torch.nn.Module, *, layers: int, dtype: torch.dtype) -> list[str]:
        """Return the biases whose values are not in the loaded model.

        A model may store several biases as one and in another order. Layers beyond the
        model's belong to speculative decoding and are not loaded.

        Args:
            model: The model that SGLang built.
            layers: Number of layers in its config.
            dtype: The dtype of the model.

        Returns:
            Names of the biases in the checkpoint.
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


def _is_bias(name: str, tensor: torch.Tensor) -> bool:
    # In old checkpoints `attn.bias` is a causal mask of four dimensions.
    return name.endswith(".bias") and tensor.ndim == 1 and tensor.dtype in _DTYPES


def _vectors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (model.named_parameters(), model.named_buffers()):
        yield from ((name, each) for name, each in tensors if each.ndim <= 1 or "bias" in name)


def _layer(name: str) -> str | None:
    found = _BLOCK.search(name)
    return None if found is None else found.group(1)


def _counts(tensor: torch.Tensor) -> _Counts:
    return np.unique(tensor.detach().float().cpu().numpy(), return_counts=True)


def _is_held(wanted: _Counts, held: Iterable[_Counts]) -> bool:
    """Whether a tensor of `held` contains these values at least as often, in any order."""
    values, counts = wanted
    for found, found_counts in held:
        places = np.searchsorted(found, values).clip(max=len(found) - 1)
        if ((found[places] == values) & (found_counts[places] >= counts)).all():
            return True
    return False
