"""A thread that runs what finalizers must not run themselves."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable

__all__ = ["run_in_background"]


def run_in_background(function: Callable[[], object]) -> None:
    """Run a function soon, on a thread of its own, one after another.

    Finalizers run on any thread at any moment, also on one that holds a lock which the function
    takes. `SimpleQueue.put` is safe there.
    """
    _functions().put(function)


@functools.cache
def _functions() -> queue.SimpleQueue[Callable[[], object]]:
    functions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def run() -> None:
        while True:
            functions.get()()

    threading.Thread(target=run, name="genlm-reaper", daemon=True).start()
    return functions


if hasattr(os, "register_at_fork"):  # a fork does not inherit the thread
    os.register_at_fork(after_in_child=_functions.cache_clear)
