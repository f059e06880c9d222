"""Threads and event loops on which a check waits with a time limit.

All are daemon threads: one that never ends must not keep the process alive.
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

from genlm.testing.failure import CheckTimeout

__all__ = ["LoopThread", "call_together", "on_thread"]

T = TypeVar("T")


class LoopThread:
    """An event loop on a dedicated thread.

    Attributes:
        unhandled: Messages that reached the loop's exception handler: exceptions that were
            never retrieved, which callers cannot see.
    """

    def __init__(self, name: str = "genlm-testing-loop") -> None:
        self.unhandled: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._record_unhandled)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_all())
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            CheckTimeout: It took longer than `timeout_s`.
            Exception: The exception that it raised.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()  # else it would warn that it was not awaited
            raise
        done, _ = concurrent.futures.wait([future], timeout_s)
        if not done:
            future.cancel()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # never started: it would warn that it was not awaited
            what = getattr(coroutine, "__qualname__", repr(coroutine))
            raise CheckTimeout(f"the coroutine {what}", timeout_s)
        return future.result()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop the loop and cancel its running tasks.

        Args:
            timeout_s: Maximum wait. A loop that is blocked for longer is closed
                later, by its own thread.
        """
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _record_unhandled(
        self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        error = context.get("exception")
        cause = f": {type(error).__name__}: {error}" if error is not None else ""
        self.unhandled.append(f"{context['message']}{cause}")


async def _cancel_all() -> None:
    """Cancel all other tasks: if collected later, they would need the closed loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=0.5)


def call_together(functions: Sequence[Callable[[], T]], timeout_s: float) -> list[T]:
    """Call functions concurrently, each on a separate thread, until one raises.

    Raises:
        BaseException: The first exception; the other calls are not waited for.
        CheckTimeout: One took longer than `timeout_s`.
    """
    futures = [_started(function) for function in functions]
    ended, late = concurrent.futures.wait(
        futures, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION
    )
    for future in ended:
        future.result()
    if late:
        function = functions[next(i for i, future in enumerate(futures) if future in late)]
        name = getattr(function, "__qualname__", repr(function))
        raise CheckTimeout(f"the call {name}", timeout_s)
    return [future.result() for future in futures]


def on_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Call a function on a daemon thread; await the result on the running event loop.

    With `asyncio.to_thread` a lost request would keep the process from exiting.
    """
    return asyncio.wrap_future(_started(functools.partial(function, *arguments)))


def _started(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # the waiter cannot cancel the call

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised in the waiter
            future.set_exception(error)

    threading.Thread(target=call, name="genlm-testing-call", daemon=True).start()
    return future
