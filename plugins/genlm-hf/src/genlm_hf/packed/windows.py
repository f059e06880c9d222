"""What a mask of transformers lets a token see: everything before it, or a window.

The model hands over its masks as functions of two positions. Asked at positions
far beyond any test sequence, they tell a window of 4,096 from full attention
without a forward pass of 4,096 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["UnknownMaskError", "window_of"]

# The last decides how long a window can be told from none. Chunks would have to
# divide all their differences to pass for a window.
_POSITIONS = (5, 4_099, 131_101, 1_100_003)


class UnknownMaskError(ValueError):
    """The mask is neither causal nor a causal sliding window."""


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """Return how many tokens a token sees, itself included; None for all, 0 for none.

    Args:
        mask_function: Whether, in `(batch, head, query position, key position)`,
            the query sees the key, as in `transformers.masking_utils`.

    Raises:
        UnknownMaskError: It sees later tokens, blocks, chunks or something else.
    """
    seen = [_seen(mask_function, position) for position in _POSITIONS]
    window = seen[-1]
    expected = [min(position + 1, window) for position in _POSITIONS]
    if seen != expected:
        raise UnknownMaskError(
            f"tokens at positions {_POSITIONS} see {seen} tokens, which is no sliding window"
        )
    return None if window > _POSITIONS[-1] else window


def _seen(mask_function: Callable[..., Any], position: int) -> int:
    """Return how many tokens up to itself the token at `position` sees, and only those."""
    keys = torch.arange(position + 3)
    zero = torch.zeros((), dtype=torch.long)
    try:
        visible = mask_function(zero, zero, torch.tensor(position), keys)
        visible = torch.as_tensor(visible).expand(keys.shape).bool()
    except Exception as error:
        raise UnknownMaskError(f"it cannot be asked about single positions: {error}") from error
    count = int(visible.sum())
    first = position + 1 - count
    if not bool(visible[first : position + 1].all()):
        raise UnknownMaskError(f"the token at position {position} sees later tokens or gaps")
    return count
