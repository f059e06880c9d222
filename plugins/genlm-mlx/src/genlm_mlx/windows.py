"""Attention windows that mlx-lm's models ignore.

In several of its models (Mistral, Gemma 2, Phi-3, Qwen 2 and others) every token attends to all
tokens before it, even if the config has a window.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from genlm_mlx.layers import subclass_with_call


def cache_windows(model: Any) -> dict[int, int | None]:
    """Return the windows of a model's caches by the index of the layer, None for all tokens.

    Layers without keys and values are not included.
    """
    return {
        layer: int(cache.max_size) if isinstance(cache, RotatingKVCache) else None
        for layer, cache in enumerate(make_prompt_cache(model))
        if isinstance(cache, (KVCache, RotatingKVCache))
    }


def correct_windows(model: Any, windows: Sequence[int | None]) -> str | None:
    """Set the attention windows of a model's layers.

    Args:
        model: An mlx-lm model; it is changed in place.
        windows: Attention window of each layer in tokens; None for all tokens.

    Returns:
        Why the windows cannot be set; None on success.
    """
    caches = make_prompt_cache(model)
    if any(type(cache) is not KVCache for cache in caches) or len(caches) != len(model.layers):
        return "its layers have windows or caches of another kind"
    if not all(_accepts_mask(type(layer)) for layer in model.layers):
        return "its layers take no mask"
    for layer in model.layers:
        layer.__class__ = _subclass_with_cache_mask(type(layer))
    model.make_cache = lambda: [
        KVCache() if window is None else RotatingKVCache(max_size=window) for window in windows
    ]
    return None


def _accepts_mask(layer: type[Module]) -> bool:
    return list(inspect.signature(layer.__call__).parameters)[1:4] == ["x", "mask", "cache"]


def _subclass_with_cache_mask(layer: type[Any]) -> type[Any]:
    """Return a class of layers that use the mask of their cache."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None:
            as_array = isinstance(mask, mx.array)
            mask = cache.make_mask(x.shape[1], return_array=as_array, window_size=None)
        states: mx.array = layer.__call__(self, x, mask, cache)
        return states

    return subclass_with_call(layer, call)
