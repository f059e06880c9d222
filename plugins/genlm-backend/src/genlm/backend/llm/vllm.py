"""`AsyncVirtualLM`: vLLM models as published."""

from __future__ import annotations

import hashlib
import threading
from importlib.util import find_spec
from typing import Any, Self

import torch

from genlm.backend.llm.handover import Recipe, recipe_of_vllm
from genlm.backend.llm.served import ServedLM, installed_engine, output_cache

__all__ = ["HAS_VLLM", "AsyncVirtualLM", "GlobalLogprobsCapture"]

HAS_VLLM = find_spec("vllm") is not None
"""Whether the library is installed."""


class AsyncVirtualLM(ServedLM):
    """Maps to `genlm.load_model(name, backend="vllm", engine_opts=...)`.

    Args:
        llm_engine: A `vllm.LLM`, with a `DeprecationWarning`: it is shut down, and its
            model loaded again with the same settings. Use `from_name`.
        logprobs_capture: Ignored; older versions needed it.
        cache_size: Maximum number of rows in the output cache.
        cache_opts: Further arguments of `OutputCache`.

    Raises:
        MissingRequirementError: genlm-vllm or vLLM is not installed; an `ImportError`.
    """

    def __init__(
        self,
        llm_engine: Any,
        logprobs_capture: Any = None,
        cache_size: int = 0,
        cache_opts: dict[str, Any] | None = None,
    ) -> None:
        engine = installed_engine("vllm", "AsyncVirtualLM", "pip install 'genlm-backend[vllm]'")
        recipe = llm_engine if isinstance(llm_engine, Recipe) else recipe_of_vllm(llm_engine)
        super().__init__(
            lambda: engine(recipe.model, engine_opts=recipe.engine_opts),
            name="vllm",
            cache=output_cache(cache_size, cache_opts),
        )

    @classmethod
    def from_name(  # type: ignore[override]
        cls, model_name: str, engine_opts: dict[str, Any] | None = None, **kwargs: Any
    ) -> Self:
        """Load a model.

        Args:
            model_name: A hub id or folder.
            engine_opts: Arguments of vLLM.
            **kwargs: Further arguments of the class.

        Raises:
            ModelLoadError: vLLM cannot serve the model.
            ValueError: An option that would make rows wrong.
            TypeError: An option that vLLM does not have.
        """
        return cls(Recipe(model_name, dict(engine_opts or {})), **kwargs)

    @property
    def llm_engine(self) -> Any:
        """VLLM's own engine, for inspection."""
        return self.engine.llm_engine  # type: ignore[attr-defined]

    @property
    def underlying_model(self) -> Any:
        """The model that vLLM runs in this process, a torch module."""
        core = self.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.model

    def hash_to_int(self, value: str) -> int:
        """Return a number from 0 to 255 that depends on the string only."""
        return hashlib.shake_128(value.encode()).digest(1)[0]

    async def release_all(self) -> None:
        """Free the prefixes that vLLM keeps; see `clear_kv_cache`."""
        self.clear_kv_cache()


class GlobalLogprobsCapture:
    """Keeps the log-probabilities of the last batch; `AsyncVirtualLM` does not need it.

    Args:
        device: Device of the logits; not needed.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self._last: torch.Tensor | None = None
        self._lock = threading.Lock()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Keep the normalised logits, shape `(batch, vocabulary)`; return them as given."""
        rows = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        with self._lock:
            self._last = rows
        return logits

    def is_argmax_invariant(self) -> bool:
        """True: no logit is changed."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: rows are indexed by their place in the batch."""

    def get_logprobs(self, batch_index: int = 0) -> torch.Tensor | None:
        """Return a copy of one row, None if it does not exist."""
        with self._lock:
            if self._last is None or batch_index >= len(self._last):
                return None
            return self._last[batch_index].clone()

    def get_all_logprobs(self) -> torch.Tensor | None:
        """Return a copy of all rows, None before the first batch."""
        with self._lock:
            return None if self._last is None else self._last.clone()

    def clear(self) -> None:
        """Drop the rows."""
        with self._lock:
            self._last = None
