"""`LoopBatches`: items of coroutines, collected until their event loop adds no further ones.

Coroutines that are ready in the same iteration of an event loop are likely to add items, too.
The first item therefore schedules a callback at the end of the loop's queue. It processes the
batch if the last iteration has added no item; otherwise it is rescheduled, a bounded number of
times. No timer is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_ITERATIONS = 8
"""Maximum number of event-loop iterations for which a growing batch is delayed."""


class LoopBatches(Generic[T]):
    """Collects items by event loop.

    Several threads may use it: without a lock, by atomic operations only.

    Args:
        process: Function of the items of a batch, called on their event loop.
    """

    def __init__(self, process: Callable[[list[T]], object]) -> None:
        self._process = process
        self._batches: dict[asyncio.AbstractEventLoop, list[T]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, item: T) -> None:
        """Add an item to the batch of the running event loop."""
        batch = self._batches.get(loop)
        if batch is not None:
            batch.append(item)
            return
        for other in list(self._batches):
            if other.is_closed():  # its callback never runs
                self._batches.pop(other, None)
        self._batches[loop] = [item]
        loop.call_soon(self._process_or_reschedule, loop, 0, MAX_ITERATIONS)

    def _process_or_reschedule(
        self, loop: asyncio.AbstractEventLoop, last_count: int, iterations: int
    ) -> None:
        count = len(self._batches[loop])
        if count > last_count and iterations:
            loop.call_soon(self._process_or_reschedule, loop, count, iterations - 1)
        else:
            self._process(self._batches.pop(loop))
