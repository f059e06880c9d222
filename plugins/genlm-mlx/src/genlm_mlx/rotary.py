"""Rotary embeddings with the frequencies of transformers, where mlx-lm has others.

mlx-lm's models ignore kinds of scaling that they do not support. Where frequencies depend on
the length of the context (dynamic NTK scaling, LongRoPE), mlx-lm rotates each key by the length
at the time of its computation, or always as in long contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_unflatten
from mlx_lm.models import rope_utils
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

__all__ = ["PublishedRoPE", "correct_rotary"]

_KINDS: tuple[type[Module], ...] = (RoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE)
if hasattr(rope_utils, "DynamicNTKScalingRoPE"):  # since mlx-lm 0.32
    _KINDS += (rope_utils.DynamicNTKScalingRoPE,)

# Larger relative differences are more than rounding.
_TOLERANCE = 1e-5


class PublishedRoPE(Module):
    """Rotates by the frequencies that transformers computes for contexts of one length.

    Args:
        published: Those frequencies.
        traditional: Whether neighbours are rotated, rather than the halves of a head.

    Attributes:
        longest: Longest context with the frequencies of short ones; None if all have them.
    """

    def __init__(self, published: _Published, *, traditional: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._published, self._traditional = published, traditional
        self.longest = published.longest
        self.set_length(1)

    def set_length(self, tokens: int) -> None:
        """Rotate as in contexts of that length from now on."""
        frequencies, self._scale = self._published.frequencies(tokens)
        self._dims, self._periods = 2 * len(frequencies), mx.array(1 / frequencies)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate `(..., tokens, width)`, whose first token is at position `offset`."""
        if self._scale != 1:
            x = x.at[..., : self._dims].multiply(self._scale)
        return mx.fast.rope(
            x,
            self._dims,
            traditional=self._traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._periods,
        )


def correct_rotary(model: Any, config: Any) -> list[PublishedRoPE]:
    """Replace rotary embeddings whose frequencies are not those of transformers.

    Args:
        model: An mlx-lm model; it is changed in place.
        config: transformers' config of its language model.

    Returns:
        The embeddings inserted by this or an earlier engine, each once.
    """
    made: dict[tuple[str | None, int, bool], PublishedRoPE] = {}
    placed: list[tuple[str, Module]] = []
    present: dict[int, PublishedRoPE] = {}
    for path, module in model.named_modules():
        if isinstance(module, PublishedRoPE):
            present[id(module)] = module
        layer_type = _layer_type(config, path)
        if not isinstance(module, _KINDS) or not _parameters(config, layer_type):
            continue
        own = module.dim if isinstance(module, SuScaledRoPE) else module.dims
        published = _Published(config, layer_type, own)
        if not published.known or _agrees(module, published):
            continue
        traditional = bool(getattr(module, "traditional", False))
        key = layer_type, own, traditional
        if key not in made:
            made[key] = PublishedRoPE(published, traditional=traditional)
        placed.append((path, made[key]))
    model.update_modules(tree_unflatten(placed))
    return [*present.values(), *made.values()]


def _agrees(module: Any, published: _Published) -> bool:
    """Whether a module rotates as transformers does at every length."""
    if published.longest is not None:
        return False
    expected, scale = published.frequencies(1)
    if isinstance(module, RoPE):
        found = module.scale * module.base ** -(np.arange(0, module.dims, 2) / module.dims)
    else:
        found = 1 / np.array(module._freqs)  # noqa: SLF001 - kept nowhere else
    close = found.shape == expected.shape and np.allclose(
        found, expected, rtol=_TOLERANCE, atol=0
    )
    return bool(close) and abs(getattr(module, "mscale", 1.0) - scale) < _TOLERANCE


class _Published:
    """Frequencies by transformers' config.

    Args:
        config: Config of the language model.
        layer_type: The kind of layer, if kinds have settings of their own.
        dims: Number of dimensions of a head that mlx-lm rotates.

    Attributes:
        known: Whether transformers computes such frequencies for any architecture.
        longest: Longest context with the frequencies of short ones; None if all have them.
    """

    def __init__(self, config: Any, layer_type: str | None, dims: int) -> None:
        self._config, self._layer_type, self._dims = config, layer_type, dims
        self._parameters = parameters = _parameters(config, layer_type)
        self._kind = parameters.get("rope_type", "default")
        self.known = self._kind == "default" or self._kind in ROPE_INIT_FUNCTIONS
        self.longest: int | None = None
        if self._kind == "longrope":
            self.longest = int(parameters["original_max_position_embeddings"])
        elif self._kind == "dynamic":
            self.longest = int(config.max_position_embeddings)
        share = parameters.get("partial_rotary_factor")
        if share is not None and getattr(config, "kv_lora_rank", None) is None:
            heads = config.num_attention_heads
            self._dims = int(
                (getattr(config, "head_dim", None) or config.hidden_size // heads) * share
            )

    def frequencies(self, tokens: int) -> tuple[np.ndarray[Any, Any], float]:
        """Return the frequencies for contexts of a length, and the factor of rotated values."""
        if self._kind == "default":
            exponents = np.arange(0, self._dims, 2, dtype=np.float32) / self._dims
            return self._parameters["rope_theta"] ** -exponents, 1.0
        options = {} if self._layer_type is None else {"layer_type": self._layer_type}
        compute = ROPE_INIT_FUNCTIONS[self._kind]
        found, factor = compute(self._config, "cpu", seq_len=tokens, **options)
        return found.numpy(), float(factor)


def _layer_type(config: Any, path: str) -> str | None:
    """Return the kind of the layer of a module, if kinds have different settings."""
    if not any(isinstance(value, Mapping) for value in _all(config).values()):
        return None
    place = next((int(name) for name in path.split(".") if name.isdigit()), None)
    return None if place is None else str(config.layer_types[place])


def _all(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _parameters(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    everything = _all(config)
    return everything if layer_type is None else everything.get(layer_type) or {}
