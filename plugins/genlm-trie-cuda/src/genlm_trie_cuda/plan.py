"""The segment tree over a trie's sorted tokens, as index arrays for a device.

The tree over the tokens in sorted order (their ranks) is computed in stages: a stage builds
complete binary trees over blocks of `block` entries, and their roots are the entries of the
next stage, until one root remains. Every interval of the trie is then combined from a few
entries, its pieces, and every prefix reads the value of its interval.

The values of one row are stored in slots, in this order:

    [ranks, padded to whole blocks | stage 0's levels | stage 1's levels | ... | intervals]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.plugin import TrieLayout, interval_pieces, ranges

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Number of entries of a block; three stages cover two million tokens. With 512 entries, the
float32 kernel needs more registers than a thread of an NVIDIA GPU has."""

ROWS_AT_ONCE = 32
"""Number of rows that share one read of the indices; a slot of 32 float32 is one cache line."""

Indices: TypeAlias = Any
"""int32: a numpy array, or a tensor on a device."""


@dataclass(frozen=True)
class Stage:
    """Complete binary trees over the blocks of a range of entries.

    Attributes:
        first: Slot of the first entry.
        count: Number of entries.
        padded: `count` rounded up to whole blocks. No piece covers padding, so the values
            there are arbitrary.
        upper: Slot of the first pair; level `j` above the entries has `padded >> j` slots
            and begins at `upper + padded - (padded >> (j - 1))`.
    """

    first: int
    count: int
    padded: int
    upper: int


@dataclass(frozen=True)
class TreePlan:
    """The plan of the reductions of a trie, or of some of its nodes.

    Sizes are stored on the host, so that reductions do not wait for a device. Indices are never
    modified.

    Attributes:
        order: Token at each rank, `(n_ranks,)`.
        rank_of: Rank of each token, `(n_ranks,)`.
        block: Number of entries of a block, a power of 2.
        stages: The stages, from the ranks upwards.
        piece_sizes: Number of intervals that have a k-th piece, for every k.
        piece: Slots of the first piece of every interval, then of the second piece of every
            interval that has one, and so on, smallest pieces first, `(n_pieces,)`.
        piece_offset: Index in `piece` of the first of the k-th pieces, `(max_pieces + 1,)`.
        piece_count: Number of pieces of each interval, descending, `(n_intervals,)`.
        source: Slot of the value of each prefix, `(n_prefixes,)`.
    """

    order: Indices
    rank_of: Indices
    block: int
    stages: tuple[Stage, ...]
    piece_sizes: tuple[int, ...]
    piece: Indices
    piece_offset: Indices
    piece_count: Indices
    source: Indices

    @property
    def padded(self) -> int:
        """Number of slots of the ranks, padded to whole blocks."""
        return self.stages[0].padded

    @property
    def first_interval(self) -> int:
        """Slot of the first interval."""
        last = self.stages[-1]
        return last.upper + last.padded - last.padded // self.block

    @property
    def n_slots(self) -> int:
        """Number of slots of one row."""
        return self.first_interval + len(self.piece_count)

    @classmethod
    def of_layout(cls, layout: TrieLayout, block: int | None = None) -> TreePlan:
        """Plan the reductions over all prefixes of a trie.

        Args:
            layout: Layout of the trie.
            block: Number of entries of a block, a power of 2; by default `BLOCK`, or less for a
                small trie.
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
            hi: One past the last rank of each interval; intervals must not be empty.
            source: Rank of each result, or `len(order) + k` for the k-th interval.
            block: As for `of_layout`.
        """
        n = len(order)
        if block is None:
            block = min(BLOCK, max(2, 1 << (n - 1).bit_length()))
        stages, levels = _stages(n, block)
        interval, slot = interval_pieces(lo, hi, levels)
        count = np.bincount(interval, minlength=len(lo))
        by_count = np.argsort(-count, kind="stable")
        new_index = np.empty(len(lo), dtype=np.int64)
        new_index[by_count] = np.arange(len(lo))
        piece_number = ranges(0, count)
        by_number = np.lexsort((new_index[interval], piece_number))
        rank_of = np.empty(n, dtype=np.int64)
        rank_of[order] = np.arange(n)
        sizes = np.bincount(piece_number)
        fields = {
            "order": order,
            "rank_of": rank_of,
            "piece": slot[by_number],
            "piece_offset": np.concatenate([[0], np.cumsum(sizes)]),
            "piece_count": count[by_count],
            "source": source.astype(np.int64),
        }
        indices = {name: np.array(field, np.int32) for name, field in fields.items()}
        plan = cls(block=block, stages=stages, piece_sizes=tuple(sizes.tolist()), **indices)
        of_intervals = plan.source >= n
        plan.source[of_intervals] = (
            plan.first_interval + new_index[plan.source[of_intervals] - n]
        )
        return plan

    def to(self, device: torch.device) -> TreePlan:
        """Copy the indices to a device; the copy is complete on return, for all streams."""
        import torch

        indices: dict[str, Any] = {
            name: torch.from_numpy(array).to(device)
            for name, array in vars(self).items()
            if isinstance(array, np.ndarray)
        }
        return replace(self, **indices)


def _stages(n: int, block: int) -> tuple[tuple[Stage, ...], list[int]]:
    """Return the stages over `n` ranks, and the first slot of every level from the ranks up."""
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
