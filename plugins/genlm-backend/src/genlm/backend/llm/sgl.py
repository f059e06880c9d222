"""Published class `AsyncSGLTransformer` for models on SGLang."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Self

from genlm.backend.llm.served import (
    ServedLM,
    checked_builder,
    installed_engine,
    output_cache,
    with_rows_on_cpu,
)

__all__ = ["HAS_SGL", "AsyncSGLTransformer"]

HAS_SGL = find_spec("sglang") is not None
"""Whether SGLang is installed."""


class AsyncSGLTransformer(ServedLM):
    """Maps to `genlm.load_model(name, backend="sgl")`; rows are on the CPU. Use `from_name`.

    Args:
        sgl_model: Function that builds the engine, as `build_engine` of `genlm.AsyncLM`. An
            existing `Scheduler` of SGLang is rejected, since hooks for rows are installed while
            it is built.
        cache_size: Maximum number of rows in the output cache.
        cache_opts: Further arguments of `OutputCache`.

    Raises:
        TypeError: `sgl_model` is not callable.
    """

    def __init__(
        self, sgl_model: Any, cache_size: int = 0, cache_opts: dict[str, Any] | None = None
    ) -> None:
        build_engine = checked_builder(sgl_model, "AsyncSGLTransformer")
        super().__init__(
            lambda: with_rows_on_cpu(build_engine()),
            name="sgl",
            cache=output_cache(cache_size, cache_opts),
        )

    @classmethod
    def from_name(  # type: ignore[override]
        cls,
        model_id: str,
        engine_opts: dict[str, Any] | None = None,
        gpu_id: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Load a model.

        Args:
            model_id: Hub id or folder.
            engine_opts: Arguments of SGLang's `ServerArgs`.
            gpu_id: Index of the GPU.
            **kwargs: Further arguments of the class.

        Raises:
            ModelLoadError: SGLang cannot serve the model.
            MissingRequirementError: genlm-sgl or SGLang is not installed; an `ImportError`.
        """
        engine = installed_engine("sgl", "AsyncSGLTransformer")
        options = dict(engine_opts or {})
        return cls(lambda: engine(model_id, engine_opts=options, gpu_id=gpu_id), **kwargs)

    def clear_kv_cache(self) -> bool:  # type: ignore[override]
        """Free the cached prefixes of SGLang, and return True."""
        super().clear_kv_cache()
        return True
