"""The segment tree over the sorted tokens of a trie, as index arrays.

A segment tree is a binary tree over a sequence, here the tokens' weights in sorted order.
Each interval of the sequence is the union of at most `2 log2(n_tokens)` of its nodes, the
interval's pieces. This module computes indices only; `reductions` applies them to weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.trie.layout import TrieLayout

Indices = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SegmentTree:
    """Indices of the values that each node of a trie combines; computed once for a layout.

    A workspace stores the tree in heap order (slot 1 is its root, slots `n` to `2n` are the
    ranks, slot 0 is unused), followed by one slot for each distinct interval, in descending
    number of pieces.

    Attributes:
        order: Token at each rank.
        source: Slot of every prefix's value, counted from slot `n`.
        levels: Slots `[low, high)` of each level of the tree, from the ranks' parents up.
        pieces: `pieces[k]` has the k-th slot of each interval of more than k pieces.
    """

    order: Indices
    source: Indices
    levels: tuple[tuple[int, int], ...]
    pieces: tuple[Indices, ...]

    @classmethod
    def of(cls, layout: TrieLayout, index_type: npt.DTypeLike) -> SegmentTree:
        """Compute the segment tree of a layout, with indices of a type."""
        lo, hi = layout.lo[layout.distinct], layout.hi[layout.distinct]
        n = layout.n_tokens
        levels, top = [], n
        while top > 1:
            levels.append(((top + 1) // 2, top))
            top = (top + 1) // 2
        interval, piece = interval_pieces(lo + n, hi + n, repeat(0))
        count = np.bincount(interval, minlength=len(lo))
        most_first = np.argsort(-count, kind="stable")
        start = (np.cumsum(count) - count)[most_first]
        n_longer = [np.count_nonzero(count > k) for k in range(count.max(initial=0))]
        place = np.empty(n + len(lo), dtype=np.int64)
        place[:n] = np.arange(n)
        place[n + most_first] = np.arange(n, n + len(lo))
        piece = piece.astype(index_type, copy=False)
        return cls(
            order=layout.order.astype(index_type),
            source=place[layout.source].astype(index_type, copy=False),
            levels=tuple(levels),
            pieces=tuple(piece[start[:number] + k] for k, number in enumerate(n_longer)),
        )

    @property
    def n_slots(self) -> int:
        """Number of slots of a workspace."""
        return 2 * len(self.order) + max(map(len, self.pieces), default=0)


def interval_pieces(
    lo: npt.NDArray[Any], hi: npt.NDArray[Any], levels: Iterable[int]
) -> tuple[Indices, Indices]:
    """Decompose intervals into nodes of a segment tree, at most two of each level.

    Args:
        lo: First place of each interval, or first slot if the tree is in heap order.
        hi: One past the last place or slot of each interval.
        levels: Slot of place 0 of each level, from the leaves up: 0 in heap order.

    Returns:
        Interval and slot of each piece, int64; the pieces of an interval are adjacent, smallest
        first.
    """
    lo, hi = lo.astype(np.int64), hi.astype(np.int64)
    index = np.arange(len(lo))
    intervals, slots = [index[:0]], [index[:0]]
    for first in levels:
        is_open = lo < hi
        index, lo, hi = index[is_open], lo[is_open], hi[is_open]
        if not len(index):
            break
        at_lo, at_hi = lo & 1 == 1, hi & 1 == 1
        intervals += [index[at_lo], index[at_hi]]
        slots += [first + lo[at_lo], first + hi[at_hi] - 1]
        lo, hi = (lo + 1) >> 1, hi >> 1
    interval, slot = np.concatenate(intervals), np.concatenate(slots)
    adjacent = np.argsort(interval, kind="stable")
    return interval[adjacent], slot[adjacent]
