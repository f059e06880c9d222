"""LoRA adapters of one vLLM engine: checked, loaded in the open, told apart by number.

vLLM knows weights by an integer, and an adapter that turns out to be bad while a request
is computed ends the whole engine. So every adapter is checked and loaded before its name
is known, under a number that is never used again, and none is ever evicted: vLLM would
read its folder again in the middle of a step.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm import AdapterError

__all__ = ["Adapters"]

# The other ways of initialising change the weights of the base model.
_HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")

_CHANGES = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "alora_invocation_tokens",
    "rank_pattern",
    "alpha_pattern",
)
"""Settings of a config that some supported version of vLLM does not know and ignores."""


class Adapters:
    """The adapters that requests may ask for.

    Args:
        engine: The `vllm.LLMEngine`.
        capacity: The most adapters there may be.
    """

    def __init__(self, engine: Any, capacity: int) -> None:
        self._engine = engine
        self._capacity = capacity
        self._numbers = itertools.count(1)
        self._requests: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, oldest first."""
        return tuple(self._requests)

    def request(self, name: str) -> Any:
        """Return the `LoRARequest` of a loaded adapter."""
        return self._requests[name]

    def load(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path`, to be known as `name`.

        Raises:
            AdapterError: The name is taken, there are too many, or the folder holds no
                LoRA adapter that vLLM serves with this model. Nothing has changed.
        """
        from vllm.lora.request import LoRARequest

        if name in self._requests:
            raise AdapterError(
                f"an adapter named {name!r} is loaded already; take another name"
            )
        if len(self._requests) == self._capacity:
            raise AdapterError(
                f"asked for adapter {name!r} beside {self._capacity} others, for which the "
                f"model was loaded; load it with a larger engine_opts['max_loras']"
            )
        folder = os.path.realpath(Path(path).expanduser())
        _check(name, folder)
        number = next(self._numbers)
        # The number is part of vLLM's name, by which it also keys cached prefixes.
        request = LoRARequest(f"{number}-{name}", number, folder)
        try:
            loaded = self._engine.add_lora(request)
        except Exception as error:
            self._remove(number)
            cause = " ".join(str(error).split())
            raise AdapterError(
                f"vLLM does not serve adapter {name!r} in {path!r} with this model: {cause}"
            ) from error
        if not loaded:
            self._remove(number)
            raise AdapterError(f"vLLM did not load adapter {name!r} in {path!r}")
        self._requests[name] = request

    def _remove(self, number: int) -> None:
        """Take an adapter out that may have been loaded in part."""
        if number in self._engine.list_loras():
            self._engine.remove_lora(number)


def _check(name: str, folder: str) -> None:
    config = _config(name, folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"adapter {name!r} in {folder!r} is of type {kind}; only LORA adapters are served"
        )
    changes = {key: config[key] for key in _CHANGES if config.get(key)}
    if config.get("bias", "none") != "none":
        changes["bias"] = config["bias"]
    if config.get("init_lora_weights", True) not in _HARMLESS_INITS:
        changes["init_lora_weights"] = config["init_lora_weights"]
    if changes:
        shown = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        raise AdapterError(
            f"adapter {name!r} in {folder!r} has {shown}, which vLLM does not serve; "
            f"use a plain LoRA adapter, or genlm-hf"
        )


def _config(name: str, folder: str) -> Mapping[str, Any]:
    place = Path(folder)
    weights = [place / f"adapter_model.{suffix}" for suffix in ("safetensors", "bin", "pt")]
    file = place / "adapter_config.json"
    if not file.is_file() or not any(weight.is_file() for weight in weights):
        raise AdapterError(
            f"adapter {name!r}: {folder!r} is no folder with adapter_config.json and "
            f"adapter_model.safetensors, as peft's save_pretrained writes it"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AdapterError(
            f"adapter {name!r}: {str(file)!r} is no valid JSON: {error}"
        ) from error
    if not isinstance(config, dict):
        raise AdapterError(f"adapter {name!r}: {str(file)!r} holds no settings")
    return config
