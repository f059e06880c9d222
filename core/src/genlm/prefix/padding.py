"""Division of work into padded batches with little padding.

`plan_batches` groups whole sequences, `group_segments` the segments of a prefill stage. This
module handles only numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from genlm.core.queries.generations import Integers64
from genlm.prefix.forward import Segment

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
        max_rows: Maximum number of sequences with one new token.
    """

    max_tokens: int
    max_context: int | None
    max_rows: int = sys.maxsize

    def admit(
        self, rows: int, *, longest: int, new: int, past: int, pasts: int, shared: int
    ) -> bool:
        """Whether segments form a batch with little padding.

        Args:
            rows: Number of segments.
            longest: Number of tokens of the longest segment.
            new: Number of tokens of all segments.
            past: Length of the longest past.
            pasts: Length of all pasts together.
            shared: Number of first slots of all pasts that are read once.
        """
        width = longest + past
        return (
            rows * longest <= self.max_tokens
            and rows * (width - shared) <= _GATHERED_AT_ONCE
            and (self.max_context is None or width <= self.max_context)
            and rows * longest - new <= _CHEAP_PADDING_TOKENS
            and rows * past - pasts <= max(pasts, _CHEAP_GATHERING)
        )


def group_segments(
    segments: Sequence[Segment], limits: SegmentLimits, shared: int = 0
) -> Iterator[list[Segment]]:
    """Partition segments into batches with little padding.

    Args:
        segments: The segments of a prefill stage.
        limits: Limits of a batch.
        shared: Number of first slots of all pasts that are read once.
    """
    batch: list[Segment] = []
    new = past = pasts = 0
    for segment in sorted(segments, key=lambda s: (len(s.tokens), s.past)):
        longest = len(segment.tokens)
        new, past, pasts = new + longest, max(past, segment.past), pasts + segment.past
        rows = len(batch) + 1
        if batch and not limits.admit(
            rows, longest=longest, new=new, past=past, pasts=pasts, shared=shared
        ):
            yield batch
            batch, new, past, pasts = [], longest, segment.past, segment.past
        batch.append(segment)
    if batch:
        yield batch


def table_passes(
    positions: Integers64, limits: SegmentLimits, shared: int = 0
) -> Iterator[Integers64]:
    """Divide tokens, each a sequence with one new token, into passes with little padding.

    Args:
        positions: Position of each token in its sequence.
        limits: Limits of a pass.
        shared: Number of first slots of all sequences that are read once.

    Yields:
        Indices of the tokens of a pass; no token of a later pass has an earlier position.
    """
    order = np.argsort(positions, kind="stable")
    lengths = positions[order] + 1 - shared
    first = 0
    while first < len(order):
        longest = 2 * int(lengths[first]) + _CHEAP_PADDING_TOKENS
        end = int(np.searchsorted(lengths, longest, side="right"))
        gathered = _GATHERED_AT_ONCE // int(lengths[end - 1])
        count = max(1, min(limits.max_rows, limits.max_tokens, gathered))
        end = min(end, first + count)
        yield order[first:end]
        first = end
