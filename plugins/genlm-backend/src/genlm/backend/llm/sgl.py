"""`AsyncSGLTransformer`: SGLang models as published."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Self

from genlm.backend.llm.handover import Recipe, recipe_of_sglang
from genlm.backend.llm.served import ServedLM, installed_engine, output_cache, with_rows_on_cpu

__all__ = ["HAS_SGL", "AsyncSGLTransformer"]

HAS_SGL = find_spec("sglang") is not None
"""Whether the library is installed."""


class AsyncSGLTransformer(ServedLM):
    """Maps to `genlm.load_model(name, backend="sgl")`; rows are on the CPU, as published.

    Args:
        sgl_model: SGLang's `Scheduler`, with a `DeprecationWarning`: it is ended, and its
            model loaded again with the same settings. Use `from_name`.
        cache_size: Maximum number of rows in the output cache.
        cache_opts: Further arguments of `OutputCache`.

    Raises:
        MissingRequirementError: genlm-sgl or SGLang is not installed; an `ImportError`.
    """

    def __init__(
        self, sgl_model: Any, cache_size: int = 0, cache_opts: dict[str, Any] | None = None
    ) -> None:
        engine = installed_engine(
            "sgl", "AsyncSGLTransformer", "pip install 'genlm-backend[sgl]'"
        )
        recipe = sgl_model if isinstance(sgl_model, Recipe) else recipe_of_sglang(sgl_model)
        super().__init__(
            lambda: with_rows_on_cpu(
                engine(recipe.model, engine_opts=recipe.engine_opts, gpu_id=recipe.gpu_id)
            ),
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
            model_id: A hub id or folder.
            engine_opts: Arguments of SGLang's `ServerArgs`.
            gpu_id: Index of the GPU.
            **kwargs: Further arguments of the class.

        Raises:
            ModelLoadError: SGLang cannot serve the model.
        """
        return cls(Recipe(model_id, dict(engine_opts or {}), gpu_id), **kwargs)

    def clear_kv_cache(self) -> bool:  # type: ignore[override]
        """Free the prefixes that SGLang keeps. Returns True; a failure raises."""
        super().clear_kv_cache()
        return True
