"""Loads an mlx-lm model, its tokenizer and its config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

import mlx.core as mx

from genlm.plugin import ModelLoadError, dtype_name, loading_stage, model_source
from genlm_mlx.published import as_mlx_reads, published_config

__all__ = [
    "as_dtype",
    "check_model",
    "embedding_rows",
    "load_model",
    "unwrapped",
]

_OURS = {
    "adapter_path": "call load_lora, which keeps the base model available",
    "lazy": "weights are read where they are used, on the engine's thread",
    "return_config": "the engine reads the config itself",
    "trust_remote_code": "it is a separate option",
}

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load_model(
    model: str | os.PathLike[str], mlx_opts: Mapping[str, Any], *, trust_remote_code: bool
) -> tuple[Any, Any, Mapping[str, Any], Any]:
    """Load a model, its tokenizer and its config with mlx-lm, and the config with transformers.

    Args:
        model: A folder or a hub id.
        mlx_opts: Further arguments of `mlx_lm.load`.
        trust_remote_code: Whether code that comes with it may be run.

    Returns:
        The model, its tokenizer, its settings as mlx-lm has read them, and transformers'
        config, None for an architecture that it does not support.

    Raises:
        ModelLoadError: The model does not exist, or mlx-lm cannot load it.
        ValueError: An option that the engine decides.
    """
    from mlx_lm import load

    for name, why in _OURS.items():
        if name in mlx_opts:
            raise ValueError(f"mlx_opts has {name!r}, which the engine decides: {why}")
    source = model_source(model)
    loading_stage("weights and tokenizer")
    options = dict(mlx_opts)
    if trust_remote_code:
        options["trust_remote_code"] = True
        tokenizer_config = {**options.get("tokenizer_config", {}), "trust_remote_code": True}
        options["tokenizer_config"] = tokenizer_config
    changes = options.pop("model_config", None) or {}
    try:
        written, config = published_config(source, changes, revision=options.get("revision"))
        added = {} if config is None else as_mlx_reads(written, config)
        loaded, tokenizer, settings = load(
            source, return_config=True, model_config={**changes, **added}, **options
        )
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise ValueError(f"mlx_opts are arguments of mlx_lm.load: {error}") from error
        raise _not_loaded(model, error) from error
    except (Exception, SystemExit) as error:  # one of its models exits if a package is missing
        raise _not_loaded(model, error) from error
    return loaded, tokenizer, settings, config


def _not_loaded(model: object, error: BaseException) -> ModelLoadError:
    return ModelLoadError(
        f"mlx-lm could not load {str(model)!r}: {type(error).__name__}: "
        f"{shorten(str(error), 400)}"
    )


def check_model(model: Any) -> None:
    """Refuse a model that is not an mlx-lm language model or cannot run on this thread.

    Raises:
        ModelLoadError: It is not such a model, or its weights belong to another thread.
    """
    if not hasattr(model, "layers") or not hasattr(model, "parameters"):
        raise ModelLoadError(
            f"asked to serve a {type(model).__name__}; pass a model that mlx_lm.load returned"
        )
    try:
        mx.eval(model.parameters())
    except RuntimeError as error:
        raise ModelLoadError(
            f"the model's weights cannot be evaluated on the engine's thread ({error}); call "
            "mx.eval(model.parameters()) on the thread that made them"
        ) from error


def unwrapped(tokenizer: Any) -> Any:
    """Return the transformers tokenizer in mlx-lm's wrapper; others unchanged."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    # Tokenizers of transformers have an attribute of this name too, of another meaning.
    return tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer  # noqa: SLF001


def as_dtype(name: str) -> mx.Dtype:
    """Return MLX's dtype of a name.

    Raises:
        ValueError: The name is not a dtype of weights.
    """
    found = dtype_name(name)
    if found not in _DTYPES:
        raise ValueError(f"dtype={name!r}; choose one of {', '.join(map(repr, _DTYPES))}")
    return _DTYPES[found]


def embedding_rows(config: Mapping[str, Any], default: int) -> int:
    """Return the number of ids that a model can embed."""
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) else default
