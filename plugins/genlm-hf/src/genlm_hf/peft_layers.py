"""Active-adapter state and adapter weights of the peft layers of a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

# Attributes of peft's layers that say which adapters are active. peft's methods set them too,
# but visit the parameters of all adapters, which takes longer than a forward pass.
_STATE = ("_active_adapter", "_disable_adapters")

AdapterState = list[tuple[dict[str, Any], dict[str, Any]]]
"""Attributes that select the adapters of every peft layer, with their values."""


def adapter_layers(model: torch.nn.Module) -> list[Any]:
    """Return the peft layers of a model, in which adapters can be activated."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [module for module in model.modules() if isinstance(module, kinds)]


def adapter_state(layers: Iterable[Any]) -> AdapterState:
    """Return which adapters are active in each of the peft layers."""
    return [(vars(layer), {name: getattr(layer, name) for name in _STATE}) for layer in layers]


def activate_adapter(layers: Iterable[Any], adapter: str) -> None:
    """Activate an adapter alone in each of the peft layers."""
    for layer in layers:
        attributes = vars(layer)
        # A module that adapters replace or wrap as a whole must not have another one active.
        is_known = adapter in attributes.get("_adapters", (adapter,))
        attributes.update(_active_adapter=adapter if is_known else [], _disable_adapters=False)


def adapter_settings(layer: Any, adapters: Iterable[str]) -> tuple[Hashable, ...] | None:
    """Return the active and the merged adapters of a peft layer, and the scales of `adapters`.

    None if no adapter is active or merged in the layer, and it has none of `adapters`.
    """
    merged = tuple(getattr(layer, "merged_adapters", ()))
    names = () if layer.disable_adapters else tuple(layer.active_adapters)
    scales = getattr(layer, "scaling", {})
    own_scales = tuple(scales.get(name) for name in adapters)
    if not names and not merged and not any(scale is not None for scale in own_scales):
        return None
    return names, merged, own_scales


def move_to_base_devices(model: torch.nn.Module, adapter: str) -> None:
    """Move an adapter's weights to the devices of the layers that it adapts.

    peft leaves modules that an adapter replaces on the CPU, in the dtype in which they were
    saved. For adapters of an embedding it uses the device of the embedding's copy that comes
    with the adapter, instead of the device of the model's embedding.
    """
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for layer in adapter_layers(model):
        is_wrapper = isinstance(layer, AuxiliaryTrainingWrapper)
        base = layer.original_module if is_wrapper else layer.get_base_layer()
        base_weight = next(base.parameters(), None)
        if base_weight is None:
            continue  # quantised: peft handles it
        is_replaced = (
            isinstance(layer, ModulesToSaveWrapper) and base_weight.is_floating_point()
        )
        for name, weight in list(layer.named_parameters()):
            path, _, leaf = name.rpartition(".")
            if adapter in name.split("."):
                moved = weight.detach().to(
                    base_weight.device, base_weight.dtype if is_replaced else None
                )
                moved = torch.nn.Parameter(moved, weight.requires_grad)
                setattr(layer.get_submodule(path), leaf, moved)
