"""What the files of a LoRA adapter say, before vLLM sees them.

vLLM ignores settings that it does not know, puts weights that are too small for the model
into a corner of its own, and leaves out layers that the model does not have; the rows
would be wrong without a word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from genlm import AdapterError, read_adapter_config

__all__ = ["check_config", "misfit"]

# The other ways of initialising change the weights of the base model.
_HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")

_CHANGES = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "alora_invocation_tokens",
    "use_bdlora",
    "use_qalora",
)
"""Settings of a config that vLLM refuses or, in some supported version, ignores."""

_PATTERNS = ("rank_pattern", "alpha_pattern")
"""Settings that vLLM serves since it knows them, and ignored before."""


def check_config(name: str, folder: str, known: Collection[str]) -> None:
    """Refuse an adapter whose config says that vLLM would not serve it rightly.

    Args:
        name: What the adapter is to be called.
        folder: Where it is.
        known: The settings that the installed vLLM reads.

    Raises:
        AdapterError: The folder holds no adapter, or one that is no plain LoRA.
    """
    config = read_adapter_config(name, folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"adapter {name!r} in {folder!r} is of type {kind}; only LORA adapters are served"
        )
    unserved = (*_CHANGES, *(key for key in _PATTERNS if key not in known))
    changes = {key: config[key] for key in unserved if config.get(key)}
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


_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def misfit(model_config: Any, folder: str) -> str | None:
    """Return why an adapter's weights do not fit a model, None if they seem to.

    Compares with the modules of transformers' own model of that config, built without
    weights. Where transformers has none, or calls its modules otherwise, vLLM is left to
    decide.
    """
    shapes = _module_shapes(model_config)
    try:
        weights = [
            (match["module"], match["side"], shape)
            for name, shape in _weight_shapes(Path(folder))
            if (match := _WEIGHT.fullmatch(name))
        ]
    except Exception as error:  # noqa: BLE001 - each format has errors of its own
        return f"its weights cannot be read: {error}"
    if not any(module in shapes for module, *_ in weights):
        return None
    for module, side, shape in weights:
        if module not in shapes:
            return f"the model has no {module}"
        inputs, outputs = shapes[module]
        found, expected = (shape[1], inputs) if side == "A" else (shape[0], outputs)
        if found != expected:
            return f"lora_{side} of {module} is {found} wide, the model {expected}"
    return None


def _module_shapes(model_config: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every linear layer, by transformers' name."""
    import transformers

    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(model_config)
    except Exception:  # noqa: BLE001 - it may be a model with code of its own
        return {}
    shapes = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 2:
            rows, columns = weight.shape
            is_conv1d = type(module).__name__ == "Conv1D"  # GPT-2's, stored transposed
            shapes[name] = (rows, columns) if is_conv1d else (columns, rows)
    return shapes


def _weight_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    import safetensors

    file = folder / "adapter_model.safetensors"
    if file.is_file():
        with safetensors.safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                yield name, tuple(tensors.get_slice(name).get_shape())
        return
    for other in (folder / "adapter_model.bin", folder / "adapter_model.pt"):
        if other.is_file():
            loaded = torch.load(other, map_location="meta", weights_only=True)
            yield from ((name, tuple(tensor.shape)) for name, tensor in loaded.items())
            return
