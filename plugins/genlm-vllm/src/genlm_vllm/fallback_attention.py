"""Checks of the arguments that transformers' models pass to vLLM's attention.

If vLLM has no implementation of a model, it runs that of transformers with an attention
function that ignores masks and reshapes keys to the heads of the config. Models with custom
masks or heads would have wrong rows; with these checks they fail to load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_Attention = Callable[..., tuple[torch.Tensor, None]]


def check_fallback_attention() -> None:
    """Add checks to vLLM's attention functions for transformers' models.

    Must be called before a model is built. Further calls have no effect.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from vllm.model_executor.models.transformers import VLLM_ATTN_ATTR

    # That of latent attention computes the queries and keys itself.
    for name, attribute in (("vllm", VLLM_ATTN_ATTR), ("vllm_mla", None)):
        attention: _Attention = ALL_ATTENTION_FUNCTIONS[name]
        if not hasattr(attention, "__wrapped__"):
            ALL_ATTENTION_FUNCTIONS.register(name, _with_checks(attention, attribute))


def _with_checks(attention: _Attention, attribute: str | None) -> _Attention:
    """Return a function that refuses masks, and states unlike those of a layer's attribute."""

    @functools.wraps(attention)
    def checked(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        name = type(module).__name__
        if attention_mask is not None:
            raise NotImplementedError(
                f"{name} passes a custom attention mask, which vLLM ignores; rows would be "
                f"wrong. Use another engine"
            )
        if attribute is None:
            return attention(module, query, key, value, attention_mask, **kwargs)
        layer: Any = getattr(module, attribute)
        for kind, states, heads in (
            ("queries", query, layer.num_heads),
            ("keys", key, layer.num_kv_heads),
        ):
            width = states.shape[1] * states.shape[3]
            if width != heads * layer.head_size:
                raise NotImplementedError(
                    f"{name} computes {kind} of {width} elements a token, but vLLM attends "
                    f"over {heads} heads of {layer.head_size}; rows would be wrong. Use "
                    f"another engine"
                )
        return attention(module, query, key, value, attention_mask, **kwargs)

    return checked
