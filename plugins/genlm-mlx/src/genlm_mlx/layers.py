"""Layers that mlx-lm rounds or approximates differently from transformers.

The differences are 1e-4 to 1e-3 in float32 and vanish in half precision: an exact GELU in
place of its approximation by a hyperbolic tangent, or the reverse, and the precision of the
root of the hidden size, by which Gemma's embeddings are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx
from mlx.nn.layers.base import Module
from mlx_lm.models.deepseek_v32 import Indexer

ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function")
"""Names of the activation function of feed-forward layers in configs."""

TANH_GELUS = {"gelu_pytorch_tanh", "gelu_new", "gelu_fast"}
"""Names of the approximate GELU, up to rounding."""

_GELUS = {"gelu": gelu} | dict.fromkeys(TANH_GELUS, gelu_approx)

# Models of mlx-lm whose feed-forward layers have a fixed GELU, independent of the config.
_FIXED_GELU_MODELS = {"gemma", "gpt_bigcode", "gpt_neox", "starcoder2"}

# Epsilon of the norm of the keys by which DeepSeek 3.2 selects tokens.
_INDEX_EPS = 1e-6

# Name of the last projection by that of the first.
_PROJECTIONS = {"c_fc": "c_proj", "dense_h_to_4h": "dense_4h_to_h"}


def correct_layers(model: Any, config: Any) -> None:
    """Make a model compute as transformers does.

    Args:
        model: An mlx-lm model; it is changed in place.
        config: transformers' config of its language model.
    """
    name = _module_name(model)
    if can_correct_activation(model, config):
        activation = _GELUS[_activation(config)]
        for layer in model.layers:
            layer.mlp.__class__ = subclass_with_call(type(layer.mlp), _feed_forward(activation))
    if name in {"gemma3_text", "recurrent_gemma"}:
        _scale_embeddings(model.model.embed_tokens, config.hidden_size, name)
    for part in model.modules():
        if isinstance(part, Indexer):
            part.k_norm.eps = _INDEX_EPS


def subclass_with_call(kind: type[Any], call: Callable[..., mx.array]) -> type[Any]:
    """Return a subclass of modules with another `__call__`, marked `corrected`."""
    members = {"__call__": call, "__module__": kind.__module__, "corrected": True}
    return type(kind.__name__, (kind,), members)


def can_correct_activation(model: Any, config: Any) -> bool:
    """Whether `correct_layers` sets the GELU of feed-forward layers to that of the config."""
    return _module_name(model) in _FIXED_GELU_MODELS and _activation(config) in _GELUS


def _module_name(model: Any) -> str:
    return type(model).__module__.rpartition(".")[2]


def _activation(config: Any) -> str:
    values = (getattr(config, name, None) for name in ACTIVATIONS)
    return next((str(value) for value in values if value), "")


def _feed_forward(activation: Callable[[mx.array], mx.array]) -> Callable[..., mx.array]:
    def call(mlp: Any, x: mx.array) -> mx.array:
        result: mx.array
        if "gate_proj" in mlp:
            result = mlp.down_proj(activation(mlp.gate_proj(x)) * mlp.up_proj(x))
        else:
            first, last = next(names for names in _PROJECTIONS.items() if names[0] in mlp)
            result = mlp[last](activation(mlp[first](x)))
        return result

    return call


def _scale_embeddings(embeddings: Module, hidden_size: int, name: str) -> None:
    """Correct the precision in which a model rounds the root of its hidden size.

    transformers rounds it to the weights' type in Gemma 3, and to bfloat16 in RecurrentGemma;
    mlx-lm rounds it to bfloat16 in Gemma 3, and does not round it in RecurrentGemma.
    """
    kind = type(embeddings)
    if getattr(kind, "corrected", False):  # by an earlier engine
        return

    def call(module: Any, ids: mx.array) -> mx.array:
        embedded: mx.array = kind.__call__(module, ids)
        root = math.sqrt(hidden_size)
        coarse = float(mx.array(root, mx.bfloat16))
        exact = float(mx.array(root, embedded.dtype))
        return embedded * (exact / coarse if name == "gemma3_text" else coarse / exact)

    embeddings.__class__ = subclass_with_call(kind, call)
