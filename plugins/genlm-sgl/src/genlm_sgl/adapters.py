"""LoRA adapters of one engine: checked and loaded before requests can name them.

SGLang ignores settings of an adapter that it does not know, and compares the shapes of its
weights only during a forward pass, where a mismatch would fail every request. So each adapter
is checked and loaded into the model first. SGLang identifies it by a number that is never used
again, by which it also keys cached prefixes.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from genlm.plugin import AdapterError, EvaluationError, read_lora_config
from genlm_sgl.scheduler_api import SchedulerApi

__all__ = ["Adapters"]


class Adapters:
    """The loaded adapters by name, as many as fit into memory.

    Args:
        api: The scheduler of a model that was loaded with LoRA.
    """

    def __init__(self, api: SchedulerApi) -> None:
        self._api = api
        self._numbers = itertools.count(1)
        self._ids: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, oldest first."""
        return tuple(self._ids)

    @property
    def ids(self) -> tuple[str, ...]:
        """SGLang's ids of the loaded adapters."""
        return tuple(self._ids.values())

    def id_of(self, name: str | None) -> str | None:
        """Return SGLang's id of a loaded adapter, None for None.

        Raises:
            KeyError: The adapter is not loaded.
        """
        return None if name is None else self._ids[name]

    def load(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path` as `name`, while no request runs.

        Raises:
            AdapterError: The name is taken, or the folder holds no LoRA adapter that SGLang
                serves with this model. The loaded ones stay.
        """
        if name in self._ids:
            raise AdapterError(
                f"an adapter named {name!r} is loaded already; take another name"
            )
        folder = Path(path).expanduser().resolve()
        read_lora_config(name, folder, engine="SGLang")
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
        """Have SGLang drop an adapter; no request may be running.

        Raises:
            EvaluationError: SGLang reported a failure.
        """
        number = self._ids[name]
        problem = self._api.unload_adapter(number, f"{number}-{name}")
        if problem is not None:
            raise EvaluationError(f"SGLang did not remove adapter {name!r}: {problem}")
        del self._ids[name]
