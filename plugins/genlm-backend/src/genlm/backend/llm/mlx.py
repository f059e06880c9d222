"""Published class `AsyncMlxLM` for models on MLX."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Self

from genlm.backend.llm.served import ServedLM, installed_engine, output_cache

__all__ = ["HAS_MLX", "AsyncMlxLM"]

HAS_MLX = find_spec("mlx_lm") is not None
"""Whether mlx-lm is installed."""


class AsyncMlxLM(ServedLM):
    """Maps to `genlm.load_model(name, backend="mlx")`.

    Args:
        mlx_lm_model: A model returned by `mlx_lm.load`, or a hub id or folder.
        tokenizer: Tokenizer of the model; None for a hub id or folder.
        timeout: Ignored; batches are dispatched without a timer.
        prefill_step_size: Maximum number of tokens in a forward pass.
        cache_size: Maximum number of rows in the output cache.
        cache_opts: Further arguments of `OutputCache`.

    Raises:
        MissingRequirementError: genlm-mlx or mlx-lm is not installed; an `ImportError`.
    """

    def __init__(
        self,
        mlx_lm_model: Any,
        tokenizer: Any,
        timeout: float = 0.0,
        prefill_step_size: int = 2048,
        cache_size: int = 0,
        cache_opts: dict[str, Any] | None = None,
    ) -> None:
        engine = installed_engine("mlx", "AsyncMlxLM")
        options = {"max_tokens_per_batch": prefill_step_size}
        super().__init__(
            lambda: (
                engine(mlx_lm_model, **options)
                if isinstance(mlx_lm_model, str)
                else engine.from_model(mlx_lm_model, tokenizer, **options)
            ),
            name="mlx",
            cache=output_cache(cache_size, cache_opts),
        )
        self.timeout = timeout
        self.prefill_step_size = prefill_step_size

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> Self:  # type: ignore[override]
        """Load a model.

        Args:
            model_name: Hub id or folder.
            **kwargs: Further arguments of the class.
        """
        return cls(model_name, None, **kwargs)
