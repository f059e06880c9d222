"""LoRA adapters of an engine, which are checked and loaded before requests use them.

SGLang ignores settings of an adapter that it does not know, and compares the shapes of its
weights only during a forward pass, where a mismatch would fail every request. Therefore every
adapter is checked and loaded into the model first. SGLang identifies an adapter by a number,
which is never reused.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from genlm import prefix
from genlm.plugin import AdapterError, EvaluationError, read_lora_config
from genlm_sgl.served_model import ServedModel


class Adapters(prefix.ModelAdapters[str]):
    """SGLang's ids of the loaded adapters. Only memory limits their number.

    Args:
        served: A model that was loaded with LoRA.
    """

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        self._served = served
        self._numbers = itertools.count(1)

    def id_of(self, name: str | None) -> str | None:
        """Return SGLang's id of a loaded adapter, None for None.

        Raises:
            KeyError: The adapter is not loaded.
        """
        return None if name is None else self.loaded[name]

    def activate(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002 - see below
        """Do nothing; every pass names its adapter."""
        return nullcontext()

    def _load(self, name: str, path: Path) -> str:
        folder = path.resolve()
        read_lora_config(name, folder, engine="SGLang")
        number = str(next(self._numbers))
        problem = self._served.load_adapter(number, f"{number}-{name}", str(folder))
        if problem is not None:
            raise AdapterError(
                f"SGLang cannot serve adapter {name!r} in {str(path)!r} with this model: "
                f"{' '.join(problem.split())} (the model was loaded for ranks and layers of "
                f"engine_opts['max_lora_rank'] and ['lora_target_modules']; an adapter of "
                f"q_proj, k_proj or v_proj needs both q_proj and v_proj, and one of up_proj "
                f"needs gate_proj)"
            )
        return number

    def _unload(self, name: str, adapter: str) -> None:
        problem = self._served.unload_adapter(adapter, f"{adapter}-{name}")
        if problem is not None:
            raise EvaluationError(f"SGLang did not unload adapter {name!r}: {problem}")
