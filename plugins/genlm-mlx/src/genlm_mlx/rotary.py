"""Rotary embeddings with the frequencies of transformers, where those of mlx-lm differ.

mlx-lm's models ignore kinds of scaling that they do not support. Where frequencies depend on
the length of the context (dynamic NTK scaling, LongRoPE), mlx-lm rotates a key by the length
at the time of its computation, or always as in long contexts. Such models are served up to the
maximum length without scaling.
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

from genlm.plugin import ModelFacts

_ROPE_CLASSES: tuple[type[Module], ...] = (RoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE)
if hasattr(rope_utils, "DynamicNTKScalingRoPE"):  # since mlx-lm 0.32
    _ROPE_CLASSES += (rope_utils.DynamicNTKScalingRoPE,)

# Larger relative differences are more than rounding.
_TOLERANCE = 1e-5


class PublishedRoPE(Module):
    """Rotates by the frequencies that transformers computes.

    Args:
        frequencies: Frequencies of contexts that are not scaled by their length.
        factor: Factor of rotated values.
        traditional: Whether neighbours are rotated, rather than the halves of a head.
    """

    def __init__(
        self, frequencies: np.ndarray[Any, Any], factor: float, *, traditional: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traditional, self._scale = traditional, factor
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


def correct_rotary(model: Any, config: Any) -> None:
    """Replace rotary embeddings whose frequencies are not those of transformers.

    Args:
        model: An mlx-lm model; it is changed in place.
        config: transformers' config of its language model.
    """
    replacements: list[tuple[str, Module]] = []
    by_longest = ModelFacts.of(config).rope_by_longest
    for path, module in model.named_modules():
        layer_type = _layer_type(config, path)
        parameters = _parameters(config, layer_type)
        kind = parameters.get("rope_type", "default")
        is_supported = kind == "default" or kind in ROPE_INIT_FUNCTIONS
        if not isinstance(module, _ROPE_CLASSES) or not parameters or not is_supported:
            continue
        dims = module.dim if isinstance(module, SuScaledRoPE) else module.dims
        frequencies, factor = _published_frequencies(config, layer_type, dims)
        if not by_longest and _has_frequencies(module, frequencies, factor):
            continue
        traditional = bool(getattr(module, "traditional", False))
        rope = PublishedRoPE(frequencies, factor, traditional=traditional)
        replacements.append((path, rope))
    model.update_modules(tree_unflatten(replacements))


def _has_frequencies(module: Any, expected: np.ndarray[Any, Any], factor: float) -> bool:
    """Whether a module has the frequencies and the factor of transformers."""
    if isinstance(module, RoPE):
        actual = module.scale * module.base ** -(np.arange(0, module.dims, 2) / module.dims)
    else:
        actual = 1 / np.array(module._freqs)  # noqa: SLF001 - not available elsewhere
    is_close = actual.shape == expected.shape and np.allclose(
        actual, expected, rtol=_TOLERANCE, atol=0
    )
    return bool(is_close) and abs(getattr(module, "mscale", 1.0) - factor) < _TOLERANCE


def _published_frequencies(
    config: Any, layer_type: str | None, dims: int
) -> tuple[np.ndarray[Any, Any], float]:
    """Return transformers' frequencies of short contexts, and the factor of rotated values.

    Args:
        config: Config of the language model.
        layer_type: The kind of layer, if kinds have different settings.
        dims: Number of dimensions of a head that mlx-lm rotates.
    """
    parameters = _parameters(config, layer_type)
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        share = parameters.get("partial_rotary_factor")
        if share is not None and getattr(config, "kv_lora_rank", None) is None:
            heads = config.num_attention_heads
            width = getattr(config, "head_dim", None) or config.hidden_size // heads
            dims = int(width * share)
        exponents = np.arange(0, dims, 2, dtype=np.float32) / dims
        return parameters["rope_theta"] ** -exponents, 1.0
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=1, **options)
    return frequencies.numpy(), float(factor)


def _layer_type(config: Any, path: str) -> str | None:
    """Return the kind of the layer of a module, if kinds have different settings."""
    if not any(isinstance(value, Mapping) for value in _rope_parameters(config).values()):
        return None
    index = next((int(name) for name in path.split(".") if name.isdigit()), None)
    return None if index is None else str(config.layer_types[index])


def _rope_parameters(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _parameters(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    parameters = _rope_parameters(config)
    return parameters if layer_type is None else parameters.get(layer_type) or {}
