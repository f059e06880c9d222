"""What to combine with what, as index arrays that a device can read.

Over the tokens in sorted order (their ranks) stands a binary tree. It is filled in
stages: one stage puts complete trees over blocks of `block` entries, the next one treats
the roots of those as its entries, until one root is left. Every interval of the trie is
then put together from a few entries, its pieces, and every prefix reads its interval.

All values of one row live in slots, numbered

    [ranks, padded to whole blocks | stage 0's levels | stage 1's levels | ... | intervals]

This module is numpy only and knows no weights and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from genlm import TrieLayout

__all__ = ["BLOCK", "ROWS_AT_ONCE", "Indices", "Stage", "TreePlan"]

BLOCK = 128
"""Entries below one tree of a stage; three stages suffice for two million tokens. A kernel
for float32 trees over 512 needs more registers than a thread of an NVIDIA GPU can have."""

ROWS_AT_ONCE = 32
"""Rows that share one reading of the indices; a slot of as many float32 is a cache line."""

Indices = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Stage:
    """Complete binary trees over blocks of entries.

    Attributes:
        first: Slot of the first entry.
        count: Number of entries.
        padded: The same, rounded up to whole blocks. No interval has a piece that covers
            padding, so it does not matter what is there.
        upper: Slot of the first pair; level `j` above the entries has `padded >> j` slots
            and begins at `upper + padded - (padded >> (j - 1))`.
    """

    first: int
    count: int
    padded: int
    upper: int


@dataclass(frozen=True)
class TreePlan:
    """The plan of one trie, or of some of its nodes; arrays are int32.

    Attributes:
        order: Token at each rank, `(n_ranks,)`.
        place: Rank of each token, `(n_ranks,)`.
        block: Entries below one tree, a power of 2.
        stages: From the ranks upward.
        piece: Slots of the first piece of every interval, then those of the second of
            every interval that has one, and so on, small pieces first, `(n_pieces,)`.
        piece_offset: Where the k-th pieces begin in `piece`, `(most pieces + 1,)`.
        piece_count: Pieces of each interval, descending, `(n_intervals,)`.
        source: Slot with the value of each prefix, `(n_prefixes,)`.
    """

    order: Indices
    place: Indices
    block: int
    stages: tuple[Stage, ...]
    piece: Indices
    piece_offset: Indices
    piece_count: Indices
    source: Indices

    @property
    def padded(self) -> int:
        """Slots of the ranks, whole blocks."""
        return self.stages[0].padded

    @property
    def first_interval(self) -> int:
        """Slot of the first interval."""
        last = self.stages[-1]
        return last.upper + last.padded - last.padded // self.block

    @property
    def n_slots(self) -> int:
        """Values of one row that exist while it is reduced."""
        return self.first_interval + len(self.piece_count)

    @classmethod
    def of_layout(cls, layout: TrieLayout, block: int | None = None) -> TreePlan:
        """Plan the reductions over all prefixes of a trie.

        Args:
            layout: Of the trie.
            block: Entries below one tree, a power of 2; by default what suits the size.
        """
        lo, hi = layout.lo[layout.distinct], layout.hi[layout.distinct]
        return cls.of(layout.order, lo, hi, layout.source, block)

    @classmethod
    def of(
        cls,
        order: npt.NDArray[np.integer],
        lo: npt.NDArray[np.integer],
        hi: npt.NDArray[np.integer],
        source: npt.NDArray[np.integer],
        block: int | None = None,
    ) -> TreePlan:
        """Plan the reductions over intervals of tokens.

        Args:
            order: Token at each rank, a permutation.
            lo: First rank of each interval.
            hi: One past the last rank; no interval is empty.
            source: For each result a rank, or `len(order) + k` for the k-th interval.
            block: As for `of_layout`.
        """
        n = len(order)
        if block is None:
            block = min(BLOCK, max(2, 1 << (n - 1).bit_length()))
        stages, levels = _stages(n, block)
        interval, slot = _pieces(lo, hi, levels)
        count = np.bincount(interval, minlength=len(lo))
        by_count = np.argsort(-count, kind="stable")
        renamed = np.empty(len(lo), dtype=np.int64)
        renamed[by_count] = np.arange(len(lo))
        turn = np.arange(len(interval)) - np.repeat(np.cumsum(count) - count, count)
        by_turn = np.lexsort((renamed[interval], turn))
        place = np.empty(n, dtype=np.int64)
        place[order] = np.arange(n)
        fields = {
            "order": order,
            "place": place,
            "piece": slot[by_turn],
            "piece_offset": np.concatenate([[0], np.cumsum(np.bincount(turn))]),
            "piece_count": count[by_count],
            "source": source.astype(np.int64),
        }
        plan = cls(block=block, stages=stages, **{k: _index(v) for k, v in fields.items()})
        several = plan.source >= n
        plan.source[several] = plan.first_interval + renamed[plan.source[several] - n]
        return plan


def _stages(n: int, block: int) -> tuple[tuple[Stage, ...], list[int]]:
    """The stages over `n` ranks, and the first slot of every level from the ranks up."""
    stages: list[Stage] = []
    levels = [0]
    count, upper = n, -(-n // block) * block
    while not stages or count > 1:
        padded = -(-count // block) * block
        stages.append(Stage(levels[-1], count, padded, upper))
        count = padded
        while count > padded // block:
            count //= 2
            levels.append(upper)
            upper += count
    return tuple(stages), levels


def _pieces(
    lo: npt.NDArray[np.integer], hi: npt.NDArray[np.integer], levels: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut intervals into entries of the tree: at most two of each level.

    Returns:
        Interval and slot of each piece; those of an interval together, small ones first.
    """
    lo, hi = lo.astype(np.int64), hi.astype(np.int64)
    which = np.arange(len(lo))
    intervals, slots = [], []
    for first in levels:
        at_lo = (lo < hi) & (lo & 1 == 1)
        at_hi = (lo < hi) & (hi & 1 == 1)
        intervals += [which[at_lo], which[at_hi]]
        slots += [first + lo[at_lo], first + hi[at_hi] - 1]
        lo, hi = (lo + at_lo) >> 1, hi >> 1
    interval, slot = np.concatenate(intervals), np.concatenate(slots)
    together = np.argsort(interval, kind="stable")
    return interval[together], slot[together]


def _index(array: npt.NDArray[np.integer]) -> Indices:
    return np.array(array, dtype=np.int32)
