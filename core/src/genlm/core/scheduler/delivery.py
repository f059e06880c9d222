"""Delivery of answers to the callers that wait for them.

Callers wait on an `asyncio.Future` (coroutines) or a `concurrent.futures.Future` (threads).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
from collections.abc import Callable
from typing import Any

from genlm.core.errors import EvaluationError, GenlmError, described

__all__ = ["Delivery", "Waiter"]

Waiter = asyncio.Future[Any] | concurrent.futures.Future[Any]


class Delivery:
    """Answers of one step, grouped so that each event loop is woken once.

    Used by one thread; the futures may meanwhile be cancelled by their owners.
    """

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any, bool]]] = {}
        self._by_thread: list[tuple[concurrent.futures.Future[Any], Any, bool]] = []

    def add_result(
        self, waiters: list[Waiter], result: Any, copy_result: Callable[[Any], Any]
    ) -> None:
        """Give the first waiter the result itself and every other one a copy."""
        for position, waiter in enumerate(waiters):
            try:
                own = copy_result(result) if position else result
            except Exception as error:  # noqa: BLE001 - out of memory; only this waiter fails
                self._add(waiter, _own_error(error), failed=True)
            else:
                self._add(waiter, own, failed=False)

    def add_error(self, waiters: list[Waiter], error: BaseException) -> None:
        """Give every waiter an exception object of its own."""
        for waiter in waiters:
            self._add(waiter, _own_error(error), failed=True)

    def _add(self, waiter: Waiter, value: Any, *, failed: bool) -> None:
        if isinstance(waiter, concurrent.futures.Future):
            self._by_thread.append((waiter, value, failed))
        else:
            loop = waiter.get_loop()
            if loop not in self._by_loop:
                self._by_loop[loop] = []
            self._by_loop[loop].append((waiter, value, failed))

    @property
    def reaches_loops(self) -> bool:
        """Whether some answer goes to a coroutine."""
        return bool(self._by_loop)

    def send(
        self, afterwards: Callable[[asyncio.AbstractEventLoop], None] | None = None
    ) -> None:
        """Finish all futures, each on the thread it belongs to.

        Args:
            afterwards: Called with and on every event loop that got answers, after them.
        """
        for loop, answers in self._by_loop.items():
            try:
                loop.call_soon_threadsafe(_finish_on_loop, answers, loop, afterwards)
            except RuntimeError:
                # The loop is closed: its futures can never be awaited again.
                continue
        for waiter, value, failed in self._by_thread:
            if waiter.set_running_or_notify_cancel():  # from here on it cannot be cancelled
                _finish(waiter, value, failed=failed)


def _finish_on_loop(
    answers: list[tuple[Any, Any, bool]],
    loop: asyncio.AbstractEventLoop,
    afterwards: Callable[[asyncio.AbstractEventLoop], None] | None,
) -> None:
    for future, value, failed in answers:
        if not future.done():  # not cancelled by its owner while the engine worked
            _finish(future, value, failed=failed)
    if afterwards is not None:
        afterwards(loop)


def _finish(future: Waiter, value: Any, *, failed: bool) -> None:
    if failed:
        future.set_exception(value)
    else:
        future.set_result(value)


def _own_error(error: BaseException) -> BaseException:
    """An exception that one waiter can raise without changing another's traceback."""
    own: BaseException
    if isinstance(error, GenlmError):
        try:
            own = copy.copy(error)
        except Exception:  # noqa: BLE001 - a plugin's own class may not be copyable
            own = EvaluationError(f"the engine raised {described(error)}")
        own.__cause__ = error.__cause__ if type(own) is type(error) else error
        return own
    own = EvaluationError(f"the engine raised {described(error)}")
    own.__cause__ = error
    return own
