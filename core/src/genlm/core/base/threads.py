"""Calls of functions that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_on_thread(
    function: Callable[[], T], then: Callable[[], object] | None = None
) -> Future[T]:
    """Call a function on a new daemon thread, which does not keep the process from exiting.

    Args:
        function: The function.
        then: Called on the thread after the function has returned.

    Returns:
        Future of the result or the exception, which cannot be cancelled.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised by the future
            future.set_exception(error)
            return
        if then is not None:
            then()

    threading.Thread(target=call, name="genlm-call", daemon=True).start()
    return future
