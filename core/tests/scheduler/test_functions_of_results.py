"""Functions that a request applies to its results before they reach the event loop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch
from scripted import oracle_row

from genlm import EngineClosedError, EngineDiedError, EvaluationError, Query, QueryResetError
from genlm.core.base.blocking import run_blocking

IDS = (3, 1)
QUERY_IDS = itertools.count(10**6)  # others than those of the model


async def result_of(llm: Any, then: Any) -> Any:
    query = Query(next(QUERY_IDS), IDS)
    request = llm._scheduler.submit([(query, None, None)], then)
    [result] = await llm._scheduler.results(request)
    return result


def thread_and_values(values: list[Any]) -> Any:
    return threading.current_thread(), *values


async def waiting_for(llm: Any, future: Future[str]) -> asyncio.Task[Any]:
    """Return a request whose function has returned a future."""
    entered, loop = asyncio.Event(), asyncio.get_running_loop()

    def then(values: list[Any]) -> Future[str]:
        loop.call_soon_threadsafe(entered.set)
        return future

    waiting = asyncio.create_task(result_of(llm, then))
    await entered.wait()
    return waiting


def test_a_function_is_called_on_the_engines_thread(start):
    llm, _ = start()
    thread, row = asyncio.run(result_of(llm, thread_and_values))
    assert thread is llm._scheduler._worker._thread
    torch.testing.assert_close(row, oracle_row(IDS, None, 16))


def test_a_function_of_a_blocking_call_is_called_on_its_thread(start):
    llm, _ = start()
    thread, row = run_blocking(result_of(llm, thread_and_values))
    assert thread is threading.current_thread()
    torch.testing.assert_close(row, oracle_row(IDS, None, 16))


def test_the_result_of_a_future_is_delivered_when_it_ends(start):
    llm, _ = start()
    future: Future[str] = Future()

    async def program() -> str:
        waiting = await waiting_for(llm, future)
        other = asyncio.create_task(llm.next_token_logprobs([2]))
        torch.testing.assert_close(await other, oracle_row([2], None, 16))
        assert not waiting.done()
        threading.Thread(target=future.set_result, args=("later",)).start()
        return await waiting

    assert asyncio.run(program()) == "later"
    assert not llm._scheduler._worker._late


@pytest.mark.parametrize("end", ["cancel_all", "close"])
def test_a_request_that_waits_for_a_future_ends_with_all_others(start, end, caplog):
    llm, _ = start()
    future: Future[str] = Future()

    async def program() -> None:
        waiting = await waiting_for(llm, future)
        await llm.next_token_logprobs([2])  # a later step of the engine
        getattr(llm, end)()
        with pytest.raises(QueryResetError if end == "cancel_all" else EngineClosedError):
            await asyncio.wait_for(waiting, 60)
        future.set_result("ignored")

    asyncio.run(program())
    assert caplog.records == []


def test_a_cancelled_future_is_an_error(start):
    """An executor cancels the futures of its calls if it is shut down."""
    llm, _ = start()
    future: Future[str] = Future()
    assert future.cancel()
    with pytest.raises(CancelledError):
        asyncio.run(asyncio.wait_for(result_of(llm, lambda values: future), 60))


@pytest.mark.parametrize("kind", ["raised", "in a future", "blocking"])
def test_the_error_of_a_function_is_the_callers_alone(start, kind):
    llm, _ = start()
    error = LookupError("of the function")

    def then(values: list[Any]) -> Future[Any]:
        if kind != "in a future":
            raise error
        future: Future[Any] = Future()
        future.set_exception(error)
        return future

    async def program() -> None:
        other = asyncio.create_task(llm.next_token_logprobs([2]))
        with pytest.raises(LookupError) as raised:
            await result_of(llm, then)
        assert raised.value is error
        torch.testing.assert_close(await other, oracle_row([2], None, 16))

    if kind == "blocking":
        with pytest.raises(LookupError):
            run_blocking(result_of(llm, then))
    else:
        asyncio.run(program())
    assert llm.next_token_logprobs_sync([2]) is not None


def test_an_exit_in_a_function_ends_the_engines_thread(start):
    llm, engine = start()

    def then(values: list[Any]) -> Any:
        raise SystemExit("of the function")

    with pytest.raises(EvaluationError, match="SystemExit: of the function"):
        asyncio.run(result_of(llm, then))
    llm._scheduler._worker.join(60)
    assert engine.closed
    with pytest.raises(EngineDiedError, match="SystemExit: of the function"):
        llm.next_token_logprobs_sync([1])


def test_a_function_of_a_cancelled_request_is_not_called_and_not_kept(start):
    llm, engine = start()
    called: list[object] = []

    class Then:
        def __call__(self, values: list[Any]) -> None:
            called.append(values)

    async def program() -> None:
        engine.hold()
        then = Then()
        kept = weakref.ref(then)
        waiting = asyncio.create_task(result_of(llm, then))
        del then
        await asyncio.to_thread(engine.wait_until_entered)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del waiting
        engine.release()
        await llm.next_token_logprobs([2])  # a later step of the engine
        gc.collect()
        assert kept() is None

    asyncio.run(program())
    assert not called
