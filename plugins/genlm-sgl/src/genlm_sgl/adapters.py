"""LoRA adapters of one engine: checked, loaded in the open, told apart by number.

SGLang ignores settings of an adapter that it does not know, and looks at the shapes of its
weights in the middle of a forward pass, where the wrong ones would fail every request. So an
adapter is checked and tried before its name is known. SGLang knows it by a number that is
never used again, and by which it also keys cached prefixes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm import AdapterError, EvaluationError, read_adapter_config
from genlm_sgl.scheduler_api import SchedulerApi

__all__ = ["Adapters", "check_config"]

_SERVED = frozenset({"lora_alpha", "r", "target_modules"})

_NO_MATTER = frozenset(
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
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Settings about training, or about weights that are or are not in the file."""

# What each of these is where it changes nothing; other ways of initialising an adapter change
# the weights of the base model.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "qalora_group_size": (16,),
}


class Adapters:
    """The adapters that queries may ask for, as many as memory holds.

    Args:
        api: The scheduler, of a model that was loaded for adapters.
    """

    def __init__(self, api: SchedulerApi) -> None:
        self._api = api
        self._numbers = itertools.count(1)
        self._ids: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, oldest first."""
        return tuple(self._ids)

    def id_of(self, name: str | None) -> str | None:
        """What SGLang calls a loaded adapter; None for none.

        Raises:
            KeyError: None of that name is loaded.
        """
        return None if name is None else self._ids[name]

    def load(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path`, to be known as `name`; nothing may run.

        Raises:
            AdapterError: The name is taken, or the folder holds no LoRA adapter that SGLang
                serves with this model. Nothing has changed.
        """
        if name in self._ids:
            raise AdapterError(
                f"an adapter named {name!r} is loaded already; take another name"
            )
        folder = Path(path).expanduser().resolve()
        check_config(name, folder)
        number = str(next(self._numbers))
        problem = self._api.load_adapter(number, f"{number}-{name}", str(folder))
        if problem is not None:
            raise AdapterError(
                f"SGLang does not serve adapter {name!r} in {path!r} with this model: "
                f"{' '.join(problem.split())} (the model was loaded for ranks and layers of "
                f"engine_opts['max_lora_rank'] and ['lora_target_modules'])"
            )
        self._ids[name] = number

    def remove(self, name: str) -> None:
        """Have SGLang drop an adapter; nothing may run.

        Raises:
            EvaluationError: It did not.
        """
        number = self._ids[name]
        problem = self._api.unload_adapter(number, f"{number}-{name}")
        if problem is not None:
            raise EvaluationError(f"SGLang did not remove adapter {name!r}: {problem}")
        del self._ids[name]


def check_config(name: str, folder: Path) -> None:
    """Refuse an adapter whose config says something that SGLang would ignore.

    Raises:
        AdapterError: The folder holds no adapter, or one that is no plain LoRA.
    """
    config = read_adapter_config(name, folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"adapter {name!r} in {str(folder)!r} is of type {kind}; only LORA adapters are "
            f"served"
        )
    changes = {
        key: value
        for key, value in config.items()
        if key not in _SERVED | _NO_MATTER | {"peft_type"}
        and value not in (None, False, {}, [], *_HARMLESS.get(key, ()))
    }
    if changes:
        shown = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        raise AdapterError(
            f"adapter {name!r} in {str(folder)!r} has {shown}, which SGLang does not serve; "
            f"use a plain LoRA adapter, or genlm-hf"
        )
