"""A thread for functions that finalizers must not call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from genlm.core.base.forking import renew_in_forks

__all__ = ["run_in_background", "start_background_thread"]


class _Background:
    """The background thread of this process and its queue of functions."""

    def __init__(self) -> None:
        self._after_fork()
        renew_in_forks(self)

    def _after_fork(self) -> None:
        """Forget the thread, which a forked process does not inherit."""
        self.functions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.is_started = False

    def run(self) -> None:
        while True:
            self.functions.get()()


_background = _Background()


def start_background_thread() -> None:
    """Start the thread unless it runs. Finalizers must not start threads, nor call this."""
    if not _background.is_started:
        _background.is_started = True
        threading.Thread(target=_background.run, name="genlm-reaper", daemon=True).start()


def run_in_background(function: Callable[[], object]) -> None:
    """Run a function on the background thread, after those passed before.

    A finalizer may run on a thread that holds a lock which the function acquires.
    `SimpleQueue.put` is safe there.
    """
    _background.functions.put(function)
