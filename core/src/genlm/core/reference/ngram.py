"""`NgramModel`: an interpolated n-gram model over bytes, in closed form.

Let c(h b) be the number of times that symbol b follows history h in the training text, c(h)
its sum over b, and d(h) the number of different b. The model is that of Witten and Bell
(1991, method C), interpolated:

    P_0(b)     = 1 / 257
    P_k(b | h) = (c(h b) + d(h) P_{k-1}(b | h')) / (c(h) + d(h))

where h is the newest k-1 symbols of the context and h' is h without its oldest
symbol. For a history that does not occur, or is longer than the context, P_k = P_{k-1}.
The model has no free parameters, and all probabilities are positive.

Symbols are the bytes 0-255 and `END_OF_TEXT` = 256. A document b1 ... bm is read as
256 b1 ... bm 256: the first 256 is only history (so 256 also marks the beginning
of a text), the last one is predicted. Histories do not extend across documents.

All arithmetic is in float64 with numpy. `exact_row` computes the same formula directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from genlm.core.base.arrays import ranges

END_OF_TEXT = 256
"""The symbol that ends a document, and precedes its first byte as history."""

SYMBOLS = 257
"""Number of symbols: 256 bytes and the end of text."""

_PADDING = 257
"""Symbol that fills the history of a short context; no training history contains it."""

_RADIX = 258

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Level:
    """Counts of the symbols that follow each history of one length.

    A history is a node of a tree from the newest symbol to the oldest, so a walk that stops at
    the first missing child finds the longest history that occurs.

    Attributes:
        node_keys: `parent node * _RADIX + oldest symbol`, ascending; node i has entry i.
        pair_keys: `node * SYMBOLS + following symbol`, ascending.
        cumulative: Number of occurrences of all pairs before each pair, `(pairs + 1,)`.
    """

    node_keys: Ints
    pair_keys: Ints
    cumulative: Ints

    @classmethod
    def count(cls, node_keys: Ints, nodes: Ints, following: Ints) -> _Level:
        pair_keys, counts = np.unique(nodes * SYMBOLS + following, return_counts=True)
        return cls(node_keys, pair_keys, np.concatenate([[0], np.cumsum(counts)]))


class NgramModel:
    """Probabilities of the next byte given the `order - 1` bytes before it.

    Args:
        documents: The training text, at least one document.
        order: Length of the longest n-gram: 1 is a unigram model, 3 a trigram model.

    Raises:
        ValueError: `documents` is empty, or `order` is less than 1.
    """

    def __init__(self, documents: Iterable[bytes], order: int = 3) -> None:
        if order < 1:
            raise ValueError(f"an n-gram model of order {order}; the minimum is 1")
        self.order = order
        self._levels = _count_levels([_symbols(document) for document in documents], order)

    def probabilities(self, contexts: Sequence[Sequence[int]]) -> Floats:
        """Compute the distribution of the symbol after each context.

        Args:
            contexts: Symbols 0-256, oldest first. An empty context gives the distribution
                without history; `[256]` is the beginning of a text.

        Returns:
            Shape `(len(contexts), 257)`, float64, positive; the sum of each row is 1 up to
            rounding. The array belongs to the caller.
        """
        rows = np.full((len(contexts), SYMBOLS), 1 / SYMBOLS)
        for level, indices, nodes in self._walk(self._histories(contexts)):
            first, end = np.searchsorted(
                level.pair_keys, [nodes * SYMBOLS, (nodes + 1) * SYMBOLS]
            )
            distinct = end - first
            share = 1 / (level.cumulative[end] - level.cumulative[first] + distinct)
            rows[indices] *= (distinct * share)[:, None]
            pairs = ranges(first, distinct)
            symbols = level.pair_keys[pairs] % SYMBOLS
            counts = level.cumulative[pairs + 1] - level.cumulative[pairs]
            rows[np.repeat(indices, distinct), symbols] += counts * np.repeat(share, distinct)
        return rows

    def _histories(self, contexts: Sequence[Sequence[int]]) -> Ints:
        """Return the newest `order - 1` symbols of each context, newest first."""
        width = self.order - 1
        padding = (_PADDING,) * width
        newest_first = [(*context[: -width - 1 : -1], *padding)[:width] for context in contexts]
        return np.array(newest_first, dtype=np.int64).reshape(len(contexts), width)

    def _walk(self, histories: Ints) -> Iterator[tuple[_Level, Ints, Ints]]:
        """Yield levels, the empty history first, with the indices of rows and their nodes."""
        indices = np.arange(len(histories))
        nodes = np.zeros(len(histories), dtype=np.int64)
        yield self._levels[0], indices, nodes
        for level, symbols in zip(self._levels[1:], histories.T, strict=False):
            nodes, exists = _find(level.node_keys, nodes * _RADIX + symbols[indices])
            indices, nodes = indices[exists], nodes[exists]
            if not len(indices):
                return
            yield level, indices, nodes


def _symbols(document: bytes) -> Ints:
    symbols = np.full(len(document) + 2, END_OF_TEXT, dtype=np.int64)
    symbols[1:-1] = np.frombuffer(document, dtype=np.uint8)
    return symbols


def _count_levels(documents: list[Ints], order: int) -> list[_Level]:
    if not documents:
        raise ValueError("an n-gram model of no documents; pass at least one")
    symbols = np.concatenate(documents)
    # Number of symbols of the same document before each symbol.
    depths = np.concatenate([np.arange(len(document)) for document in documents])
    positions = np.flatnonzero(depths > 0)
    nodes = np.zeros(len(positions), dtype=np.int64)
    levels = [_Level.count(np.zeros(1, dtype=np.int64), nodes, symbols[positions])]
    for length in range(1, order):
        deep = depths[positions] >= length
        positions, nodes = positions[deep], nodes[deep]
        if not len(positions):
            break
        keys = nodes * _RADIX + symbols[positions - length]
        node_keys, nodes = np.unique(keys, return_inverse=True)
        levels.append(_Level.count(node_keys, nodes, symbols[positions]))
    return levels


def _find(ascending: Ints, keys: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the position of each key, and whether it exists (if not, any position)."""
    positions = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    return positions, ascending[positions] == keys


def exact_row(documents: Sequence[bytes], context: Sequence[int], order: int) -> Floats:
    """Compute one next-symbol distribution by scanning the whole text, as an oracle.

    It shares only constants with `NgramModel`.

    Args:
        documents: The training text.
        context: Symbols 0-256, oldest first; may be empty.
        order: Length of the longest n-gram; 0 gives the uniform distribution.

    Returns:
        Probabilities, shape `(257,)`, float64, sum 1 up to rounding.
    """
    if order == 0:
        return np.full(SYMBOLS, 1 / SYMBOLS)
    lower = exact_row(documents, context, order - 1)
    if len(context) < order - 1:
        return lower
    no_symbol = -1  # before each document, so that no history extends across documents
    text = np.concatenate(
        [[no_symbol, END_OF_TEXT, *document, END_OF_TEXT] for document in documents]
    )
    follows = (text != no_symbol) & (np.roll(text, 1) != no_symbol)
    for age, symbol in enumerate(reversed(context[len(context) - (order - 1) :]), start=1):
        follows &= np.roll(text, age) == symbol
    counts = np.bincount(text[follows], minlength=SYMBOLS)
    total, distinct = counts.sum(), np.count_nonzero(counts)
    if total == 0:
        return lower
    row: Floats = (counts + distinct * lower) / (total + distinct)
    return row
