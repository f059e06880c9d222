"""Reductions over all nodes of a trie, in numpy.

The binary tree over the ranks is filled level by level with array operations, then every
interval of the trie is put together from a few of its nodes. No value is ever subtracted,
and only weights below a node enter it: sums keep their digits whatever the distribution,
and an infinity or nan stays with the nodes above its token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from genlm.core.trie.segments import Positions, SegmentPlan

__all__ = ["Floats", "Operation", "Workspace", "reduce_rows"]

Operation = Literal["sum", "max", "logsumexp"]
Floats = npt.NDArray[np.floating[Any]]

SAFE_RANGE = 600.0
"""Log-weights this close together have exponentials with all their digits in float64."""


class Workspace:
    """Memory for the reduction of one row after the other.

    Fresh memory costs more than the arithmetic, so nothing of a row's size is
    allocated twice.

    Args:
        plan: Of the trie's layout.
        dtype: In which to compute.

    Attributes:
        plan: The same.
        slots: The slots of `SegmentPlan`.
        intervals: Those of the distinct intervals.
    """

    def __init__(self, plan: SegmentPlan, dtype: np.dtype[Any]) -> None:
        self.plan = plan
        self.slots: Floats = np.empty(plan.n_slots, dtype)
        n = len(plan.order)
        self.intervals = self.slots[2 * n :]
        self._further: Floats = np.empty(max(map(len, plan.pieces[1:]), default=0), dtype)
        self._converted = np.empty(plan.n_slots - n)  # viewed as any dtype

    def take(self, values: Floats, positions: Positions, out: Floats) -> None:
        """Write `values[positions]` into `out`, in its dtype."""
        if values.dtype != out.dtype:
            converted = self._converted.view(out.dtype)[: len(values)]
            converted[:] = values
            values = converted
        # Every position is valid; of numpy's modes, "wrap" is the fastest for those.
        np.take(values, positions, out=out, mode="wrap")

    def load(self, row: Floats, out: Floats) -> None:
        """Write the leaves' values, and put them into the ranks' slots."""
        n = len(row)
        out[:n] = row
        # Gathered from the copy, which the cache holds: the row itself may be far away.
        self.take(out[:n], self.plan.order, self.slots[n : 2 * n])

    def combine(self, function: Callable[..., Any]) -> None:
        """Fill the binary tree, then the distinct intervals."""
        for low, high in self.plan.halvings:
            pairs = self.slots[2 * low : 2 * high]
            function(pairs[::2], pairs[1::2], out=self.slots[low:high])
        for turn, piece in enumerate(self.plan.pieces):
            known = self.intervals[: len(piece)]
            if turn:
                further = self._further[: len(piece)]
                self.take(self.slots, piece, further)
                function(known, further, out=known)
            else:
                self.take(self.slots, piece, known)

    def spread(self, out: Floats) -> None:
        """Write every prefix's value from its slot."""
        n = len(self.plan.order)
        self.take(self.slots[n:], self.plan.source, out[n:])


def reduce_rows(
    plan: SegmentPlan,
    operation: Operation,
    rows: Floats,
    out: Floats,
    make: Callable[[SegmentPlan, np.dtype[Any]], Workspace] = Workspace,
) -> None:
    """Reduce each row of weights over all nodes.

    A row's result depends on that row alone.

    Args:
        plan: Of the trie's layout.
        operation: What to do with the weights below a node.
        rows: `(rows, n_tokens)`, float32 or float64; not changed.
        out: `(rows, n_nodes)`, of the same dtype; overwritten.
        make: What makes the workspace.
    """
    dtype = rows.dtype if operation == "max" else np.dtype(np.float64)
    workspace = make(plan, dtype)
    reduce_row = _REDUCE[operation]
    # Infinities and nan are answers here, and a sum may exceed float32.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for row, nodes in zip(rows, out, strict=True):
            reduce_row(workspace, row, nodes)


def _sum(workspace: Workspace, row: Floats, out: Floats) -> None:
    workspace.load(row, out)
    workspace.combine(np.add)
    workspace.spread(out)


def _max(workspace: Workspace, row: Floats, out: Floats) -> None:
    workspace.load(row, out)
    workspace.combine(np.maximum)
    workspace.spread(out)


def _logsumexp(workspace: Workspace, row: Floats, out: Floats) -> None:
    top = row.max()
    lowest = row.min(where=row != -np.inf, initial=np.inf)
    if row.dtype == np.float32 and top - lowest < SAFE_RANGE and np.isfinite(top):
        _logsumexp_of_near(workspace, row, float(top), out)
    else:
        _logsumexp_of_any(workspace, row, out)


def _logsumexp_of_near(workspace: Workspace, row: Floats, top: float, out: Floats) -> None:
    """Add exponentials relative to the largest weight of all: one for each token."""
    workspace.load(row, out)
    n = len(row)
    ranks = workspace.slots[n : 2 * n]
    ranks -= top
    np.exp(ranks, out=ranks)
    workspace.combine(np.add)
    np.log(workspace.intervals, out=workspace.intervals)
    workspace.intervals += top
    workspace.load(row, out)  # single tokens stay exactly as given
    workspace.spread(out)


def _logsumexp_of_any(workspace: Workspace, row: Floats, out: Floats) -> None:
    """Keep each slot's largest weight and the sum of exponentials relative to that one.

    No exponential overflows, and a distant sibling costs no digits.
    """
    plan, tops = workspace.plan, workspace.slots
    workspace.load(row, out)
    workspace.combine(np.maximum)
    finite = np.where(np.isfinite(tops), tops, 0.0)
    sums = np.ones_like(tops)
    for low, high in plan.halvings:
        pair = slice(2 * low, 2 * high)
        parts = tops[pair].reshape(-1, 2) - finite[low:high, None]
        np.exp(parts, out=parts)
        parts *= sums[pair].reshape(-1, 2)
        np.add(parts[:, 0], parts[:, 1], out=sums[low:high])
    top = finite[2 * len(row) :]
    relative = np.zeros_like(top)
    for piece in plan.pieces:
        known = slice(len(piece))
        relative[known] += sums[piece] * np.exp(tops[piece] - top[known])
    workspace.intervals += np.log(relative)
    workspace.spread(out)


_REDUCE: Mapping[Operation, Callable[[Workspace, Floats, Floats], None]] = {
    "sum": _sum,
    "max": _max,
    "logsumexp": _logsumexp,
}
