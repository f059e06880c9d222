"""Reading and checking the configuration of a LoRA adapter in the format of peft."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from genlm.core.base.errors import AdapterError

_WEIGHTS = tuple(f"adapter_model.{suffix}" for suffix in ("safetensors", "bin", "pt"))

_PLAIN = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
"""Settings of plain LoRA, of training, and of the modules that have weights in the file."""

_CHANGES_BASE = frozenset(
    {"alora_invocation_tokens", "bias", "init_lora_weights", "layer_replication"}
)
"""Settings with which an adapter changes more than the layers in which it is active."""

_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Other initialisations change the weights of the base model.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "qalora_group_size": (16,),
}
"""Values with which a setting has no effect, besides None, False and empty values."""


def read_lora_config(
    name: str,
    folder: str | os.PathLike[str],
    *,
    engine: str,
    supported: Collection[str] | None = (),
) -> Mapping[str, Any]:
    """Return the settings of a LoRA adapter that an engine computes correctly.

    Libraries ignore unknown settings, and rows would be wrong without an error. Therefore a
    setting that is not part of plain LoRA must be in `supported`, or have a value without
    effect.

    Args:
        name: Name of the adapter, for messages.
        folder: Folder with `adapter_config.json` and the weights, as peft's `save_pretrained`
            writes them.
        engine: Name of the engine, for messages.
        supported: Settings beyond plain LoRA that the engine supports. None for all settings of
            peft that do not change the base model.

    Raises:
        AdapterError: The folder contains no LoRA adapter, its settings cannot be read, or the
            engine does not support one of them.
    """
    config, adapter = _read_config(name, Path(folder)), f"adapter {name!r} in {str(folder)!r}"
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{adapter} is of type {kind}; only LORA adapters are supported")
    _check_scale(adapter, config)
    unsupported = {
        key: value
        for key, value in config.items()
        if not _is_supported(key, supported)
        and value not in (None, False, 0, "", {}, [], *_WITHOUT_EFFECT.get(key, ()))
    }
    if unsupported:
        settings = ", ".join(f"{key}={value!r}" for key, value in unsupported.items())
        raise AdapterError(
            f"{adapter} has {settings}, which {engine} does not support; convert it to a plain "
            f"LoRA adapter (for other values of init_lora_weights: "
            f"path_initial_model_for_weight_conversion of peft's save_pretrained)"
        )
    return config


def _read_config(name: str, folder: Path) -> Mapping[str, Any]:
    file = folder / "adapter_config.json"
    if not file.is_file() or not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise AdapterError(
            f"adapter {name!r}: {str(folder)!r} is not a folder with adapter_config.json and "
            f"adapter_model.safetensors, as peft's save_pretrained writes it"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AdapterError(
            f"adapter {name!r}: {str(file)!r} is not valid JSON: {error}"
        ) from error
    if not isinstance(config, dict):
        raise AdapterError(f"adapter {name!r}: {str(file)!r} contains no settings")
    return config


def _check_scale(adapter: str, config: Mapping[str, Any]) -> None:
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)  # peft's defaults
    if not (isinstance(rank, int) and rank > 0):
        raise AdapterError(f"{adapter} has r={rank!r}; a rank is a positive integer")
    if not (isinstance(alpha, (int, float)) and math.isfinite(alpha)):
        raise AdapterError(f"{adapter} has lora_alpha={alpha!r}, which is not a finite number")


def _is_supported(key: str, supported: Collection[str] | None) -> bool:
    return key not in _CHANGES_BASE if supported is None else key in _PLAIN or key in supported
