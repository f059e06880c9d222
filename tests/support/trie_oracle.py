"""Expected values of a token trie by brute force over every prefix and token.

Slow, exact and without arrays: sums use `math.fsum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from genlm import Token

Prefix = tuple[Any, ...]


class EndOfSequence:
    """A vocabulary item that is not bytes and is its own only symbol, as clients define it."""

    def __iter__(self):
        return iter([self])

    def __repr__(self) -> str:
        return "EOS"


EOS = EndOfSequence()


def symbols_of(item: Any) -> Prefix:
    """The symbols of an item."""
    return tuple(bytes(item)) if isinstance(item, bytes) else tuple(item)


def tokens_below(items: Sequence[Any]) -> dict[Prefix, list[int]]:
    """For every prefix, the positions of the items that begin with it."""
    below: dict[Prefix, list[int]] = {(): []}
    for position, item in enumerate(items):
        symbols = symbols_of(item)
        for length in range(len(symbols) + 1):
            below.setdefault(symbols[:length], []).append(position)
    return below


def exact_sum(weights: Sequence[float]) -> float:
    """The sum, rounded once; infinities and nan as IEEE says."""
    if all(math.isfinite(w) for w in weights):
        return math.fsum(weights)
    return sum(weights)


def exact_logsumexp(weights: Sequence[float]) -> float:
    """The log of the sum of exponentials, to the last digits of float64."""
    top = max(weights)
    if any(math.isnan(w) for w in weights):
        return math.nan
    if math.isinf(top):
        return top
    rest = list(weights)
    rest.remove(top)
    return top + math.log1p(math.fsum(math.exp(w - top) for w in rest))


def exact_max(weights: Sequence[float]) -> float:
    """The largest; nan if there is one."""
    return math.nan if any(math.isnan(w) for w in weights) else max(weights)


EXACT: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": exact_sum,
    "max": exact_max,
    "logsumexp": exact_logsumexp,
}


def words(alphabet: bytes = b"ab\x00\xff") -> st.SearchStrategy[bytes]:
    """Byte strings that share many prefixes, some longer than a sorting key."""
    symbols = st.sampled_from([bytes([symbol]) for symbol in alphabet])
    return st.lists(symbols, max_size=18).map(b"".join)


def vocabularies(max_size: int = 24) -> st.SearchStrategy[list[Any]]:
    """Tokens with duplicates, empty strings and non-UTF-8, sometimes other items."""
    tokens = st.lists(words(), min_size=1, max_size=max_size).map(
        lambda found: [Token(position, word) for position, word in enumerate(found)]
    )
    extras = st.lists(st.sampled_from([EOS, "añb", (1, EOS), (97, "b")]), unique=True)
    return st.builds(
        lambda first, last: [*first, *last], tokens, st.one_of(st.just([]), extras)
    )
