"""Reductions over all nodes of a trie, in numpy.

The tokens' weights, in sorted order, are the leaves of a binary tree over the ranks.
Its inner nodes are filled level by level with array operations, and every interval of
the trie is put together from at most `2 log2(n_tokens)` of them. No value is ever
subtracted, and only weights below a node enter it: sums keep their digits whatever the
distribution, and an infinity or nan stays with the nodes above its token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.trie.layout import TrieLayout

__all__ = ["SegmentPlan", "interval_pieces"]

Floats = npt.NDArray[np.floating[Any]]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SegmentPlan:
    """What to combine with what; made once for a layout.

    A workspace holds the binary tree over the ranks in heap order (slot 1 is its root,
    slots `n` to `2n` the ranks, slot 0 a neutral element) and then one slot for each
    distinct interval.

    Attributes:
        order: Token at each rank, int64.
        source: For every prefix the slot of its value, counted from slot `n`.
        halvings: Bounds of each level of the binary tree, from the ranks' parents up.
        pieces: First and second slot of each distinct interval; 0 for no second.
        further: For intervals of more than two pieces: which ones, and the next slot.
    """

    order: Positions
    source: Positions
    halvings: tuple[tuple[int, int], ...]
    pieces: tuple[Positions, Positions]
    further: tuple[tuple[Positions, Positions], ...]

    @classmethod
    def of(cls, layout: TrieLayout) -> SegmentPlan:
        """Plan the reductions of a layout."""
        n = layout.n_tokens
        halvings, top = [], n
        while top > 1:
            halvings.append(((top + 1) // 2, top))
            top = (top + 1) // 2
        lo, hi = layout.lo[layout.distinct], layout.hi[layout.distinct]
        interval, piece = interval_pieces(lo, hi, n)
        count = np.bincount(interval, minlength=len(lo))
        start = np.cumsum(count) - count
        first, second = np.zeros((2, len(lo)), dtype=np.int64)
        if len(lo):
            first = piece[start]
            second[count > 1] = piece[start[count > 1] + 1]
        further = []
        for k in range(2, count.max(initial=0)):
            longer = np.flatnonzero(count > k)
            further.append((longer, piece[start[longer] + k]))
        order = layout.order.astype(np.int64)
        return cls(order, layout.source, tuple(halvings), (first, second), tuple(further))

    @property
    def nbytes(self) -> int:
        """Memory of the plan's own arrays, in bytes."""
        further = [array for pair in self.further for array in pair]
        return sum(array.nbytes for array in (self.order, *self.pieces, *further))

    def weight_sum(self, ws: Floats, out: Floats) -> None:
        """Write the sum below every node; at least float64 adds, rounded once to `out`."""
        slots = self._workspace(ws, np.float64, neutral=0.0)
        self._reduce(np.add, slots)
        self._spread(ws, slots, out)

    def weight_max(self, ws: Floats, out: Floats) -> None:
        """Write the largest weight below every node."""
        slots = self._workspace(ws, ws.dtype, neutral=-np.inf)
        self._reduce(np.maximum, slots)
        self._spread(ws, slots, out)

    def weight_logsumexp(self, ws: Floats, out: Floats) -> None:
        """Write the log of the summed exponentials below every node.

        Each slot holds its largest weight and the sum of exponentials relative to that
        one, so no exponential overflows and a distant sibling costs no digits.
        """
        n = len(self.order)
        tops = self._workspace(ws, np.float64, neutral=-np.inf)
        self._reduce(np.maximum, tops)
        finite = np.where(np.isfinite(tops), tops, 0.0)
        sums = np.ones_like(tops)
        sums[0] = 0.0
        for low, high in self.halvings:
            pair = slice(2 * low, 2 * high)
            parts = tops[pair].reshape(-1, 2) - finite[low:high, None]
            np.exp(parts, out=parts)
            parts *= sums[pair].reshape(-1, 2)
            np.add(parts[:, 0], parts[:, 1], out=sums[low:high])
        relative, top = sums[2 * n :], finite[2 * n :]
        first, second = self.pieces
        np.multiply(sums[first], np.exp(tops[first] - top), out=relative)
        relative += sums[second] * np.exp(tops[second] - top)
        for which, piece in self.further:
            relative[which] += sums[piece] * np.exp(tops[piece] - top[which])
        tops[2 * n :] += np.log(relative)
        self._spread(ws, tops, out)

    def _workspace(self, ws: Floats, dtype: npt.DTypeLike, neutral: float) -> Floats:
        n = len(self.order)
        slots: Floats = np.empty(2 * n + len(self.pieces[0]), dtype)
        slots[0] = neutral
        _take(ws.astype(dtype, copy=False), self.order, slots[n : 2 * n])
        return slots

    def _reduce(self, combine: Callable[..., Any], slots: Floats) -> None:
        """Fill the binary tree, then the distinct intervals."""
        for low, high in self.halvings:
            pairs = slots[2 * low : 2 * high]
            combine(pairs[::2], pairs[1::2], out=slots[low:high])
        intervals = slots[2 * len(self.order) :]
        first, second = self.pieces
        _take(slots, first, intervals)
        combine(intervals, slots[second], out=intervals)
        for which, piece in self.further:
            intervals[which] = combine(intervals[which], slots[piece])

    def _spread(self, ws: Floats, slots: Floats, out: Floats) -> None:
        """Write every node's value: leaves as given, prefixes from their slots."""
        n = len(self.order)
        out[:n] = ws
        _take(slots[n:].astype(out.dtype, copy=False), self.source, out[n:])


def _take(values: Floats, positions: Positions, out: Floats) -> None:
    # Every position is valid; of numpy's modes, "wrap" is the fastest for those.
    np.take(values, positions, out=out, mode="wrap")


def interval_pieces(
    lo: npt.NDArray[Any], hi: npt.NDArray[Any], n: int
) -> tuple[Positions, Positions]:
    """Cut intervals into slots of a binary tree over `n` places, in heap order.

    Returns:
        Interval and slot of each piece, int64, the pieces of an interval together.
    """
    lo, hi = lo.astype(np.int64) + n, hi.astype(np.int64) + n
    which = np.arange(len(lo))
    intervals, slots = [which[:0]], [which[:0]]
    while len(which):
        at_lo, at_hi = lo & 1 == 1, hi & 1 == 1
        intervals += [which[at_lo], which[at_hi]]
        slots += [lo[at_lo], hi[at_hi] - 1]
        lo, hi = (lo + 1) >> 1, hi >> 1
        left = lo < hi
        which, lo, hi = which[left], lo[left], hi[left]
    interval, slot = np.concatenate(intervals), np.concatenate(slots)
    together = np.argsort(interval, kind="stable")
    return interval[together], slot[together]
