"""How the intervals of a trie are put together from a binary tree over the ranks.

The tokens' weights, in sorted order, are the leaves of the tree; every interval is a
union of at most `2 log2(n_tokens)` of its nodes. This module knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.trie.layout import TrieLayout

__all__ = ["SegmentPlan", "interval_pieces"]

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
