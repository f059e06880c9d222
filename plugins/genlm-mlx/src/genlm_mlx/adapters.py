"""LoRA adapters, whose layers replace those of the model in the passes that need them.

Every adapter has its own LoRA layers around layers of the model. Adapters may therefore differ
in rank and in the layers that they change, and the base model is unchanged between passes.
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
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from genlm import prefix
from genlm.plugin import AdapterError, read_lora_config

_Layers = dict[str, Module]
"""Layers by their paths in the model."""


class Adapters(prefix.ModelAdapters[_Layers]):
    """The adapters of one model.

    Args:
        model: An mlx-lm model.
    """

    def __init__(self, model: Module) -> None:
        super().__init__()
        self._model = model
        self._base_layers: _Layers = dict(model.named_modules())

    def _load(self, name: str, path: Path) -> _Layers:
        """Return the layers of an adapter that mlx-lm or peft saved."""
        if (path / "adapters.safetensors").is_file():
            return self._load_from_mlx(name, path)
        return self._load_from_peft(name, path)

    @contextmanager
    def activate(self, name: str) -> Iterator[None]:
        """Apply an adapter in forward passes within the context."""
        layers = self.loaded[name]
        self._insert(layers)
        try:
            yield
        finally:
            self._insert({path: self._base_layers[path] for path in layers})

    def _insert(self, layers: _Layers) -> None:
        self._model.update_modules(tree_unflatten(list(layers.items())))

    def _load_from_mlx(self, name: str, folder: Path) -> _Layers:
        """Let mlx-lm insert the layers, then remove them from the model."""
        config = _lora_settings(name, folder)
        before = dict(self._model.named_modules())
        failure = None
        try:
            linear_to_lora_layers(
                self._model,
                config["num_layers"],
                config["lora_parameters"],
                use_dora=config.get("fine_tune_type") == "dora",
            )
            weights: Any = mx.load(str(folder / "adapters.safetensors"))
            _check_shapes(self._model, weights)
            self._model.load_weights(list(weights.items()), strict=False)
        except Exception as error:  # noqa: BLE001 - mlx-lm raises many types
            failure = error
        after = dict(self._model.named_modules())
        layers = {
            path: after[path] for path, layer in before.items() if after[path] is not layer
        }
        self._insert({path: before[path] for path in layers})
        if failure is not None:
            raise AdapterError(
                f"adapter {name!r} in {str(folder)!r} does not fit the model: {failure}"
            ) from failure
        return _prepare(layers)

    def _load_from_peft(self, name: str, folder: Path) -> _Layers:
        config = read_lora_config(name, folder, engine="genlm-mlx", supported={"use_rslora"})
        rank = config.get("r", 8)
        scale = config.get("lora_alpha", 8) / rank ** (0.5 if config.get("use_rslora") else 1)
        layers: _Layers = {}
        for path, (down, up) in _factors(name, folder).items():
            linear = self._base_layers.get(path)
            if not isinstance(linear, (Linear, QuantizedLinear)):
                actual = "no such layer" if linear is None else f"a {type(linear).__name__}"
                raise AdapterError(
                    f"adapter {name!r} changes the linear layer {path!r}; the model has "
                    f"{actual}"
                )
            layer = LoRALinear.from_base(linear, r=rank, scale=scale)
            expected = [tuple(layer.lora_a.shape), tuple(layer.lora_b.shape)]
            if [down.T.shape, up.T.shape] != expected:
                raise AdapterError(
                    f"adapter {name!r}: its matrices for {path!r} have the shapes "
                    f"{down.shape} and {up.shape}, which do not fit r={rank} and the model's "
                    f"layer"
                )
            layer.lora_a, layer.lora_b = down.T, up.T
            layers[path] = layer
        return _prepare(layers)


def _prepare(layers: _Layers) -> _Layers:
    for layer in layers.values():
        layer.eval()  # without dropout
        mx.eval(layer.parameters())
    # The initial weights were random and are not computed. MLX keeps the graph of their keys
    # until the next key is computed.
    mx.eval(mx.random.state)
    return layers


def _check_shapes(model: Module, weights: Mapping[str, mx.array]) -> None:
    """Refuse weights without an inserted layer, which mlx-lm 0.31 would ignore.

    It would also compute with the random initial weights of layers that the file lacks.
    """
    parameters = dict(tree_flatten(model.parameters()))
    for path, array in weights.items():
        if path not in parameters or path.rpartition(".")[2] not in {"lora_a", "lora_b", "m"}:
            raise ValueError(f"it has weights {path!r}, the model has no such adapter layer")
        if array.shape != parameters[path].shape:
            raise ValueError(
                f"{path!r} has shape {array.shape} in place of {parameters[path].shape}"
            )
    for path in parameters:
        if path.endswith((".lora_a", ".lora_b")) and path not in weights:
            raise ValueError(f"it has no weights {path!r}")


def _lora_settings(name: str, folder: Path) -> Mapping[str, Any]:
    file = folder / "adapter_config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kind = config.get("fine_tune_type", "lora")
    except (OSError, ValueError, AttributeError) as error:
        raise AdapterError(
            f"adapter {name!r}: {str(file)!r} cannot be read: {error}"
        ) from error
    if kind not in {"lora", "dora"}:
        raise AdapterError(
            f"adapter {name!r} has fine_tune_type {kind!r}; only 'lora' and 'dora' can be "
            f"loaded as adapters. Load the fine-tuned model instead"
        )
    for key in ("num_layers", "lora_parameters"):
        if key not in config:
            raise AdapterError(f"adapter {name!r}: {str(file)!r} has no setting {key!r}")
    return config


def _factors(name: str, folder: Path) -> dict[str, tuple[mx.array, mx.array]]:
    """Return the two matrices of every layer, (rank, in) and (out, rank)."""
    file = folder / "adapter_model.safetensors"
    try:
        weights: Any = mx.load(str(file))
    except (RuntimeError, OSError) as error:
        raise AdapterError(
            f"adapter {name!r}: MLX cannot read {str(file)!r}: {error}"
        ) from error
    pairs: dict[str, dict[str, Any]] = {}
    for key, array in weights.items():
        path, _, matrix = key.removeprefix("base_model.model.").rpartition(".lora_")
        if matrix not in {"A.weight", "B.weight"}:
            raise AdapterError(
                f"adapter {name!r} has weights {key!r}; only plain LoRA of linear layers is "
                f"served"
            )
        pairs.setdefault(path, {})[matrix] = array
    for path, pair in pairs.items():
        if len(pair) != 2:
            raise AdapterError(f"adapter {name!r} has one of the two matrices of {path!r} only")
    return {path: (pair["A.weight"], pair["B.weight"]) for path, pair in pairs.items()}
