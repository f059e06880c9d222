"""A background thread for functions that finalizers must not call themselves."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from genlm.core.base.forking import renew_in_forks

logger = logging.getLogger("genlm")


class _Background:
    """The background thread of this process and its queue of functions."""

    def __init__(self) -> None:
        self._after_fork()
        renew_in_forks(self)

    def _after_fork(self) -> None:
        """Reset the state: a forked process does not inherit the thread."""
        self.functions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.is_started = False

    def run(self) -> None:
        while True:
            try:
                self.functions.get()()
            except BaseException:  # no function may end the thread
                logger.exception("a function on the background thread raised")


_background = _Background()


def start_background_thread() -> None:
    """Start the thread unless it is running. Finalizers, which cannot, must not call this."""
    if not _background.is_started:
        _background.is_started = True
        threading.Thread(target=_background.run, name="genlm-reaper", daemon=True).start()


def run_in_background(function: Callable[[], object]) -> None:
    """Run a function on the background thread, in order of the calls.

    Finalizers may call this on a thread that holds a lock which the function acquires:
    `SimpleQueue.put` is reentrant.
    """
    _background.functions.put(function)
