"""Biases of a checkpoint that SGLang's model does not have.

The weight loaders of SGLang's models skip a bias for which the model has no parameter, because
quantised checkpoints contain biases of zeros, and SGLang's output heads add no bias. With other
biases, rows would be wrong without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

OUTPUT_BIAS = "lm_head.bias"
"""Transformers' name of the bias of the logits."""

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")

_Counts = tuple[Any, Any]
"""Distinct values of a tensor in ascending order, and their counts."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CheckpointBiases:
    """Copies of the biases that SGLang reads while it loads a model.

    Attributes:
        output_bias: The bias of the logits, None if it is absent or zero.
    """

    def __init__(self) -> None:
        self._biases: dict[str, torch.Tensor] = {}
        self.output_bias: torch.Tensor | None = None

    def record(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the weights unchanged and copy the biases among them."""
        for name, tensor in weights:
            if name == OUTPUT_BIAS:
                self.output_bias = tensor.clone() if tensor.any() else None
            elif _is_bias(name, tensor) and tensor.any():
                self._biases[name] = tensor.clone()
            yield name, tensor

    def missing(
        self, vectors: Iterable[tuple[str, torch.Tensor]], *, layers: int, dtype: torch.dtype
    ) -> list[str]:
        """Return the biases whose values are not in the loaded model.

        A model may store several biases as one and in another order. Further layers of the
        checkpoint are those of speculative decoding, which are not loaded.

        Args:
            vectors: See `ServedModel.vectors`.
            layers: Number of layers in its config.
            dtype: The dtype of the model.

        Returns:
            Names of the biases in the checkpoint.
        """
        loaded: dict[str | None, list[_Counts]] = {_layer(name): [] for name in self._biases}
        for name, tensor in vectors:
            if _layer(name) in loaded:
                loaded[_layer(name)].append(_counts(tensor))
        return [
            name
            for name, tensor in self._biases.items()
            if int(_layer(name) or 0) < layers
            and not _contains(loaded[_layer(name)], _counts(tensor))
            and not _contains(loaded[_layer(name)], _counts(tensor.to(dtype)))
        ]


def _is_bias(name: str, tensor: torch.Tensor) -> bool:
    # In old checkpoints `attn.bias` is a causal mask of four dimensions.
    return name.endswith(".bias") and tensor.ndim == 1 and tensor.dtype in _DTYPES


def _layer(name: str) -> str | None:
    match = _BLOCK.search(name)
    return None if match is None else match.group(1)


def _counts(tensor: torch.Tensor) -> _Counts:
    return np.unique(tensor.detach().float().cpu().numpy(), return_counts=True)


def _contains(tensors: Iterable[_Counts], bias: _Counts) -> bool:
    """Whether one of the tensors has the values of a bias at least as often, in any order."""
    values, counts = bias
    for tensor_values, tensor_counts in tensors:
        places = np.searchsorted(tensor_values, values).clip(max=len(tensor_values) - 1)
        if ((tensor_values[places] == values) & (tensor_counts[places] >= counts)).all():
            return True
    return False
