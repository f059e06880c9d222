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

__all__ = ["Positions", "SegmentPlan", "interval_pieces"]

Positions = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SegmentPlan:
    """What to combine with what; made once for a layout.

    A workspace holds the binary tree over the ranks in heap order (slot 1 is its root,
    slots `n` to `2n` the ranks, slot 0 is not used) and then one slot for each distinct
    interval, those of the most pieces first. Positions are int64 unless a plan says so.

    Attributes:
        order: Token at each rank.
        source: For every prefix the slot of its value, counted from slot `n`.
        halvings: Bounds of each level of the binary tree, from the ranks' parents up.
        pieces: `pieces[k]` has the k-th slot of each interval of more than k pieces.
    """

    order: Positions
    source: Positions
    halvings: tuple[tuple[int, int], ...]
    pieces: tuple[Positions, ...]

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
        most_first = np.argsort(-count, kind="stable")
        start = (np.cumsum(count) - count)[most_first]
        having = [np.count_nonzero(count > k) for k in range(count.max(initial=0))]
        place = np.empty(n + len(lo), dtype=np.int64)
        place[:n] = np.arange(n)
        place[n + most_first] = np.arange(n, n + len(lo))
        return cls(
            order=layout.order.astype(np.int64),
            source=place[layout.source],
            halvings=tuple(halvings),
            pieces=tuple(piece[start[:many] + k] for k, many in enumerate(having)),
        )

    @property
    def n_slots(self) -> int:
        """Slots of a workspace."""
        return 2 * len(self.order) + max(map(len, self.pieces), default=0)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays, in bytes."""
        return sum(array.nbytes for array in (self.order, self.source, *self.pieces))


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
