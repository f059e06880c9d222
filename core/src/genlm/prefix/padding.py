"""Cuts pending sequences into padded batches that waste little.

Knows lengths only: nothing of models, tokens or adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["BatchLimits", "plan_batches"]

# Padding up to this many tokens costs less than another pass over the weights.
_CHEAP_PADDING_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one padded batch may hold.

    Attributes:
        max_tokens: The most positions, padding included. A longer sequence is a
            batch of its own.
        max_rows: The most sequences, which bounds the logits of a batch.
        equal_lengths: Every batch holds sequences of one length only.
    """

    max_tokens: int
    max_rows: int
    equal_lengths: bool = False

    def admits(self, rows: int, longest: int, length: int) -> bool:
        """Whether `length` may join `rows` sequences of at most `longest` tokens."""
        padding = longest - length
        if self.equal_lengths and padding:
            return False
        return (
            rows < self.max_rows
            and (rows + 1) * longest <= self.max_tokens
            and padding <= max(length, _CHEAP_PADDING_TOKENS)
        )


def plan_batches(lengths: Sequence[int], limits: BatchLimits) -> Iterator[list[int]]:
    """Group the indices of `lengths` into batches, each index in exactly one.

    Longest first, so that each batch is padded to its first member and a batch
    too big for the memory fails at once. No sequence is padded beyond twice its
    length, except by a few tokens.
    """
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and not limits.admits(len(batch), longest, lengths[index]):
            yield batch
            batch = []
        if not batch:
            longest = lengths[index]
        batch.append(index)
    if batch:
        yield batch
