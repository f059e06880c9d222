"""Attention over keys and values that all sequences of a pass have in common.

The shared keys and values exist once, and are read for all sequences by one matrix product
in each layer:

    queries (sequences, heads, new, width)
        @ shared keys (1, heads, shared, width)      -> scores of the shared tokens
        @ own keys (sequences, heads, own, width)    -> scores of the own tokens
    softmax over both, then the sum of the values of both

mlx-lm's models call `mlx_lm.models.base.scaled_dot_product_attention`, which calls
`quantized_scaled_dot_product_attention` of the same module if a cache has `bits`. This module
replaces the latter by a function that computes the attention above if the cache's
`group_size` is a `SharedPast`, and mlx-lm's otherwise. No attribute of a model is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

# Maximum number of scores that are computed at once.
_SCORES_AT_ONCE = 2**21

_quantized_attention = base.quantized_scaled_dot_product_attention


class SharedPast:
    """The shared keys and values of one layer in one pass.

    Args:
        shared: Keys and values of the shared tokens, `(1, heads, shared, width)`.
        own: Keys and values of the other tokens, `(sequences, heads, own, width)`.

    Attributes:
        is_used: Whether the layer's attention has read them.
    """

    def __init__(self, shared: Sequence[mx.array], own: Sequence[mx.array]) -> None:
        self._shared, self._own = shared, own
        self.is_used = False

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None,
    ) -> mx.array:
        """Return the attention of new tokens, `(sequences, query heads, new, width)`.

        Args:
            queries: Queries of the new tokens, `(sequences, query heads, new, width)`.
            keys: The own keys.
            values: The own values.
            scale: Factor of the scores.
            mask: Visible tokens, `(sequences or 1, 1, new, shared + own)`; None for all.

        Raises:
            ValueError: The keys or values are not those that the cache returned.
        """
        shared_keys, shared_values = self._shared
        tokens = shared_keys.shape[2] + keys.shape[2]
        if keys is not self._own[0] or values is not self._own[1]:
            raise ValueError("the model changes keys or values before its attention")
        self.is_used = True
        count, heads, new, _ = queries.shape
        step = max(1, _SCORES_AT_ONCE // (heads * new * tokens))
        parts = [
            _attend(
                queries[first : first + step] * scale,
                (shared_keys, keys[first : first + step]),
                (shared_values, values[first : first + step]),
                mask if mask is None or len(mask) == 1 else mask[first : first + step],
            )
            for first in range(0, count, step)
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend(
    queries: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    mask: mx.array | None,
) -> mx.array:
    """Return attention over shared and own keys and values; scores are float32."""
    count, query_heads, new, width = queries.shape
    heads, shared = keys[0].shape[1:3]
    grouped = queries.astype(mx.float32).reshape(count, heads, -1, width)
    scores = mx.concatenate(
        [
            _by_sequence(_by_head(grouped) @ _transposed(keys[0][0]), count),
            grouped @ _transposed(keys[1]),
        ],
        axis=-1,
    )
    if mask is not None:
        by_query = scores.reshape(count, query_heads, new, -1)
        scores = mx.where(mask, by_query, -mx.inf).reshape(scores.shape)
    weights = mx.softmax(scores, axis=-1, precise=True).astype(values[0].dtype)
    result = _by_sequence(_by_head(weights[..., :shared]) @ values[0][0], count)
    result = result + weights[..., shared:] @ values[1]
    return result.reshape(count, query_heads, new, -1)


def _transposed(keys: mx.array) -> mx.array:
    return keys.astype(mx.float32).swapaxes(-1, -2)


def _by_head(array: mx.array) -> mx.array:
    """Return `(sequences, heads, n, width)` as `(heads, sequences * n, width)`."""
    return array.swapaxes(0, 1).reshape(array.shape[1], -1, array.shape[-1])


def _by_sequence(array: mx.array, count: int) -> mx.array:
    """Return `(heads, sequences * n, width)` as `(sequences, heads, n, width)`."""
    return array.reshape(array.shape[0], count, -1, array.shape[-1]).swapaxes(0, 1)


def _attention(*args: Any, group_size: Any = 64, bits: int = 8, **options: Any) -> mx.array:
    """Compute attention over a `SharedPast`, or over quantised keys and values."""
    result: mx.array
    if isinstance(group_size, SharedPast):
        result = group_size.attend(*args, **options)
    else:
        result = _quantized_attention(*args, group_size=group_size, bits=bits, **options)
    return result


base.quantized_scaled_dot_product_attention = _attention
