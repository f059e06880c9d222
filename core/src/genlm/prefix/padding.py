"""Division of work into padded batches with little padding.

`plan_batches` groups whole sequences, `plan_segments` the segments of a prefill stage. This
module handles only numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from genlm.core.queries.generations import Integers64

# Padding up to this many tokens costs less than another pass over the weights.
_CHEAP_PADDING_TOKENS = 64

# Maximum number of slots gathered at once: 128 MiB per layer at 2 KiB per slot.
_GATHERED_AT_ONCE = 2**16

# Gathering this many slots as padding costs less than another pass over the weights.
_CHEAP_GATHERING = 4096


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one padded batch of sequences.

    Attributes:
        max_tokens: Maximum number of positions with padding. A longer sequence is a separate
            batch.
        max_rows: Maximum number of sequences, which limits the logits of a batch.
        equal_lengths: Whether all sequences of a batch must have the same length.
    """

    max_tokens: int
    max_rows: int
    equal_lengths: bool = False

    def rows(self, longest: int) -> int:
        """Return the maximum number of sequences of at most `longest` tokens in a batch."""
        return max(1, min(self.max_rows, self.max_tokens // max(1, longest)))

    def shortest(self, longest: int) -> int:
        """Return the least length that may be padded to `longest` tokens."""
        if self.equal_lengths:
            return longest
        return min((longest + 1) // 2, longest - _CHEAP_PADDING_TOKENS)


def plan_batches(
    lengths: Sequence[int] | Integers64, limits: BatchLimits
) -> Iterator[list[int]]:
    """Partition the indices of `lengths` into batches.

    The longest sequences come first, so that every batch is padded to its first member and a
    batch that exceeds the memory fails at once. No sequence is padded to more than twice its
    length plus a few tokens.
    """
    negative = -np.asarray(lengths, np.int64)
    order = np.argsort(negative, kind="stable")
    negative = negative[order]
    first = 0
    while first < len(order):
        longest = -int(negative[first])
        end = int(np.searchsorted(negative, -limits.shortest(longest), side="right"))
        end = min(end, first + limits.rows(longest))
        yield order[first:end].tolist()
        first = end


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """Limits of one padded batch of segments.

    Attributes:
        max_tokens: Maximum number of new positions with padding. A longer segment is a separate
            batch.
        max_context: Maximum number of positions of past and new tokens, padding
            included; None for no limit.
        max_rows: Maximum number of segments.
    """

    max_tokens: int
    max_context: int | None
    max_rows: int = sys.maxsize


def plan_segments(
    counts: Integers64, pasts: Integers64, limits: SegmentLimits, shared: int = 0
) -> Iterator[Integers64]:
    """Partition segments into batches with little padding.

    If all segments have one token, no token of a later batch has an earlier position.

    Args:
        counts: Number of tokens of each segment.
        pasts: Number of tokens before each segment.
        limits: Limits of a batch.
        shared: Number of first slots of all pasts that are read once.

    Yields:
        Indices of the segments of a batch.
    """
    order = np.lexsort([pasts, counts])
    while len(order):
        # Each entry is of the batch that ends with this segment.
        longest, own = counts[order], pasts[order] - shared
        rows, past = np.arange(1, len(order) + 1), np.maximum.accumulate(own)
        new, gathered, width = np.cumsum(longest), np.cumsum(own), longest + past
        fits = (
            (rows <= limits.max_rows)
            & (rows * longest <= limits.max_tokens)
            & (rows * width <= _GATHERED_AT_ONCE)
            & (rows * longest - new <= _CHEAP_PADDING_TOKENS)
            & (rows * past - gathered <= np.maximum(gathered, _CHEAP_GATHERING))
        )
        if limits.max_context is not None:
            fits &= shared + width <= limits.max_context
        end = len(order) if fits.all() else max(1, int(fits.argmin()))
        yield order[:end]
        order = order[end:]
