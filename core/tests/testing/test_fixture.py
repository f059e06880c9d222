"""Calls and coroutines of the suite end, also after lost requests."""

from __future__ import annotations

import asyncio
import threading

import pytest

from genlm.testing import QUICK, CheckTimeout
from genlm.testing.fixture import Fixture, on_thread


class Waiting(Fixture):
    """Gives up after a hundredth of a second."""

    def __init__(self) -> None:
        super().__init__(QUICK, seed=0, timeout_s=0.01)


def test_a_coroutine_that_never_ends_is_given_up() -> None:
    waits = []

    async def wait_for_ever() -> None:
        waits.append((asyncio.get_running_loop(), future := asyncio.Future()))
        await future

    with pytest.raises(CheckTimeout, match="wait_for_ever did not end"), Waiting() as fixture:
        fixture.run(wait_for_ever())
    [(loop, future)] = waits
    loop.call_soon_threadsafe(future.cancel)  # ends the thread


def test_a_coroutine_on_a_blocked_loop_is_given_up() -> None:
    go = threading.Event()

    async def block() -> None:
        go.wait()

    with pytest.raises(CheckTimeout), Waiting() as fixture:
        fixture.run(block())
    go.set()


def test_calls_are_made_on_threads_that_keep_no_process_alive() -> None:
    async def thread() -> threading.Thread:
        return await on_thread(threading.current_thread)

    with Fixture(QUICK, seed=0, timeout_s=60) as fixture:
        assert fixture.call(threading.current_thread).daemon
        assert fixture.run(thread()).daemon


def test_an_error_on_a_thread_is_raised_where_it_is_awaited() -> None:
    async def divide() -> float:
        return await on_thread(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(divide())


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
