"""LoRA adapters through peft: several adapters in one model, at most one active.

peft inserts its layers into the model itself. `Adapters` restores the model after a failed
load, preserves the rows of the base model, and can remove every adapter that it loaded. Peft
layers that a model came with stay.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from genlm import prefix
from genlm.plugin import (
    AdapterError,
    EvaluationError,
    ModelLoadError,
    UnknownAdapterError,
    read_lora_config,
)
from genlm_hf.peft_layers import (
    AdapterState,
    activate_adapter,
    adapter_layers,
    adapter_settings,
    adapter_state,
    move_to_base_devices,
)

# Adapter types that act in layers only; the model inside a `PeftModel` then includes them.
_LAYER_ADAPTER_TYPES = {"ADALORA", "IA3", "LOHA", "LOKR", "LORA"}


class Adapters(prefix.ModelAdapters[str]):
    """The adapters of one model: preloaded ones and those loaded later.

    Outside of `activate` the model is in the state in which its owner left it, who may switch,
    merge and train the model's own adapters between passes. Loaded adapters are not applied.

    Args:
        model: A transformers model, or a `peft.PeftModel` of one.

    Attributes:
        model: The model to run, without peft's wrapper.

    Raises:
        ModelLoadError: The model has adapters that cannot be served.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        preloaded = dict(getattr(model, "peft_config", None) or {})
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        _refuse_unservable(preloaded, base)
        self.model = getattr(base, "_orig_mod", base)  # the model that torch.compile wrapped
        self.loaded |= {name: name for name in preloaded}  # by the names that peft has for them
        self._own = frozenset(preloaded)
        self._own_config: Any = None  # set while adapters are loaded
        self._numbers = itertools.count()
        self._peft_model: Any = None  # peft's wrapper for loaded adapters
        self._inserted: list[_Insertion] = []
        self._layers: list[Any] | None = None
        self._version: Hashable = None  # before the state changes, while it does
        self._version_lock = threading.Lock()

    def version(self) -> Hashable:
        """Return a value that changes when the model's owner switches or scales adapters.

        Adapters of the model itself are compared: which ones are active, which ones are merged
        into its weights, and the scales of all of them. May be called in any thread, also while
        adapters are loaded.
        """
        with self._version_lock:
            return self._current_version() if self._version is None else self._version

    def load(self, name: str, path: str) -> None:
        """Load an adapter; see `AdapterTable.load`."""
        with self._keep_version():
            super().load(name, path)

    def remove(self, name: str) -> None:
        """Unload an adapter; see `AdapterTable.remove`."""
        with self._keep_version():
            super().remove(name)

    def modules(self) -> Iterator[torch.nn.Module]:
        """Yield the modules of the model without the weights of loaded adapters."""
        loaded = set(self.loaded.values()) - self._own
        for path, module in self.model.named_modules():
            if loaded.isdisjoint(path.split(".")):
                yield module

    def _load(self, name: str, path: Path) -> str:
        folder = str(path)
        config = _read_config(name, folder)
        # peft forbids some names (with dots, for example), so the name in peft is generated.
        names = (f"genlm_{number}" for number in self._numbers)
        peft_name = next(name for name in names if name not in self._own)
        before = _Snapshot(self.model)
        try:
            peft_model = self._inject(peft_name, config)
            report = peft_model.load_adapter(
                folder, peft_name, torch_device="cpu", low_cpu_mem_usage=True
            )
            _refuse_misfit(report, before.restore_weights())
            move_to_base_devices(self.model, peft_name)
            for layer in adapter_layers(self.model):
                layer.train(self.model.training)
        except Exception as error:
            before.restore_active_adapters()
            self._delete(peft_name)
            before.restore()
            base, cause = type(self.model).__name__, " ".join(str(error).split())
            raise AdapterError(
                f"adapter {name!r} in {folder!r} does not fit this {base}: {cause}"
            ) from error
        self._inserted += before.inserted_layers()
        self._peft_model = peft_model
        before.restore_active_adapters()
        before.restore_trainable()
        self._layers = None
        return peft_name

    def _unload(self, name: str, adapter: str) -> None:
        """Delete the weights of an adapter, unless the model came with it."""
        if adapter in self._own:
            removable = (key for key in self.loaded if key not in self._own)
            raise UnknownAdapterError(name, removable)
        before = _Snapshot(self.model)
        self._delete(adapter)
        self._layers = None
        before.restore_active_adapters()
        if not self._peft_model.peft_config:  # an empty PeftModel accepts no new adapter
            _remove_layers(self._inserted)
            _set_config(self.model, self._own_config)
            self._peft_model, self._inserted = None, []
        before.restore_trainable()

    @contextmanager
    def activate(self, name: str) -> Iterator[None]:
        """Apply adapter `name` alone in forward passes within the context.

        Raises:
            EvaluationError: Adapters are merged into the model's weights.
        """
        with self._keep_version():
            outside = adapter_state(self._peft_layers())
            try:
                self._switch(name)
                yield
            finally:
                _restore(outside)

    def unload(self) -> None:
        """Remove every loaded adapter."""
        for name in self.loaded.keys() - self._own:
            self.remove(name)

    @contextmanager
    def _keep_version(self) -> Iterator[None]:
        """Keep the version within the context, which restores the state of own adapters."""
        with self._version_lock:
            self._version = self._current_version()
        try:
            yield
        finally:
            self._version = None

    def _switch(self, name: str) -> None:
        if any(getattr(layer, "merged", False) for layer in self._peft_layers()):
            raise EvaluationError(
                "adapters are merged into the model's weights, so adapter "
                f"{name!r} cannot be used; call unmerge_adapter first"
            )
        activate_adapter(self._peft_layers(), self.loaded[name])

    def _peft_layers(self) -> list[Any]:
        if self._layers is None:
            self._layers = adapter_layers(self.model)
        return self._layers

    def _current_version(self) -> Hashable:
        if not self._own:
            return ()
        return tuple(
            (id(layer), *settings)
            for layer in self._peft_layers()
            if (settings := adapter_settings(layer, self._own)) is not None
        )

    def _inject(self, peft_name: str, config: Any) -> Any:
        import peft

        if self._peft_model is not None:
            self._peft_model.add_adapter(peft_name, config, low_cpu_mem_usage=True)
            return self._peft_model
        # Hide the model's own adapters, which peft would mix with the loaded ones.
        self._own_config = vars(self.model).pop("peft_config", None)
        return peft.PeftModel(self.model, config, peft_name, low_cpu_mem_usage=True)

    def _delete(self, peft_name: str) -> None:
        """Remove one adapter from all layers, which may have further adapters."""
        from peft.functional import delete_adapter

        delete_adapter(self.model, peft_name, "lora_")
        if self._peft_model is not None:
            self._peft_model.peft_config.pop(peft_name, None)
            # peft reads the settings of the tuner's active adapters when it adds another one.
            self._peft_model.base_model.active_adapter = list(self._peft_model.peft_config)[:1]


def _restore(state: AdapterState) -> None:
    for attributes, values in state:
        attributes.update(values)


class _Insertion(NamedTuple):
    """A layer that peft inserted around a child of a module, or in its place."""

    module: torch.nn.Module
    name: str
    child: torch.nn.Module
    layer: torch.nn.Module


class _Snapshot:
    """A model's modules, weights, active adapters and trainable parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._children = {m: dict(m.named_children()) for m in model.modules()}
        self._weights = {m: dict(m.named_parameters(recurse=False)) for m in model.modules()}
        self._trainable = {p: p.requires_grad for p in model.parameters()}
        self._config = vars(model).get("peft_config")
        self._active_adapters = {
            layer: (list(layer.active_adapters), not layer.disable_adapters)
            for layer in adapter_layers(model)
        }

    def restore_active_adapters(self) -> None:
        """Activate the saved adapters only."""
        for layer in adapter_layers(self._model):
            active, enabled = self._active_adapters.get(layer, ([], False))
            layer.enable_adapters(enabled)
            layer.set_adapter(active, inference_mode=True)

    def restore_trainable(self) -> None:
        """Restore `requires_grad`, which peft sets for an adapter's parameters only."""
        for parameter, trainable in self._trainable.items():
            parameter.requires_grad_(trainable)

    def restore_weights(self) -> list[str]:
        """Restore replaced parameters; return the names of those whose values differed.

        Adapters of embeddings are saved together with a copy of the base model's embedding,
        which replaces that of this model.
        """
        differing = []
        for module, weights in self._weights.items():
            for name, weight in weights.items():
                current = getattr(module, name)
                if current is not weight and not _equal_up_to_rounding(current, weight):
                    differing.append(f"{type(module).__name__}.{name}")
                setattr(module, name, weight)
        return differing

    def inserted_layers(self) -> list[_Insertion]:
        """Return the layers that replace modules since."""
        return [
            _Insertion(module, name, child, layer)
            for module, children in self._children.items()
            for name, child in children.items()
            if (layer := getattr(module, name)) is not child
        ]

    def restore(self) -> None:
        """Restore modules and weights."""
        self.restore_weights()
        _remove_layers(self.inserted_layers())
        self.restore_trainable()
        _set_config(self._model, self._config)


def _remove_layers(inserted: Sequence[_Insertion]) -> None:
    """Undo insertions, the last first, except those that the model's owner has undone."""
    for module, name, child, layer in reversed(inserted):
        if getattr(module, name) is layer:
            setattr(module, name, child)


def _set_config(model: torch.nn.Module, config: Any) -> None:
    """Set the configs of a model's adapters; None removes them."""
    vars(model).pop("peft_config", None)
    if config is not None:
        model.peft_config = config


def _refuse_unservable(preloaded: dict[str, Any], model: torch.nn.Module) -> None:
    """Raise `ModelLoadError` for adapters that act outside of a model's layers."""
    advice = "pass the base model, or what merge_and_unload returns"
    for name, config in preloaded.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in _LAYER_ADAPTER_TYPES or getattr(config, "alora_invocation_tokens", None):
            raise ModelLoadError(
                f"the model's adapter {name!r} of type {kind} needs the forward pass of its "
                f"peft class; {advice}"
            )
    if preloaded and any(getattr(layer, "merged", False) for layer in adapter_layers(model)):
        raise ModelLoadError(
            f"adapters are merged into the model's weights; call unmerge_adapter, or {advice}"
        )


def _read_config(name: str, path: str) -> Any:
    import peft

    read_lora_config(name, path, engine="genlm-hf", supported=None)
    try:
        config = peft.PeftConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise AdapterError(
            f"adapter {name!r}: {path!r} has no valid config: {error}"
        ) from error
    config.inference_mode = True
    return config


def _equal_up_to_rounding(left: torch.Tensor, right: torch.Tensor) -> bool:
    # The copy may have been saved in another precision than the model is loaded in.
    left, right = left.detach().float().cpu(), right.detach().float().cpu()
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-2, atol=1e-4)


def _refuse_misfit(report: Any, replaced: list[str]) -> None:
    if replaced:
        raise ValueError(
            f"it contains weights of the base model that differ from this model's "
            f"({replaced[0]}); it was trained with another base model or changed its embeddings"
        )
    if report.missing_keys or report.unexpected_keys:
        names = [*report.missing_keys, *report.unexpected_keys]
        raise ValueError(
            f"it lacks {len(report.missing_keys)} weights that the model needs and has "
            f"{len(report.unexpected_keys)} that the model does not have, such as "
            f"{names[0]}; it was trained for another base model"
        )
