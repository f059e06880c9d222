"""Copies new weights into the parameters and buffers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from genlm_hf.quantised import is_quantised

_WRAPPED = ("base_layer", "original_module")
"""Names of the model's own layers in those that peft has inserted."""


def load_weights(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy weights into a model; graphs and other references to its memory remain valid.

    Args:
        model: A model, whose peft layers are ignored.
        weights: Tensors by their names in `state_dict()` of the model without peft layers. One
            name suffices for weights that the model shares.

    Raises:
        ValueError: The names, shapes or kinds of numbers differ from the model's, or it is
            quantised. The model is unchanged.
    """
    if is_quantised(model):  # even `state_dict` can change it, see `preserve_packed_weights`
        raise ValueError(
            "the weights of a quantised model cannot be replaced; quantise the new weights and "
            "load them as another model"
        )
    targets = _own_tensors(model)
    given = {id(targets[name]) for name in weights if name in targets}
    unknown = [name for name in weights if name not in targets]
    missing = [name for name, target in targets.items() if id(target) not in given]
    if unknown or missing:
        raise ValueError(
            f"the weights do not fit the model: {len(missing)} are missing"
            f"{_example(missing)}, {len(unknown)} are not in the model{_example(unknown)}; "
            f"pass all weights by their names in state_dict() of the model"
        )
    for name, value in weights.items():
        target = targets[name]
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name!r} is a {type(value).__name__}; expected a torch.Tensor")
        if value.shape != target.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(target.shape)}; found {tuple(value.shape)}"
            )
        if value.is_floating_point() != target.is_floating_point():
            raise ValueError(
                f"{name!r} has dtype {target.dtype}; found {value.dtype}. The weights of "
                f"quantised models cannot be replaced"
            )
    with torch.no_grad():
        for name, value in weights.items():
            targets[name].copy_(value)


def _own_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in `state_dict()` without those of peft layers, by their own names."""
    layers = {
        f"{name}."
        for name, module in model.named_modules()
        for child, _ in module.named_children()
        if child in _WRAPPED
    }
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        layer = next((layer for layer in layers if name.startswith(layer)), None)
        if layer is None:
            tensors[name] = tensor
            continue
        wrapped, _, rest = name.removeprefix(layer).partition(".")
        if wrapped in _WRAPPED:
            tensors[layer + rest] = tensor
    return tensors


def _example(names: list[str]) -> str:
    return f", such as {names[0]!r}" if names else ""
