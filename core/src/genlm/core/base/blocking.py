"""Blocking twins of coroutine methods, all derived in the same way.

`blocking` runs the coroutine on the caller's thread. Coroutines of genlm await only requests,
whose futures block the thread while a twin runs, and `off_loop`. The coroutine therefore never
suspends, and neither an event loop nor another thread is needed: twins work inside and outside
a running event loop, and Ctrl-C ends the wait like a cancellation.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


_NO_LOOP = (
    "a blocking method runs without an event loop, so a function that it awaits, such as a "
    "potential of steer_sync, may await only methods of models. For other awaitables, such as "
    "asyncio.sleep, gather and to_thread, call the coroutine form of the method, such as steer"
)

_WAIT_S = 0.1
"""Duration after which Ctrl-C ends a wait on Windows before Python 3.14, which handles it only
between two waits."""

_RESULT_CODE = concurrent.futures.Future.result.__code__
"""Code that raises the `TimeoutError` of a wait."""

_thread = threading.local()
"""Has the attribute `is_blocking` on threads that run or have run a blocking twin."""


def blocking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], name: str | None = None
) -> Callable[Concatenate[S, P], T]:
    """Return the blocking twin of a coroutine method, with its signature and docstring.

    The name of the twin is by default that of the method with the suffix `_sync`.
    """

    @functools.wraps(method)
    def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(method(self, *args, **kwargs))

    _describe_twin(twin, method, name or f"{method.__name__}_sync")
    return twin


def blocking_iterator(function: Callable[P, AsyncIterator[T]]) -> Callable[P, Iterator[T]]:
    """Return the blocking twin of an asynchronous generator; see `blocking`."""

    @functools.wraps(function)
    def twin(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        results = function(*args, **kwargs)
        while True:
            try:
                yield run_blocking(anext(results))  # type: ignore[arg-type]
            except StopAsyncIteration:
                return

    _describe_twin(twin, function, f"{function.__name__}_sync")
    return twin


def _describe_twin(twin: Callable[..., Any], method: Callable[..., Any], name: str) -> None:
    twin.__name__ = name
    twin.__qualname__ = method.__qualname__.removesuffix(method.__name__) + name
    summary, _, details = (inspect.getdoc(method) or "").partition("\n")
    twin.__doc__ = (
        f"{summary}\n\nThe blocking form of `{method.__name__}`: waits on the calling thread, "
        f"also in a running\nevent loop, which it blocks. Ctrl-C ends the wait and cancels the "
        f"request.\n{details}"
    )


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits only requests and `off_loop`, on the calling thread."""
    was_blocking, _thread.is_blocking = is_blocking(), True
    try:
        coroutine.send(None)
        coroutine.throw(RuntimeError(_NO_LOOP))  # the traceback ends with the `await`
    except StopIteration as end:
        result: T = end.value
        return result
    except RuntimeError as error:
        if str(error) == "no running event loop":
            error.add_note(_NO_LOOP)
        raise
    finally:
        _thread.is_blocking = was_blocking
    coroutine.close()
    raise RuntimeError(_NO_LOOP)


def wait_for(future: concurrent.futures.Future[T]) -> T:
    """Return the result of a future, or raise its error; Ctrl-C ends the wait.

    So does the error of another signal handler, such as a time limit with `signal.alarm`.
    """
    try:
        while True:
            try:
                return future.result(_WAIT_S)
            except TimeoutError as error:
                if not _ended_wait(error):
                    raise
            if future.done():
                return future.result()  # also if its error is a `TimeoutError`
    finally:
        del future  # the traceback of its error refers to this frame


def _ended_wait(error: TimeoutError) -> bool:
    """Whether an error is that of a wait, not that of a future or of a signal handler."""
    # In `wait_for`, the variable with the traceback would keep the frames of all callers.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is _RESULT_CODE


def is_blocking() -> bool:
    """Whether this thread runs the coroutine of a blocking twin."""
    return getattr(_thread, "is_blocking", False)


async def off_loop(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a slow function on another thread; in a blocking twin, on the calling thread."""
    if is_blocking():
        return function(*args, **kwargs)
    return await asyncio.to_thread(raise_stop_iteration, function, *args, **kwargs)


def raise_stop_iteration(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function whose result a future receives; raise `RuntimeError` for `StopIteration`.

    Futures reject `StopIteration`, and the caller would wait forever.
    """
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"{function!r} raised StopIteration") from error
