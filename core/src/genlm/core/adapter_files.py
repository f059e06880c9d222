"""The folder of a LoRA adapter, as peft writes it; for engines that check one first."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm.core.errors import AdapterError

__all__ = ["read_adapter_config"]

_WEIGHTS = tuple(f"adapter_model.{suffix}" for suffix in ("safetensors", "bin", "pt"))


def read_adapter_config(name: str, folder: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the settings of an adapter.

    Args:
        name: What it is to be called, for messages.
        folder: With `adapter_config.json` and the weights, as peft's `save_pretrained`
            writes them.

    Raises:
        AdapterError: The folder holds no adapter, or its settings cannot be read.
    """
    place = Path(folder)
    file = place / "adapter_config.json"
    if not file.is_file() or not any((place / weights).is_file() for weights in _WEIGHTS):
        raise AdapterError(
            f"adapter {name!r}: {str(folder)!r} is no folder with adapter_config.json and "
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
