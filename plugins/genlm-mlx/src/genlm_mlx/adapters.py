"""LoRA adapters, whose layers replace those of the model in the passes that need them.

Each adapter has layers of its own around the model's, so adapters may differ in rank and in
the layers that they change, and the base model is unchanged between passes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import load_adapters

from genlm.plugin import AdapterError, read_lora_config

__all__ = ["Adapters"]

_Layers = dict[str, Module]
"""Layers by their paths in the model."""


class Adapters:
    """The adapters of one model.

    Args:
        model: An mlx-lm model.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._layers: dict[str, _Layers] = {}
        self._own: dict[str, _Layers] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order in which they were loaded."""
        return tuple(self._layers)

    def load(self, name: str, folder: str) -> None:
        """Load an adapter that mlx-lm or peft has saved.

        Raises:
            AdapterError: The name is taken, the folder holds no adapter, or it does not fit.
        """
        if name in self._layers:
            raise AdapterError(f"adapter {name!r} is loaded already; choose another name")
        if (Path(folder) / "adapters.safetensors").is_file():
            layers = self._written_by_mlx(name, Path(folder))
        else:
            layers = self._written_by_peft(name, Path(folder))
        own = dict(self._model.named_modules())
        self._own[name] = {path: own[path] for path in layers}
        self._layers[name] = layers

    def remove(self, name: str) -> None:
        """Drop the layers of an adapter."""
        del self._layers[name], self._own[name]

    @contextmanager
    def activate(self, name: str) -> Iterator[None]:
        """Apply an adapter in forward passes within the context."""
        self._put(self._layers[name])
        try:
            yield
        finally:
            self._put(self._own[name])

    def _put(self, layers: _Layers) -> None:
        self._model.update_modules(tree_unflatten(list(layers.items())))

    def _written_by_mlx(self, name: str, folder: Path) -> _Layers:
        """Let mlx-lm insert the layers, and remove them again."""
        _refuse_full(name, folder)
        before = dict(self._model.named_modules())
        problem = None
        try:
            load_adapters(self._model, str(folder))
        except Exception as error:  # noqa: BLE001 - mlx-lm's errors of bad adapters have any type
            problem = error
        after = dict(self._model.named_modules())
        layers = {path: after[path] for path, own in before.items() if after[path] is not own}
        self._put({path: before[path] for path in layers})
        if problem is not None:
            raise AdapterError(
                f"adapter {name!r} in {str(folder)!r} does not fit the model: {problem}"
            ) from problem
        return _ready(layers)

    def _written_by_peft(self, name: str, folder: Path) -> _Layers:
        config = read_lora_config(name, folder, engine="genlm-mlx", supported={"use_rslora"})
        own = dict(self._model.named_modules())
        layers: _Layers = {}
        for path, (down, up) in _factors(name, folder).items():
            linear = own.get(path)
            if not isinstance(linear, (Linear, QuantizedLinear)):
                found = "no such layer" if linear is None else f"a {type(linear).__name__}"
                raise AdapterError(
                    f"adapter {name!r} changes the linear layer {path!r}; the model has {found}"
                )
            layer = LoRALinear.from_base(linear, r=down.shape[0], scale=_scale(config, down))
            expected = [tuple(layer.lora_a.shape), tuple(layer.lora_b.shape)]
            if [down.T.shape, up.T.shape] != expected:
                raise AdapterError(
                    f"adapter {name!r}: its matrices for {path!r} have the shapes "
                    f"{down.shape} and {up.shape}, which do not fit the model's layer"
                )
            layer.lora_a, layer.lora_b = down.T, up.T
            layers[path] = layer
        return _ready(layers)


def _ready(layers: _Layers) -> _Layers:
    for layer in layers.values():
        layer.eval()  # without dropout
        mx.eval(layer.parameters())
    return layers


def _refuse_full(name: str, folder: Path) -> None:
    file = folder / "adapter_config.json"
    try:
        kind = json.loads(file.read_text(encoding="utf-8")).get("fine_tune_type", "lora")
    except (OSError, ValueError, AttributeError) as error:
        raise AdapterError(
            f"adapter {name!r}: {str(file)!r} cannot be read: {error}"
        ) from error
    if kind not in {"lora", "dora"}:
        raise AdapterError(
            f"adapter {name!r} has fine_tune_type {kind!r}; only 'lora' and 'dora' can be put "
            f"beside a model. Load the fine-tuned model itself"
        )


def _scale(config: Mapping[str, Any], down: mx.array) -> float:
    rank = down.shape[0]
    alpha = float(config.get("lora_alpha", 8))
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def _factors(name: str, folder: Path) -> dict[str, tuple[mx.array, mx.array]]:
    """Return the two matrices, (rank, in) and (out, rank), of each layer."""
    file = folder / "adapter_model.safetensors"
    try:
        weights: Any = mx.load(str(file))
    except (RuntimeError, OSError) as error:
        raise AdapterError(
            f"adapter {name!r}: MLX cannot read {str(file)!r}: {error}"
        ) from error
    found: dict[str, dict[str, Any]] = {}
    for key, array in weights.items():
        path, _, which = key.removeprefix("base_model.model.").rpartition(".lora_")
        if which not in {"A.weight", "B.weight"}:
            raise AdapterError(
                f"adapter {name!r} has weights {key!r}; only plain LoRA of linear layers is "
                f"served"
            )
        found.setdefault(path, {})[which] = array
    for path, pair in found.items():
        if len(pair) != 2:
            raise AdapterError(f"adapter {name!r} has one of the two matrices of {path!r} only")
    return {path: (pair["A.weight"], pair["B.weight"]) for path, pair in found.items()}
