"""Rotary embeddings with the frequencies of transformers, where mlx-lm has others.

mlx-lm's models leave out kinds of scaling that they do not know. And where frequencies depend
on the length of the context (dynamic NTK scaling, LongRoPE), mlx-lm rotates each key by the
length that there was when it was computed, or always as in long contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_unflatten
from mlx_lm.models.rope_utils import (
    DynamicNTKScalingRoPE,
    Llama3RoPE,
    SuScaledRoPE,
    YarnRoPE,
)

__all__ = ["PublishedRoPE", "correct_rotary"]

_KINDS = (RoPE, DynamicNTKScalingRoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE)

# A frequency differs by more than rounding.
_TOLERANCE = 1e-5


class PublishedRoPE(Module):
    """Rotates by the frequencies that transformers computes for contexts of one length.

    Args:
        config: transformers' config of the language model.
        layer_type: The kind of layer, if its kinds have settings of their own.
        dims: How many numbers of a head are rotated.
        traditional: Whether neighbours are rotated, rather than the halves of a head.

    Attributes:
        longest: The longest context that has the frequencies of short ones; None if all have.
    """

    def __init__(
        self, config: Any, layer_type: str | None, dims: int, *, traditional: bool
    ) -> None:
        super().__init__()
        self._config, self._layer_type = config, layer_type
        self._dims, self._traditional = dims, traditional
        parameters = _parameters(config, layer_type)
        self.longest = _longest(parameters, config)
        self.set_length(1)

    def set_length(self, tokens: int) -> None:
        """Rotate as in contexts of so many tokens from now on."""
        frequencies, self._scale = _published(
            self._config, self._layer_type, self._dims, tokens
        )
        self._periods = mx.array(1 / frequencies)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate `(..., tokens, width)`, of which the first token is at place `offset`."""
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
        What was put in, each once.
    """
    made: dict[tuple[str | None, int, bool], PublishedRoPE] = {}
    placed: list[tuple[str, Module]] = []
    for path, module in model.named_modules():
        if not isinstance(module, _KINDS):
            continue
        kind = _layer_type(config, path)
        if not _parameters(config, kind):
            continue
        dims = module.dim if isinstance(module, SuScaledRoPE) else module.dims
        if _agrees(module, config, kind, dims):
            continue
        traditional = bool(getattr(module, "traditional", False))
        key = kind, dims, traditional
        if key not in made:
            made[key] = PublishedRoPE(config, kind, dims, traditional=traditional)
        placed.append((path, made[key]))
    model.update_modules(tree_unflatten(placed))
    return list(made.values())


def _agrees(module: Any, config: Any, layer_type: str | None, dims: int) -> bool:
    """Whether a module rotates as transformers does, whatever the length."""
    if isinstance(module, (DynamicNTKScalingRoPE, SuScaledRoPE)):
        return False
    expected, scale = _published(config, layer_type, dims, 1)
    if isinstance(module, RoPE):
        found = module.scale * module.base ** -(np.arange(0, dims, 2) / dims)
    else:
        found = 1 / np.array(module._freqs)  # noqa: SLF001 - kept nowhere else
    kept = float(getattr(module, "mscale", 1.0))
    longest = _longest(_parameters(config, layer_type), config)
    close = np.allclose(found, expected, rtol=_TOLERANCE, atol=0)
    return longest is None and close and abs(kept - scale) < _TOLERANCE


def _layer_type(config: Any, path: str) -> str | None:
    """The kind of the layer that a module at a path belongs to, if kinds rotate differently."""
    if not any(isinstance(value, Mapping) for value in _all(config).values()):
        return None
    place = next(int(name) for name in path.split(".") if name.isdigit())
    return str(config.layer_types[place])


def _all(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _parameters(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    everything = _all(config)
    return everything if layer_type is None else everything.get(layer_type) or {}


def _longest(parameters: Mapping[str, Any], config: Any) -> int | None:
    kind = parameters.get("rope_type", "default")
    if kind == "longrope":
        return int(parameters["original_max_position_embeddings"])
    return int(config.max_position_embeddings) if kind == "dynamic" else None


def _published(
    config: Any, layer_type: str | None, dims: int, tokens: int
) -> tuple[np.ndarray[Any, Any], float]:
    """Return frequencies, shape `(dims / 2,)`, and the factor of what is rotated."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = _parameters(config, layer_type)
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = np.arange(0, dims, 2, dtype=np.float32) / dims
        return parameters["rope_theta"] ** -exponents, 1.0
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=tokens, **options)
    return frequencies.numpy(), float(factor)
