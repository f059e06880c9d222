"""`MLXEngine`: MLX models as a genlm engine."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar, Self

import mlx.core as mx

from genlm.plugin import (
    ModelFacts,
    VerifiedFamilies,
    Vocabulary,
    check_unverified_option,
    check_verified,
    context_window,
)
from genlm.prefix import PrefixEngine, ServeOptions
from genlm_mlx.adapters import Adapters
from genlm_mlx.corrections import correct
from genlm_mlx.execution_paths import (
    PATHS,
    choose_execution_path,
)
from genlm_mlx.loading import (
    as_dtype,
    check_model,
    embedding_rows,
    load_model,
    load_weights,
    unwrap_tokenizer,
)
from genlm_mlx.published import read_config


class MLXEngine(PrefixEngine):
    """Next-token rows of an mlx-lm language model.

    A row does not depend, beyond rounding, on the other sequences of its batch. Rows are on
    the CPU.

    Args:
        model: A folder, a hub id, or `"demo"` for the small model of genlm-hf, if installed.
        dtype: `"float32"`, `"float16"` or `"bfloat16"`. The default is that of the checkpoint.
            Quantised weights keep their dtype.
        mlx_opts: Further arguments of `mlx_lm.load`, such as `tokenizer_config`,
            `model_config` or `revision`.
        trust_remote_code: Whether code that comes with the model may be run.
        max_tokens_per_batch: Maximum number of new positions, padding included, in one forward
            pass. The default is 2048. Longer contexts take several passes.
        kv_budget_bytes: Maximum memory for cached keys and values. The default is a quarter of
            the free memory. Memory is allocated when it is needed.
        max_context: Maximum number of tokens of a context, if less than that of the model. Some
            models are served only up to a length that the error states.
        execution_path: `"slot_cache"`, `"uncached"`, or None for the faster path that gives the
            right rows.
        self_test: Whether to compare the path `slot_cache` with mlx-lm's cache, on a few short
            sequences, when the model is loaded.
        unverified: `"warn"` to warn about models of families that were not compared with
            transformers, `"refuse"` to refuse them.

    Raises:
        ModelLoadError: The model does not exist or cannot be served.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        ValueError: Options contradict each other or do not exist.
    """

    backend = "mlx"

    option_homes: ClassVar[Mapping[str, str]] = {"": "mlx_opts"}

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        mlx_opts: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        max_tokens_per_batch: int | None = None,
        kv_budget_bytes: int | None = None,
        max_context: int | None = None,
        execution_path: str | None = None,
        self_test: bool = True,
        unverified: str = "warn",
    ) -> None:
        options = ServeOptions(
            paths=PATHS,
            max_context=max_context,
            max_tokens_per_batch=max_tokens_per_batch,
            kv_budget_bytes=kv_budget_bytes,
            execution_path=execution_path,
            self_test=self_test,
        )
        check_unverified_option(unverified)
        mlx_dtype = None if dtype in {None, "auto"} else as_dtype(dtype)
        loaded, tokenizer, settings, config = load_model(
            model, mlx_opts, trust_remote_code=trust_remote_code
        )
        if mlx_dtype is not None:
            loaded.set_dtype(mlx_dtype)
        self._serve(loaded, tokenizer, settings, config, options, unverified=unverified)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        config: Mapping[str, Any] | None = None,
        *,
        max_tokens_per_batch: int | None = None,
        kv_budget_bytes: int | None = None,
        max_context: int | None = None,
        execution_path: str | None = None,
        self_test: bool = True,
        unverified: str = "warn",
    ) -> Self:
        """Serve a model and tokenizer that the caller has loaded with mlx-lm.

        The caller keeps the model. It must not be changed or run elsewhere while the engine
        steps, and its weights must have been evaluated. If its config is passed and it computes
        other rows than transformers, it is corrected in place.

        Args:
            model: The model that `mlx_lm.load` returned.
            tokenizer: The tokenizer that it returned.
            config: The config that it returned with `return_config=True`.
            max_tokens_per_batch: As in `MLXEngine`.
            kv_budget_bytes: As in `MLXEngine`.
            max_context: As in `MLXEngine`.
            execution_path: As in `MLXEngine`.
            self_test: As in `MLXEngine`.
            unverified: As in `MLXEngine`; a model without its config is unverified.

        Raises:
            ModelLoadError: The model is not an mlx-lm model, or cannot be served.
            VocabularyError: The tokenizer cannot be decoded to exact bytes.
        """
        options = ServeOptions(
            paths=PATHS,
            max_context=max_context,
            max_tokens_per_batch=max_tokens_per_batch,
            kv_budget_bytes=kv_budget_bytes,
            execution_path=execution_path,
            self_test=self_test,
        )
        engine = cls.__new__(cls)
        settings = config or dict(vars(model.args) if hasattr(model, "args") else {})
        published = None if config is None else read_config(config)
        engine._serve(model, tokenizer, settings, published, options, unverified=unverified)  # noqa: SLF001 - the same class
        return engine

    def _serve(
        self,
        model: Any,
        tokenizer: Any,
        settings: Mapping[str, Any],
        config: Any,
        options: ServeOptions,
        *,
        unverified: str,
    ) -> None:
        check_model(model)
        model.eval()
        self.vocabulary = Vocabulary.from_tokenizer(unwrap_tokenizer(tokenizer))
        limits = context_window(settings.get("text_config") or settings), options.max_context
        self.max_context = min(filter(None, limits), default=None)
        rows = embedding_rows(settings, self.vocabulary.size)
        if config is not None:
            correct(model, config, self.max_context)
        check_verified(
            f"mlx-lm {version('mlx-lm')}",
            ModelFacts.of(settings if config is None else config),
            VerifiedFamilies.of_package("genlm_mlx"),
            unverified=unverified,
        )
        choice = choose_execution_path(
            model,
            self.vocabulary,
            options,
            max_context=self.max_context,
            embedding_rows=rows,
        )
        self.serve(
            choice,
            Adapters(model),
            embedding_rows=rows,
            load_weights=functools.partial(load_weights, model),
        )
        self._model_type = type(model).__module__.rpartition(".")[2]

    def model_statistics(self) -> Mapping[str, int | float | str]:
        """Return the model's type and MLX's device."""
        return {"model": self._model_type, "device": str(mx.default_device())}

    def close(self) -> None:
        """Free the model and all cached state."""
        super().close()
        mx.clear_cache()
