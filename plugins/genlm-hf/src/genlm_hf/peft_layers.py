"""What of peft lies in a model's layers: who is at work, and where weights are.

Knows no folders and no users' names of adapters.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Positions", "positions", "put_beside_base", "switches"]

# What a layer of peft's knows of who is at work. Its methods set it too, but walk the model
# and touch every parameter, which takes longer than a forward pass of a small model.
_SWITCHES = ("_active_adapter", "_disable_adapters")

Positions = list[tuple[dict[str, Any], dict[str, Any]]]
"""The attributes of each layer of peft's, and what its switches are."""


def switches(model: torch.nn.Module) -> list[Any]:
    """Return what of peft in a model can be switched on and off."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [module for module in model.modules() if isinstance(module, kinds)]


def positions(model: torch.nn.Module) -> Positions:
    """Return what all switches of a model are now."""
    return [
        (vars(layer), {name: getattr(layer, name) for name in _SWITCHES})
        for layer in switches(model)
    ]


def put_beside_base(model: torch.nn.Module, adapter: str) -> None:
    """Move an adapter's weights to the devices of the layers that it adapts.

    peft leaves modules that an adapter replaces on the CPU and as they were saved, and
    follows a copy of an embedding, which comes with the adapter, instead of the model's.
    """
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for layer in switches(model):
        wraps = isinstance(layer, AuxiliaryTrainingWrapper)
        base = layer.original_module if wraps else layer.get_base_layer()
        like = next(base.parameters(), None)
        if like is None:
            continue  # quantised, which peft gets right
        replaces = isinstance(layer, ModulesToSaveWrapper) and like.is_floating_point()
        for name, weight in list(layer.named_parameters()):
            path, _, leaf = name.rpartition(".")
            if adapter in name.split("."):
                moved = weight.detach().to(like.device, like.dtype if replaces else None)
                moved = torch.nn.Parameter(moved, weight.requires_grad)
                setattr(layer.get_submodule(path), leaf, moved)
