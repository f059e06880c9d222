"""Reductions over all nodes of a trie, in numpy.

Array operations fill the segment tree level by level; then every interval of the trie is
combined from its pieces. No value is subtracted, and the value of a node depends only on the
weights below it, so sums are precise for every distribution, and an infinity or NaN affects
only the nodes above its token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from genlm.core.trie.segment_tree import Indices, SegmentTree

Operation = Literal["sum", "max", "logsumexp"]
Floats = npt.NDArray[np.floating[Any]]
Take = Callable[[Floats, Indices, Floats], None]
"""Writes the values at some indices into an array, in its dtype."""

SAFE_RANGE = 600.0
"""Log-weights within this range have exponentials without underflow in float64."""


class Workspace:
    """Buffers that the reductions of several rows reuse.

    Allocating memory takes longer than the arithmetic.

    Attributes:
        tree: Segment tree of the trie.
        slots: Values of the slots that `SegmentTree` describes.
        intervals: The part of `slots` for the distinct intervals.
    """

    def __init__(
        self, tree: SegmentTree, dtype: np.dtype[Any], compiled_take: Take | None
    ) -> None:
        self.tree = tree
        self._compiled_take = compiled_take
        self.slots: Floats = np.empty(tree.n_slots, dtype)
        n = len(tree.order)
        self.intervals = self.slots[2 * n :]
        self._operands: Floats = np.empty(max(map(len, tree.pieces[1:]), default=0), dtype)
        self._converted = np.empty(tree.n_slots - n)  # viewed as any dtype

    def take(self, values: Floats, indices: Indices, out: Floats) -> None:
        """Write `values[indices]` into `out`, in its dtype."""
        if self._compiled_take is not None:
            self._compiled_take(values, indices, out)
            return
        if values.dtype != out.dtype:
            converted = self._converted.view(out.dtype)[: len(values)]
            converted[:] = values
            values = converted
        # All indices are in bounds; "wrap" is the fastest of numpy's modes for those.
        np.take(values, indices, out=out, mode="wrap")

    def load(self, row: Floats, out: Floats) -> None:
        """Copy a row to the leaves of the result and, in sorted order, to the ranks."""
        n = len(row)
        out[:n] = row
        # Gathering from the copy, which is in the CPU's cache; the row may not be.
        self.take(out[:n], self.tree.order, self.slots[n : 2 * n])

    def combine(self, function: Callable[..., Any]) -> None:
        """Fill the segment tree, then the distinct intervals."""
        for low, high in self.tree.levels:
            pairs = self.slots[2 * low : 2 * high]
            function(pairs[::2], pairs[1::2], out=self.slots[low:high])
        for turn, piece in enumerate(self.tree.pieces):
            values = self.intervals[: len(piece)]
            if turn:
                operands = self._operands[: len(piece)]
                self.take(self.slots, piece, operands)
                function(values, operands, out=values)
            else:
                self.take(self.slots, piece, values)

    def spread(self, out: Floats) -> None:
        """Copy the value of every prefix from its slot to the result."""
        n = len(self.tree.order)
        self.take(self.slots[n:], self.tree.source, out[n:])


def reduce_rows(
    tree: SegmentTree,
    operation: Operation,
    rows: Floats,
    out: Floats,
    compiled_take: Take | None = None,
) -> None:
    """Reduce each row of weights over all nodes.

    The result of a row does not depend on the other rows.

    Args:
        tree: Segment tree of the trie.
        operation: Operation that combines the weights below a node.
        rows: `(rows, n_tokens)`, float32 or float64; not changed.
        out: `(rows, n_nodes)`, of the same dtype; overwritten.
        compiled_take: Function that gathers in machine code; None gathers in numpy.
    """
    dtype = rows.dtype if operation == "max" else np.dtype(np.float64)
    workspace = Workspace(tree, dtype, compiled_take)
    reduce_row = _REDUCE[operation]
    # Infinities and NaN are valid results, and a sum may exceed float32.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for row, nodes in zip(rows, out, strict=True):
            reduce_row(workspace, row, nodes)


def _reduce_by(function: np.ufunc, workspace: Workspace, row: Floats, out: Floats) -> None:
    workspace.load(row, out)
    workspace.combine(function)
    workspace.spread(out)


def _logsumexp(workspace: Workspace, row: Floats, out: Floats) -> None:
    top = row.max()
    lowest = row.min(where=row != -np.inf, initial=np.inf)
    if row.dtype == np.float32 and top - lowest < SAFE_RANGE and np.isfinite(top):
        _logsumexp_in_range(workspace, row, float(top), out)
    else:
        _logsumexp_shifted(workspace, row, out)


def _logsumexp_in_range(workspace: Workspace, row: Floats, top: float, out: Floats) -> None:
    """Shift by the largest weight of the row: one exponential for each token."""
    workspace.load(row, out)
    n = len(row)
    ranks = workspace.slots[n : 2 * n]
    ranks -= top
    np.exp(ranks, out=ranks)
    workspace.combine(np.add)
    np.log(workspace.intervals, out=workspace.intervals)
    workspace.intervals += top
    workspace.load(row, out)  # single tokens keep their exact weights
    workspace.spread(out)


def _logsumexp_shifted(workspace: Workspace, row: Floats, out: Floats) -> None:
    """Shift each slot by its largest weight.

    No exponential overflows, and the value of a small node is precise beside a large one.
    """
    tree, tops = workspace.tree, workspace.slots
    workspace.load(row, out)
    workspace.combine(np.maximum)
    finite = np.where(np.isfinite(tops), tops, 0.0)
    sums = np.ones_like(tops)
    for low, high in tree.levels:
        pair = slice(2 * low, 2 * high)
        parts = tops[pair].reshape(-1, 2) - finite[low:high, None]
        np.exp(parts, out=parts)
        parts *= sums[pair].reshape(-1, 2)
        np.add(parts[:, 0], parts[:, 1], out=sums[low:high])
    top = finite[2 * len(row) :]
    relative = np.zeros_like(top)
    for piece in tree.pieces:
        intervals = slice(len(piece))
        relative[intervals] += sums[piece] * np.exp(tops[piece] - top[intervals])
    workspace.intervals += np.log(relative)
    workspace.spread(out)


_REDUCE: Mapping[Operation, Callable[[Workspace, Floats, Floats], None]] = {
    "sum": partial(_reduce_by, np.add),
    "max": partial(_reduce_by, np.maximum),
    "logsumexp": _logsumexp,
}
