"""Loads an mlx-lm model, its tokenizer and its config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

import mlx.core as mx
import torch
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from genlm.plugin import (
    ModelLoadError,
    dtype_name,
    loading_stage,
    model_source,
    options_mapping,
)
from genlm_mlx.published import mlx_settings, published_config

_RESERVED_OPTIONS = {
    "adapter_path": "call load_lora, which keeps the base model available",
    "lazy": "weights are read on the engine's thread, which uses them",
    "return_config": "the engine always reads the config",
    "trust_remote_code": "it is a separate option",
}

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load_model(
    model: str | os.PathLike[str],
    mlx_opts: Mapping[str, Any] | None,
    *,
    trust_remote_code: bool,
) -> tuple[Any, Any, Mapping[str, Any], Any]:
    """Load a model, its tokenizer and its config with mlx-lm, and the config with transformers.

    Args:
        model: A folder or a hub id.
        mlx_opts: Further arguments of `mlx_lm.load`.
        trust_remote_code: Whether code that comes with the model may be run.

    Returns:
        The model, its tokenizer, its settings as mlx-lm reads them, and transformers'
        config, None for an architecture that transformers does not support.

    Raises:
        ModelLoadError: The model does not exist, or mlx-lm cannot load it.
        ValueError: An option is reserved for the engine.
        TypeError: `mlx_opts` is not a mapping.
    """
    from mlx_lm import load

    options = dict(options_mapping("mlx_opts", mlx_opts))
    for name, reason in _RESERVED_OPTIONS.items():
        if name in options:
            raise ValueError(f"mlx_opts has {name!r}, which the engine decides: {reason}")
    source = model_source(model)
    loading_stage("weights and tokenizer")
    if trust_remote_code:
        options["trust_remote_code"] = True
        tokenizer_config = {**options.get("tokenizer_config", {}), "trust_remote_code": True}
        options["tokenizer_config"] = tokenizer_config
    changes = options.pop("model_config", None) or {}
    try:
        file_settings, config = published_config(
            source, changes, revision=options.get("revision")
        )
        missing_settings = {} if config is None else mlx_settings(file_settings, config)
        loaded, tokenizer, settings = load(
            source, return_config=True, model_config={**changes, **missing_settings}, **options
        )
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise ValueError(f"mlx_opts are arguments of mlx_lm.load: {error}") from error
        raise _load_error(model, error) from error
    except (Exception, SystemExit) as error:  # a model of mlx-lm exits if a package is missing
        raise _load_error(model, error) from error
    return loaded, tokenizer, settings, config


def _load_error(model: object, error: BaseException) -> ModelLoadError:
    return ModelLoadError(
        f"mlx-lm could not load {str(model)!r}: {type(error).__name__}: "
        f"{shorten(str(error), 400)}"
    )


def check_model(model: Any) -> None:
    """Refuse a model that is not an mlx-lm language model or cannot run on this thread.

    Raises:
        ModelLoadError: It is not an mlx-lm model, or its weights belong to another thread.
    """
    if not hasattr(model, "layers") or not hasattr(model, "parameters"):
        raise ModelLoadError(
            f"a {type(model).__name__} is not a model of mlx-lm; pass a model that mlx_lm.load "
            f"returned"
        )
    try:
        mx.eval(model.parameters())
    except RuntimeError as error:
        raise ModelLoadError(
            f"the model's weights cannot be evaluated on the engine's thread ({error}); call "
            "mx.eval(model.parameters()) on the thread that created them"
        ) from error


def unwrap_tokenizer(tokenizer: Any) -> Any:
    """Return the transformers tokenizer in mlx-lm's wrapper; other tokenizers unchanged."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    # Tokenizers of transformers have an attribute of this name with another meaning.
    return tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer  # noqa: SLF001


def as_dtype(name: str) -> mx.Dtype:
    """Return MLX's dtype of a name.

    Raises:
        ValueError: The name is not a dtype of weights.
    """
    common_name = dtype_name(name)
    if common_name not in _DTYPES:
        raise ValueError(f"dtype={name!r}; choose one of {', '.join(map(repr, _DTYPES))}")
    return _DTYPES[common_name]


def embedding_rows(config: Mapping[str, Any], default: int) -> int:
    """Return the number of ids that a model can embed."""
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) else default


def load_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Copy weights into a model, whose parameters keep their dtypes.

    Args:
        model: A model of mlx-lm.
        weights: Arrays of MLX or tensors of torch by their names in the checkpoint.

    Raises:
        ValueError: The names or shapes differ from the model's, or it is quantised.
    """
    arrays = _sanitized(model, {name: _as_array(value) for name, value in weights.items()})
    parameters: Any = tree_flatten(model.parameters())
    dtypes = {name: array.dtype for name, array in parameters}
    arrays = {
        name: array.astype(dtypes[name]) if name in dtypes else array
        for name, array in arrays.items()
        # `state_dict` of a transformers model has tied weights under both names.
        if name in dtypes or name != "lm_head.weight"
    }
    mx.eval(arrays)
    model.load_weights(list(arrays.items()))  # compares names and shapes first


def _sanitized(model: Any, arrays: Mapping[str, mx.array]) -> Mapping[str, mx.array]:
    """Return the arrays of a checkpoint by mlx-lm's names."""
    if not hasattr(model, "sanitize"):
        return arrays
    # Some models remove their output embedding when they read a checkpoint without one.
    lacks_head = "lm_head" not in model
    if lacks_head:
        model.lm_head = Module()
    try:
        sanitized: Mapping[str, mx.array] = model.sanitize(dict(arrays))
    except Exception as error:
        raise ValueError(
            f"mlx-lm cannot read the weights of a {type(model).__name__}: "
            f"{type(error).__name__}: {error}; pass all tensors of the checkpoint by name"
        ) from error
    finally:
        if lacks_head:
            model.pop("lm_head", None)
    return sanitized


def _as_array(value: Any) -> mx.array:
    if isinstance(value, torch.Tensor):
        is_bfloat16 = value.dtype == torch.bfloat16  # a dtype that numpy lacks
        value = (value.float() if is_bfloat16 else value).cpu().numpy()
    return mx.array(value)
