"""LoRA adapters of a vLLM engine, which are checked and loaded before requests use them.

vLLM ignores settings that it does not know, pads weights that are too small for the model, and
skips layers that the model does not have or that `lora_target_modules` does not name. An
adapter that fails while a request is computed ends the whole engine. Therefore every adapter is
checked and loaded first. vLLM identifies an adapter by an integer, which is never reused.
Loaded adapters are not evicted, because vLLM would read their folders again during a step.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from genlm.plugin import (
    AdapterError,
    AdapterLimitError,
    AdapterTable,
    EvaluationError,
    read_lora_config,
)
from genlm_vllm.worker import call_workers

_SUPPORTED = frozenset({"alpha_pattern", "rank_pattern", "target_parameters", "use_rslora"})
"""Settings beyond plain LoRA that vLLM supports."""


class Adapters(AdapterTable[Any]):
    """The `LoRARequest` of each loaded adapter.

    Args:
        engine: The `vllm.LLMEngine`.
        capacity: Maximum number of adapters.
    """

    def __init__(self, engine: Any, capacity: int) -> None:
        super().__init__()
        self._engine = engine
        self._capacity = capacity
        self._numbers = itertools.count(1)

    def request(self, name: str | None) -> Any:
        """Return the `LoRARequest` of a loaded adapter, None for None."""
        return None if name is None else self.loaded[name]

    def _load(self, name: str, path: Path) -> Any:
        from vllm.lora.request import LoRARequest

        folder = os.path.realpath(path)
        read_lora_config(name, folder, engine="vLLM", supported=_SUPPORTED)
        problem = _weight_mismatch(self._engine.vllm_config.model_config.hf_config, folder)
        if problem is None and len(self.loaded) == self._capacity:
            raise AdapterLimitError(
                f"cannot load adapter {name!r}: {self._capacity} adapters are loaded or still "
                f"in use, the maximum of this model; unload one and wait for its requests, or "
                f"load the model with a larger engine_opts['max_loras']"
            )
        number = next(self._numbers)
        # The number makes the name unique: vLLM's prefix cache uses it as a key.
        request = LoRARequest(f"{number}-{name}", number, folder)
        if problem is None:
            problem = self._add_to_workers(request)
        if problem is not None:
            raise AdapterError(
                f"vLLM cannot serve adapter {name!r} in {str(path)!r} with this model: "
                f"{problem}"
            )
        return request

    def _unload(self, name: str, adapter: Any) -> None:  # noqa: ARG002
        call_workers(self._engine, "genlm_remove_adapter", adapter.lora_int_id)

    def _add_to_workers(self, request: Any) -> str | None:
        """Load an adapter on all workers or on none; return the reason of a failure."""
        try:
            loaded = call_workers(self._engine, "genlm_add_adapter", request)
        except EvaluationError as error:
            problem = " ".join(str(error).split())
        else:
            if None in loaded:
                problem = "a worker did not load it"
            elif unused := set.intersection(*map(set, loaded)):
                targets = self._engine.vllm_config.lora_config.target_modules
                problem = (
                    f"it would be computed without its weights of {', '.join(sorted(unused))}"
                )
                if targets is not None:
                    problem += (
                        f"; the model was loaded with "
                        f"engine_opts['lora_target_modules']={sorted(targets)}"
                    )
            else:
                return None
        call_workers(self._engine, "genlm_remove_adapter", request.lora_int_id)
        return problem


_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def _weight_mismatch(model_config: Any, folder: str) -> str | None:
    """Return why an adapter's weights do not fit a model, None if they seem to.

    The weights are compared with the modules of transformers' model of the same config, built
    without weights. If transformers has no such model, or other names of modules, the weights
    are not compared.
    """
    shapes = _module_shapes(model_config)
    try:
        weights = [
            (match["module"], match["side"], shape)
            for name, shape in _weight_shapes(Path(folder))
            if (match := _WEIGHT.fullmatch(name))
        ]
    except Exception as error:  # noqa: BLE001 - the errors depend on the format
        return f"its weights cannot be read: {error}"
    if not any(module in shapes for module, *_ in weights):
        return None
    for module, side, shape in weights:
        if module not in shapes:
            return f"the model has no {module}"
        inputs, outputs = shapes[module]
        width, expected = (shape[1], inputs) if side == "A" else (shape[0], outputs)
        if width != expected:
            return f"lora_{side} of {module} is {width} wide, the model's layer {expected}"
    return None


def _module_shapes(model_config: Any) -> dict[str, tuple[int, int]]:
    """Return the input and output widths of linear layers by transformers' names."""
    import transformers

    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(model_config)
    except Exception:  # noqa: BLE001 - custom-code models raise any error
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
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tuple(tensors.get_slice(name).get_shape())
        return
    for pickle_file in (folder / "adapter_model.bin", folder / "adapter_model.pt"):
        if pickle_file.is_file():
            weights = torch.load(pickle_file, map_location="meta", weights_only=True)
            yield from ((name, tuple(tensor.shape)) for name, tensor in weights.items())
            return
