"""What SGLang reads from a checkpoint and its model does not hold: biases, single numbers.

The weight loaders of SGLang's models pass over a bias that the model has no parameter for,
because quantised checkpoints bring biases of zeros, and no linear layer of SGLang's heads adds
one. A model with other biases then computes something else, without any message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["OUTPUT_BIAS", "CheckpointVectors"]

OUTPUT_BIAS = "lm_head.bias"
"""Name of the bias of the logits, as transformers calls it."""

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CheckpointVectors:
    """The biases and single numbers that pass by while SGLang loads a model.

    They are few and small, so copies are kept until `lost` was asked.

    Attributes:
        output_bias: The bias of the logits, if the checkpoint has one that is not zero.
    """

    def __init__(self) -> None:
        self._found: dict[str, torch.Tensor] = {}
        self.output_bias: torch.Tensor | None = None

    def watching(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the weights as they are, and keep copies of the biases among them."""
        for name, tensor in weights:
            if name == OUTPUT_BIAS:
                self.output_bias = tensor.clone() if tensor.any() else None
            elif _is_vector(name, tensor) and tensor.any():
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
        held: dict[str | None, list[torch.Tensor]] = {}
        for name, tensor in _vectors(model):
            held.setdefault(_layer(name), []).append(tensor.detach().reshape(-1).cpu())
        return [
            name
            for name, tensor in self._found.items()
            if int(_layer(name) or 0) < layers
            and not any(
                _is_held(values, held.get(_layer(name), []))
                for values in (tensor.reshape(-1), tensor.reshape(-1).to(dtype))
            )
        ]


def _is_vector(name: str, tensor: torch.Tensor) -> bool:
    # Old checkpoints call a causal mask `attn.bias`: it has four dimensions. Scales belong to
    # quantised weights, which SGLang stores in ways of its own.
    bias = name.endswith(".bias") and tensor.ndim == 1
    number = tensor.numel() == 1 and "scale" not in name
    return tensor.dtype in _DTYPES and (bias or number)


def _vectors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (model.named_parameters(), model.named_buffers()):
        yield from ((name, each) for name, each in tensors if each.ndim <= 1 or "bias" in name)


def _layer(name: str) -> str | None:
    found = _BLOCK.search(name)
    return None if found is None else found.group(1)


def _is_held(values: torch.Tensor, held: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors has these values among its own, as often, in any order."""
    wanted, counts = values.float().unique(return_counts=True)
    for tensor in held:
        if tensor.numel() < values.numel():
            continue
        found, found_counts = tensor.float().unique(return_counts=True)
        places = torch.searchsorted(found, wanted).clamp_(max=len(found) - 1)
        if bool(((found[places] == wanted) & (found_counts[places] >= counts)).all()):
            return True
    return False
