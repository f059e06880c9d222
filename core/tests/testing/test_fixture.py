"""Threads and event loops of the suite end, also after lost requests."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest

from genlm.testing import CheckTimeout
from genlm.testing.fixture import LoopThread, call_within, on_thread


def test_closing_a_loop_ends_the_coroutines_that_still_wait_on_it() -> None:
    loop = LoopThread()
    ended = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)

    async def leave_one_behind() -> asyncio.Task[None]:
        task = asyncio.create_task(wait_for_ever())
        await asyncio.sleep(0)
        return task

    task = loop.run(leave_one_behind(), timeout_s=60)
    loop.close()
    assert ended == [True]
    assert task.cancelled()
    loop.close()


def test_a_coroutine_that_never_ends_is_given_up() -> None:
    loop = LoopThread()

    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(CheckTimeout, match="wait_for_ever"):
        loop.run(wait_for_ever(), timeout_s=0.01)
    loop.close()


def test_a_coroutine_that_a_stuck_loop_never_came_to_is_closed() -> None:
    loop, go, late = LoopThread(), threading.Event(), asyncio.sleep(0)
    loop._loop.call_soon_threadsafe(go.wait)
    with pytest.raises(CheckTimeout):
        loop.run(late, timeout_s=0.01)
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
    go.set()
    loop.close()


def test_a_stuck_loop_is_left_behind_and_ends_itself_once_it_can() -> None:
    loop, go = LoopThread(), threading.Event()
    ended = asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), loop._loop)
    loop._loop.call_soon_threadsafe(go.wait)
    loop.close(timeout_s=0.01)
    assert loop._thread.is_alive()
    go.set()
    loop._thread.join(60)
    assert loop._loop.is_closed()
    assert ended.cancelled()
    assert loop.unhandled == []


def test_calls_are_made_on_threads_that_keep_no_process_alive() -> None:
    loop = LoopThread()

    async def thread() -> threading.Thread:
        return await on_thread(threading.current_thread)

    called_on = call_within(threading.current_thread, timeout_s=60)
    assert called_on.daemon
    assert loop.run(thread(), timeout_s=60).daemon
    loop.close()


def test_an_error_on_a_thread_is_raised_where_it_is_awaited() -> None:
    loop = LoopThread()

    async def divide() -> float:
        return await on_thread(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        loop.run(divide(), timeout_s=60)
    loop.close()


def test_an_abandoned_call_ends_quietly() -> None:
    threads: list[threading.Thread] = []
    begun, left = threading.Event(), threading.Event()

    def call() -> None:
        threads.append(threading.current_thread())
        begun.set()
        assert left.wait(60)

    async def leave() -> None:
        waiting = on_thread(call)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        left.set()

    asyncio.run(leave())
    assert begun.wait(60)
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_a_closed_loop_leaves_no_coroutine_behind() -> None:
    loop = LoopThread()
    loop.close()

    async def nothing() -> None: ...

    coroutine = nothing()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(coroutine, 1.0)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
