"""Published class `AsyncVirtualLM` for models on vLLM."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any, Self

from genlm.backend.llm.served import ServedLM, checked_builder, installed_engine, output_cache

__all__ = ["HAS_VLLM", "AsyncVirtualLM"]

HAS_VLLM = find_spec("vllm") is not None
"""Whether vLLM is installed."""


class AsyncVirtualLM(ServedLM):
    """Maps to `genlm.load_model(name, backend="vllm", engine_opts=...)`; use `from_name`.

    Args:
        llm_engine: Function that builds the engine, as `build_engine` of `genlm.AsyncLM`. An
            existing engine of vLLM is rejected, since hooks for rows are installed while it is
            built.
        cache_size: Maximum number of rows in the output cache.
        cache_opts: Further arguments of `OutputCache`.

    Raises:
        TypeError: `llm_engine` is not callable.
    """

    def __init__(
        self, llm_engine: Any, cache_size: int = 0, cache_opts: dict[str, Any] | None = None
    ) -> None:
        super().__init__(
            checked_builder(llm_engine, "AsyncVirtualLM"),
            name="vllm",
            cache=output_cache(cache_size, cache_opts),
        )

    @classmethod
    def from_name(  # type: ignore[override]
        cls, model_name: str, engine_opts: dict[str, Any] | None = None, **kwargs: Any
    ) -> Self:
        """Load a model.

        Args:
            model_name: Hub id or folder.
            engine_opts: Arguments of vLLM.
            **kwargs: Further arguments of the class.

        Raises:
            ModelLoadError: vLLM cannot serve the model.
            MissingRequirementError: genlm-vllm or vLLM is not installed; an `ImportError`.
            ValueError: An option would make rows wrong.
            TypeError: vLLM does not have an option.
        """
        engine = installed_engine("vllm", "AsyncVirtualLM")
        return cls(partial(engine, model_name, engine_opts=dict(engine_opts or {})), **kwargs)

    @property
    def llm_engine(self) -> Any:
        """The wrapped engine of vLLM, for inspection."""
        return self.engine.llm_engine  # type: ignore[attr-defined]

    @property
    def underlying_model(self) -> Any:
        """The model that vLLM runs in this process, a torch module."""
        core = self.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.model

    async def release_all(self) -> None:
        """Free the cached prefixes of vLLM; see `clear_kv_cache`."""
        self.clear_kv_cache()
