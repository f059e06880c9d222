"""Active-adapter state and adapter weights of the peft layers of a model."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["AdapterState", "adapter_layers", "adapter_state", "put_beside_base"]

# Attributes of peft's layers that say which adapters are active. peft's methods set them too,
# but visit every parameter, which takes longer than a forward pass of a small model.
_STATE = ("_active_adapter", "_disable_adapters")

AdapterState = list[tuple[dict[str, Any], dict[str, Any]]]
"""Attributes that select the adapters of every peft layer, with their values."""


def adapter_layers(model: torch.nn.Module) -> list[Any]:
    """Return the peft layers of a model, in which adapters can be activated."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [module for module in model.modules() if isinstance(module, kinds)]


def adapter_state(model: torch.nn.Module) -> AdapterState:
    """Return which adapters are active in each layer of a model."""
    return [
        (vars(layer), {name: getattr(layer, name) for name in _STATE})
        for layer in adapter_layers(model)
    ]


def put_beside_base(model: torch.nn.Module, adapter: str) -> None:
    """Move an adapter's weights to the devices of the layers that it adapts.

    peft leaves modules that an adapter replaces on the CPU and as they were saved, and
    follows a copy of an embedding, which comes with the adapter, instead of the model's.
    """
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for layer in adapter_layers(model):
        wraps = isinstance(layer, AuxiliaryTrainingWrapper)
        base = layer.original_module if wraps else layer.get_base_layer()
        like = next(base.parameters(), None)
        if like is None:
            continue  # quantised, which peft handles
        replaces = isinstance(layer, ModulesToSaveWrapper) and like.is_floating_point()
        for name, weight in list(layer.named_parameters()):
            path, _, leaf = name.rpartition(".")
            if adapter in name.split("."):
                moved = weight.detach().to(like.device, like.dtype if replaces else None)
                moved = torch.nn.Parameter(moved, weight.requires_grad)
                setattr(layer.get_submodule(path), leaf, moved)
