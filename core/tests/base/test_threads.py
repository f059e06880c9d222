"""Functions that may never return are called on daemon threads."""

from __future__ import annotations

import threading

import pytest

from genlm.plugin import call_on_thread


def test_a_future_has_the_result_or_the_exception_of_a_call() -> None:
    assert call_on_thread(threading.current_thread).result().daemon
    with pytest.raises(KeyError, match="'a'"):
        call_on_thread(lambda: {}["a"]).result()


def test_a_thread_continues_after_its_call_has_returned() -> None:
    threads, may_end = [], threading.Event()

    def call() -> None:
        threads.append(threading.current_thread())

    call_on_thread(call, may_end.wait).result()
    assert threads[0].is_alive()
    may_end.set()
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_a_call_cannot_be_cancelled() -> None:
    may_return = threading.Event()
    future = call_on_thread(may_return.wait)
    assert not future.cancel()
    may_return.set()
    assert future.result()
