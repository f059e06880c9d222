"""Engines whose steps wait for other processes are woken, and get whole batches."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import genlm
from genlm import AsyncLM, Completion, OutputCache, Query
from genlm.core.scheduler.request_table import Request
from genlm.testing.shared_engine import EngineHandle, SharedEngine

TIMEOUT_S = 60


class Remote:
    """An engine whose step waits for `answer` or `wake`, as one in other processes does."""

    def __init__(self) -> None:
        inner = genlm.get_backend("reference")("demo")
        self.vocabulary, self.max_context = inner.vocabulary, None
        self.capabilities: frozenset[genlm.Capability] = frozenset()
        self.statistics, self.close = inner.statistics, inner.close
        self.row = torch.full((257,), 1 / 257).log()
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.batches: list[int] = []
        self.new = self.wakes = 0
        self.pending: dict[int, Query] = {}
        self.in_step = threading.Event()

    def submit(self, query: Query) -> None:
        self.pending[query.query_id] = query
        self.new += 1

    def abort(self, query_id: int) -> None:
        self.pending.pop(query_id, None)
        self.events.put("aborted")

    def wake(self) -> None:
        self.wakes += 1
        self.events.put("woken")

    def step(self) -> Iterable[Completion]:
        if self.new:
            self.batches.append(self.new)
            self.new = 0
        self.in_step.set()
        if self.events.get(timeout=TIMEOUT_S) != "answer":
            return []
        finished, self.pending = self.pending, {}
        return [Completion(query_id, self.row.clone()) for query_id in finished]


def _loaded():
    engine = Remote()
    return AsyncLM(lambda: engine, output_cache=OutputCache(0)), engine


async def _until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_what_arrives_during_a_step_joins_it_in_one_batch():
    llm, engine = _loaded()

    async def main():
        first = asyncio.create_task(llm.next_token_logprobs([1]))
        await _until(lambda: engine.batches == [1])
        others = [asyncio.create_task(llm.next_token_logprobs([2, i])) for i in range(50)]
        await _until(lambda: len(engine.batches) > 1)
        assert engine.batches == [1, 50]
        engine.events.put("answer")
        await asyncio.gather(first, *others)

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    llm.close()


def test_synchronous_requests_calls_and_resets_wake_a_step():
    llm, engine = _loaded()
    threads = []
    for token in (1, 2):  # the second one while the first one's step waits
        request = threading.Thread(target=llm.next_token_logprobs_sync, args=([token],))
        request.start()
        threads.append(request)
        while len(engine.pending) < token:
            time.sleep(0.001)
    assert llm._scheduler.run(lambda engine: len(engine.pending)) == 2
    engine.events.put("answer")
    for request in threads:
        request.join(TIMEOUT_S)
        assert not request.is_alive()
    with ThreadPoolExecutor(1) as executor:
        reset = executor.submit(llm.next_token_logprobs_sync, [3])
        while not engine.pending:
            time.sleep(0.001)
        before = engine.wakes
        llm.cancel_all()
        assert engine.wakes > before
        with pytest.raises(genlm.QueryResetError):
            reset.result(TIMEOUT_S)
    llm.close()


def test_a_batch_that_is_not_complete_waits_for_a_later_step():
    llm, engine = _loaded()
    worker, second = llm._scheduler._worker, Request(concurrent.futures.Future(), 1)

    async def main():
        first = asyncio.create_task(llm.next_token_logprobs([1]))
        await _until(engine.in_step.is_set)
        worker.enqueue(second, [(Query(10**6, (2,)), None, None)])
        for event in ("woken", "woken", "answer"):
            engine.in_step.clear()
            assert engine.batches == [1]
            engine.events.put(event)
            if event == "woken":
                await _until(engine.in_step.is_set)
        await first

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    worker.flush()
    while not engine.pending:
        time.sleep(0.001)
    engine.events.put("answer")
    second.future.result(TIMEOUT_S)
    llm.close()


def test_a_cancelled_request_is_aborted_while_the_step_waits():
    llm, engine = _loaded()

    async def main():
        tasks = [asyncio.create_task(llm.next_token_logprobs([i])) for i in range(3)]
        await _until(lambda: len(engine.pending) == 3)
        tasks[1].cancel()
        await _until(lambda: len(engine.pending) == 2)
        engine.events.put("answer")
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    llm.close()


def test_closing_does_not_wait_for_what_a_step_waits_for():
    llm, engine = _loaded()

    async def main():
        task = asyncio.create_task(llm.next_token_logprobs([1]))
        await _until(lambda: engine.pending)
        await asyncio.to_thread(llm.close)
        return await asyncio.gather(task, return_exceptions=True)

    [error] = asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert isinstance(error, genlm.EngineClosedError)


def test_a_shared_engine_of_the_conformance_suite_is_woken_at_once():
    shared = SharedEngine(Remote)
    handle = EngineHandle(shared)
    handle.submit(Query(0, (1,)))
    stepping = threading.Thread(target=handle.step)
    stepping.start()
    assert shared.engine.in_step.wait(TIMEOUT_S)
    handle.wake()
    stepping.join(TIMEOUT_S)
    assert not stepping.is_alive()
    shared.close()
