"""LoRA adapters of one vLLM engine: checked, loaded in the open, told apart by number.

vLLM knows weights by an integer, and an adapter that turns out to be bad while a request
is computed ends the whole engine. So every adapter is checked and loaded before its name
is known, under a number that is never used again, and none is ever evicted: vLLM would
read its folder again in the middle of a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

from genlm import AdapterError, EvaluationError
from genlm_vllm.adapter_files import check_config, misfit
from genlm_vllm.worker import ask_workers

__all__ = ["Adapters"]


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
        from vllm.lora.peft_helper import PEFTHelper
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
        check_config(name, folder, {field.name for field in dataclasses.fields(PEFTHelper)})
        problem = misfit(self._engine.vllm_config.model_config.hf_config, folder)
        number = next(self._numbers)
        # The number is part of vLLM's name, by which it also keys cached prefixes.
        request = LoRARequest(f"{number}-{name}", number, folder)
        if problem is None:
            problem = self._added(request)
        if problem is not None:
            raise AdapterError(
                f"vLLM does not serve adapter {name!r} in {path!r} with this model: {problem}"
            )
        self._requests[name] = request

    def remove(self, name: str) -> None:
        """Have every worker drop an adapter."""
        request = self._requests.pop(name)
        ask_workers(self._engine, "genlm_remove_adapter", request.lora_int_id)

    def _added(self, request: Any) -> str | None:
        """Have every worker load an adapter; return why it did not, and undo it then."""
        try:
            loaded = ask_workers(
                self._engine,
                "genlm_add_adapter",
                request.lora_name,
                request.lora_int_id,
                request.lora_path,
            )
        except EvaluationError as error:
            problem = " ".join(str(error).split())
        else:
            if all(loaded):
                return None
            problem = "a worker did not load it"
        ask_workers(self._engine, "genlm_remove_adapter", request.lora_int_id)
        return problem
