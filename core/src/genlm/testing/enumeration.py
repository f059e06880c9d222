"""What a token trie must say, by enumeration: every prefix, every token below it.

Slow, exact and without arrays: a sum is `math.fsum` of the very weights in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["EXACT", "Letters", "below", "spelt"]

Letters = tuple[Any, ...]


def spelt(item: Any) -> Letters:
    """The letters of an item of a vocabulary: bytes as integers, others as they come."""
    return tuple(bytes(item)) if isinstance(item, bytes) else tuple(item)


def below(items: Sequence[Any]) -> dict[Letters, list[int]]:
    """For every prefix, the empty one among them, the positions of the items below it."""
    found: dict[Letters, list[int]] = {(): []}
    for position, item in enumerate(items):
        letters = spelt(item)
        for length in range(len(letters) + 1):
            found.setdefault(letters[:length], []).append(position)
    return found


def _logsumexp(weights: Sequence[float]) -> float:
    top = max(weights)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(weight - top) for weight in weights))


EXACT: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "max": max,
    "logsumexp": _logsumexp,
}
"""What each reduction is, of a list of float64."""
