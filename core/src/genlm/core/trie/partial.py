"""Partial reductions: weights of selected nodes without computing all nodes.

The bounds of the nodes' intervals split the ranks below them into pieces. The weight of
each token is read once, even if several of the nodes are above it; nested nodes are
combined from the pieces by a segment tree. Time is O(tokens below + nodes log nodes) for each
row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.reductions import Floats, Operation, reduce_rows
from genlm.core.trie.segment_tree import Indices, SegmentTree
from genlm.core.trie.weights import Rows, numpy_rows

__all__ = ["partial_weights"]


def partial_weights(
    layout: TrieLayout, rows: Rows, nodes: npt.NDArray[np.int64], operation: Operation
) -> Floats:
    """Reduce rows over some nodes; see `TokenCharacterTrie.reduce_nodes`."""
    ranks, lo, hi = layout.ranks_below(nodes)
    weights = numpy_rows(rows, layout.order[ranks].astype(np.int64))
    if not len(nodes):
        return weights
    bounds = np.unique(np.concatenate([lo, hi]))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        pieces = _pieces(weights, bounds[:-1], np.diff(bounds), operation)
        first, last = np.searchsorted(bounds, lo), np.searchsorted(bounds, hi)
        if (last - first == 1).all():
            return pieces[:, first].astype(weights.dtype, copy=False)
        n = pieces.shape[1]
        tree = SegmentTree.of(np.arange(n), first, last, n + np.arange(len(nodes)))
        values = np.empty((len(pieces), n + len(nodes)))
        reduce_rows(tree, operation, pieces, values)
        return values[:, n:].astype(weights.dtype)


def _pieces(rows: Floats, offset: Indices, sizes: Indices, operation: Operation) -> Floats:
    """Reduce each piece, a run of adjacent columns, in float64."""
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
