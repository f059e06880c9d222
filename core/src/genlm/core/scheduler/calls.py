"""Functions that run on the engine's thread between two steps: calls and releases."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from genlm.core.scheduler.background import run_in_background

logger = logging.getLogger("genlm")

RELEASE_DELAY_S = 0.01
"""Period in which released items are collected before an idle engine is woken."""


@dataclass
class Call:
    """A function to run on the engine's thread and the future of its result.

    No caller cancels the future. A call with `wait_for` runs when no unfinished query satisfies
    `wait_for` and the engine has received all aborts. With `is_exclusive`, the engine receives
    no other queries before.
    """

    function: Callable[[Any], Any]
    wait_for: Callable[[Any], bool] | None = None
    is_exclusive: bool = False
    future: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)

    def run(self, engine: Any) -> None:
        """Run the function and finish the future with its result or exception."""
        try:
            self.future.set_result(self.function(engine))
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise


class ReleaseQueue:
    """Items whose state in the engine is to be released.

    Args:
        release: Function of the engine and of a list of items that releases them.
        wake: Function that sets `is_due` and wakes the engine's thread.

    Attributes:
        is_due: Whether the items are to be released although the engine is idle.
    """

    def __init__(
        self, release: Callable[[Any, list[Any]], object], wake: Callable[[], None]
    ) -> None:
        self._release = release
        self._wake = wake
        self._items: deque[Any] = deque()
        self._is_scheduled = self.is_due = False

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Any) -> None:
        """Add an item; safe in finalizers, because it takes no lock.

        An idle engine is woken once for all items of `RELEASE_DELAY_S`.
        """
        self._items.append(item)
        if not self._is_scheduled:
            self._is_scheduled = True
            run_in_background(self._wake_after_delay)

    def _wake_after_delay(self) -> None:
        time.sleep(RELEASE_DELAY_S)
        self._is_scheduled = False  # first: items that are added afterwards schedule a call
        if self._items:  # no step has released them
            self._wake()

    def run(self, engine: Any) -> None:
        """Release the items that have been added; called on the engine's thread."""
        self.is_due = False
        items = [self._items.popleft() for _ in range(len(self._items))]
        try:
            self._release(engine, items)
        except Exception:
            logger.exception("releasing state of the engine raised")
