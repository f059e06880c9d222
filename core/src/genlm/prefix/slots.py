"""Which slots of the KV storage are free.

A slot is the place of one token's keys and values in every layer. Knows numbers
only: nothing of tokens, trees or tensors of torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SCRATCH_SLOT", "FreeSlots", "Slots", "slots_within"]

Slots = NDArray[np.int64]

SCRATCH_SLOT = 0
"""Never handed out: tokens that are computed again write here, not over the old."""


def slots_within(budget_bytes: int, bytes_per_token: int) -> int:
    """Return how many slots, the scratch slot among them, a budget has room for."""
    return budget_bytes // bytes_per_token


class FreeSlots:
    """The free ones of the slots `1 ... capacity`, last freed first taken.

    A run that was freed together is taken together again, so long prompts mostly
    lie in one piece, which attention can read without gathering.
    """

    def __init__(self, capacity: int) -> None:
        self._stack: NDArray[Any] = np.arange(capacity, 0, -1, dtype=np.int64)
        self._count = capacity

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> Slots:
        """Return `count` free slots, which are no longer free. There must be as many."""
        assert count <= self._count  # noqa: S101 - our own mistake
        taken = self._stack[self._count - count : self._count][::-1].copy()
        self._count -= count
        return taken

    def give(self, slots: Slots) -> None:
        """Make slots free that were taken."""
        self._stack[self._count : self._count + len(slots)] = slots[::-1]
        self._count += len(slots)

    def numbers(self) -> set[int]:
        """Return the free slots, for tests and figures."""
        return set(self._stack[: self._count].tolist())
