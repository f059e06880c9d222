"""Expected values of a token trie, by enumeration of every prefix and the tokens below it.

The oracle is slow and exact, and uses no arrays. Sums are computed with `math.fsum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Symbols = tuple[Any, ...]


def symbols_of(item: Any) -> Symbols:
    """The symbols of a vocabulary item: bytes as integers, other items' elements unchanged."""
    return tuple(bytes(item)) if isinstance(item, bytes) else tuple(item)


def tokens_below(items: Sequence[Any]) -> dict[Symbols, list[int]]:
    """Positions of the items below every prefix, including the empty prefix."""
    below: dict[Symbols, list[int]] = {(): []}
    for position, item in enumerate(items):
        symbols = symbols_of(item)
        for length in range(len(symbols) + 1):
            below.setdefault(symbols[:length], []).append(position)
    return below


def _sum(weights: Sequence[float]) -> float:
    if all(map(math.isfinite, weights)):
        return math.fsum(weights)
    return sum(weights)


def _max(weights: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, weights)) else max(weights)


def _logsumexp(weights: Sequence[float]) -> float:
    top = _max(weights)
    if not math.isfinite(top):
        return top
    rest = list(weights)
    rest.remove(top)
    return top + math.log1p(math.fsum(math.exp(weight - top) for weight in rest))


EXACT: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": _sum,
    "max": _max,
    "logsumexp": _logsumexp,
}
"""The reductions of a list of float64 values, by name. NaN and infinities follow IEEE 754."""
