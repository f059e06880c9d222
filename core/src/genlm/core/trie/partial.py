"""Partial reductions: weights of selected nodes without computing all nodes.

The bounds of the nodes' intervals divide the ranks below the nodes into pieces. The weight of
each token is read once, even if several of the nodes are above it; nested nodes are combined
from the pieces. The time is O(tokens below + nodes log nodes) for each row.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np
import numpy.typing as npt

from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.reductions import Floats, Operation
from genlm.core.trie.segment_tree import Indices, interval_pieces
from genlm.core.trie.weights import Rows, numpy_rows

_COMBINE: dict[Operation, np.ufunc] = {
    "sum": np.add,
    "max": np.maximum,
    "logsumexp": np.logaddexp,
}

_WEIGHTS_AT_ONCE = 2**20
"""Number of weights that are reduced at once, unless a single row has more."""


def partial_weights(
    layout: TrieLayout, rows: Rows, nodes: npt.NDArray[np.int64], operation: Operation
) -> Floats:
    """Reduce rows over some nodes; see `TokenCharacterTrie.reduce_nodes`."""
    ranks, lo, hi = layout.ranks_below(nodes)
    columns = layout.order[ranks].astype(np.int64)
    step = max(1, _WEIGHTS_AT_ONCE // max(1, len(columns)))
    parts = [
        _partial_weights(numpy_rows(rows[begin : begin + step], columns), lo, hi, operation)
        for begin in range(0, max(1, len(rows)), step)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _partial_weights(weights: Floats, lo: Indices, hi: Indices, operation: Operation) -> Floats:
    """Reduce the weights of ranks over intervals `[lo, hi)`."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if (lo[1:] == hi[:-1]).all():  # disjoint and ascending: each node is one piece
            values = _reduce_pieces(weights, lo, hi - lo, operation)
            return values.astype(weights.dtype, copy=False)
        bounds = np.unique(np.concatenate([lo, hi]))
        pieces = _reduce_pieces(weights, bounds[:-1], np.diff(bounds), operation)
        first, last = np.searchsorted(bounds, lo), np.searchsorted(bounds, hi)
        return _combine_pieces(pieces, first, last, _COMBINE[operation]).astype(weights.dtype)


def _reduce_pieces(
    rows: Floats, offset: Indices, sizes: Indices, operation: Operation
) -> Floats:
    """Reduce each piece, which consists of adjacent columns, in float64."""
    values = rows.astype(np.float64)
    if operation == "sum":
        return np.add.reduceat(values, offset, axis=1)
    tops: Floats = np.maximum.reduceat(values, offset, axis=1)
    if operation == "max":
        return tops
    finite = np.where(np.isfinite(tops), tops, 0.0)
    values -= np.repeat(finite, sizes, axis=1)
    np.exp(values, out=values)
    result: Floats = finite + np.log(np.add.reduceat(values, offset, axis=1))
    return result


def _combine_pieces(pieces: Floats, first: Indices, last: Indices, combine: np.ufunc) -> Floats:
    """Combine the pieces `[first, last)` of each node over a segment tree of the pieces."""
    n = pieces.shape[1]
    slots = np.empty((len(pieces), 2 * n))
    slots[:, n:] = pieces
    top = n
    while top > 1:
        low = (top + 1) // 2
        pairs = slots[:, 2 * low : 2 * top]
        combine(pairs[:, ::2], pairs[:, 1::2], out=slots[:, low:top])
        top = low
    node, slot = interval_pieces(first + n, last + n, repeat(0))
    count = np.bincount(node, minlength=len(first))
    result: Floats = combine.reduceat(slots[:, slot], np.cumsum(count) - count, axis=1)
    return result
