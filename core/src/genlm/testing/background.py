"""Threads on which a check waits with a limit, so that a lost answer is a failure.

Daemon threads throughout: one that never ends must not keep the process alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from genlm.testing.failure import NeverEnded

__all__ = ["LoopThread", "call_together", "on_thread"]

T = TypeVar("T")


class LoopThread:
    """An event loop on a thread of its own.

    Attributes:
        complaints: What reached the loop's exception handler: errors that nobody
            received, which no caller's code can see.
    """

    def __init__(self, name: str = "genlm-testing-loop") -> None:
        self.complaints: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._complain)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancelled_all())
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], patience_s: float) -> T:
        """Run a coroutine on the loop and wait for it.

        Raises:
            NeverEnded: It took longer than `patience_s`.
            Exception: Whatever it raised.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        done, _ = concurrent.futures.wait([future], patience_s)
        if not done:
            future.cancel()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # of a loop that did not come to it; nobody would await it
            what = getattr(coroutine, "__qualname__", repr(coroutine))
            raise NeverEnded(f"the coroutine {what}", patience_s)
        return future.result()

    def close(self, patience_s: float = 1.0) -> None:
        """Stop the loop and cancel what still runs on it.

        Args:
            patience_s: How long to wait for that. A loop that is stuck for longer is left
                behind, and closed by its own thread once it can.
        """
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patience_s)

    def _complain(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        cause = f": {type(error).__name__}: {error}" if error is not None else ""
        self.complaints.append(f"{context['message']}{cause}")


async def _cancelled_all() -> None:
    """End the other tasks here: collected later, they would want a loop that is closed."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=0.5)


def call_together(functions: Sequence[Callable[[], T]], patience_s: float) -> list[T]:
    """Call functions at the same time, each on a thread of its own, until one raises.

    Raises:
        BaseException: Whatever one of them raised; others may wait in vain because of it.
        NeverEnded: One took longer than `patience_s`.
    """
    futures = [_started(function) for function in functions]
    ended, late = concurrent.futures.wait(
        futures, patience_s, return_when=concurrent.futures.FIRST_EXCEPTION
    )
    for future in ended:
        future.result()
    if late:
        function = functions[next(i for i, future in enumerate(futures) if future in late)]
        name = getattr(function, "__qualname__", repr(function))
        raise NeverEnded(f"the call {name}", patience_s)
    return [future.result() for future in futures]


def on_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Call a function on a daemon thread, for the running event loop to await.

    `asyncio.to_thread` would keep the process from exiting while a request is lost.
    """
    return asyncio.wrap_future(_started(functools.partial(function, *arguments)))


def _started(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # who stops waiting for it must not end it

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            future.set_exception(error)

    threading.Thread(target=call, name="genlm-testing-call", daemon=True).start()
    return future
