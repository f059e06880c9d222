"""Laws: concurrency batches, without a timer and without starving anybody."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import numpy as np
import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm import Completion, Query, Scheduler
from genlm.core.base import loop_batches
from genlm.core.scheduler import batching
from genlm.core.scheduler.request_table import Request, RequestTable


def test_all_requests_of_one_turn_leave_in_one_batch(start):
    llm, engine = start()

    async def main():
        await asyncio.gather(*(llm.next_token_logprobs([i % 16, i // 16]) for i in range(200)))

    asyncio.run(main())
    assert [len(batch) for batch in engine.batches] == [200]
    statistics = llm.statistics()
    assert statistics.batch_sizes == {200: 1}
    assert statistics.largest_batch == statistics.mean_batch_size == 200


def test_a_batch_is_held_while_the_turns_of_the_loop_keep_adding_to_it(start):
    llm, engine = start()

    async def descend(depth: int) -> None:
        requests = [llm.next_token_logprobs([depth, 1])]
        if depth:
            requests.append(descend(depth - 1))
        await asyncio.gather(*requests)

    asyncio.run(descend(4))
    assert [len(batch) for batch in engine.batches] == [5]


def test_an_endless_stream_of_arrivals_does_not_hold_a_batch_back_for_ever(start):
    llm, _ = start()

    async def main():
        first = asyncio.create_task(llm.next_token_logprobs([15]))
        later_requests = []
        while not first.done():  # one arrival in every turn, until the first is answered
            i = len(later_requests)
            ids = [i >> shift & 15 for shift in (0, 4, 8, 12, 16)]  # never the same again
            later_requests.append(asyncio.create_task(llm.next_token_logprobs([0, *ids])))
            await asyncio.sleep(0)
            time.sleep(1e-4)  # the engine's thread does not wait for the interpreter
        assert len(later_requests) > loop_batches.MAX_ITERATIONS
        await asyncio.gather(*later_requests)

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_a_lone_request_leaves_alone_and_at_once(start):
    llm, engine = start()
    row = asyncio.run(llm.next_token_logprobs([4]))
    torch.testing.assert_close(row, oracle_row([4], None, 16))
    assert engine.batches == [[(4,)]]


def test_requests_that_arrive_during_a_step_form_the_next_batch(start):
    llm, engine = start()
    engine.hold()

    async def main():
        first = asyncio.create_task(llm.next_token_logprobs([0]))
        await asyncio.to_thread(engine.wait_until_entered)
        later = []
        for i in range(1, 6):  # in different turns, all during the step
            later.append(asyncio.create_task(llm.next_token_logprobs([i])))
            await asyncio.sleep(0)
        engine.release()
        await asyncio.gather(first, *later)

    asyncio.run(main())
    assert [len(batch) for batch in engine.batches] == [1, 5]


def test_a_straggler_waits_for_the_callers_of_the_step_it_missed(start, monkeypatch):
    monkeypatch.setattr(batching, "GRACE_SHARE", 1e6)  # the callers decide, not the clock
    llm, engine = start()
    engine.hold()

    async def particle(i: int) -> None:
        for step in range(3):
            await llm.next_token_logprobs([i, step])
            await asyncio.sleep(0)  # the program's own work: the engine's thread may run

    async def main():
        particles = [asyncio.create_task(particle(i)) for i in range(4)]
        await asyncio.to_thread(engine.wait_until_entered)
        straggler = asyncio.create_task(particle(4))
        for _ in range(loop_batches.MAX_ITERATIONS + 2):
            await asyncio.sleep(0)
        engine.release()
        await asyncio.gather(*particles, straggler)

    asyncio.run(main())
    assert [len(batch) for batch in engine.batches] == [4, 5, 5, 1]


def test_a_straggler_leaves_when_the_callers_of_the_step_ask_nothing_more(start, monkeypatch):
    monkeypatch.setattr(batching, "GRACE_SHARE", 1e6)
    llm, engine = start()
    engine.hold()

    async def main():
        request = asyncio.create_task(llm.next_token_logprobs([1]))
        await asyncio.to_thread(engine.wait_until_entered)
        straggler = asyncio.create_task(llm.next_token_logprobs([2]))
        for _ in range(loop_batches.MAX_ITERATIONS + 2):
            await asyncio.sleep(0)
        engine.release()
        await asyncio.gather(request, straggler)

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert engine.batches == [[(1,)], [(2,)]]


def test_a_straggler_does_not_wait_for_callers_whose_event_loop_is_blocked(start, monkeypatch):
    monkeypatch.setattr(batching, "MIN_GRACE_S", 0.0)
    llm, engine = start()
    engine.hold()
    answers = []
    straggler = threading.Thread(
        target=lambda: answers.append(llm.next_token_logprobs_sync([2]))
    )

    async def main():
        request = asyncio.create_task(llm.next_token_logprobs([1]))
        await asyncio.to_thread(engine.wait_until_entered)
        straggler.start()
        while llm.statistics().pending < 2:
            await asyncio.sleep(0)
        engine.release()
        straggler.join(TIMEOUT_S)  # blocks this event loop until the straggler is served
        assert not straggler.is_alive()
        await request

    asyncio.run(main())
    torch.testing.assert_close(answers[0], oracle_row([2], None, 16))


@pytest.mark.parametrize(
    ("name", "value"), [("GRACE_SHARE", 1e6), ("MIN_GRACE_S", float("inf"))]
)
def test_a_straggler_waits_for_a_flush_although_calls_wake_the_engine(
    start, monkeypatch, name, value
):
    monkeypatch.setattr(batching, name, value)
    llm, engine = start()
    scheduler, straggler = llm._scheduler, Request(concurrent.futures.Future(), 1)
    engine.hold()

    async def main():
        request = asyncio.create_task(llm.next_token_logprobs([1]))
        await asyncio.to_thread(engine.wait_until_entered)
        scheduler._worker.enqueue(straggler, [(Query(10**6, (2,)), None, None)])
        engine.release()
        for _ in range(2):
            scheduler.run(lambda _: None)
        assert engine.batches == [[(1,)]]
        await request

    asyncio.run(main())
    scheduler._worker.flush()
    straggler.future.result(TIMEOUT_S)


@pytest.mark.parametrize("max_batch_size", [None, 4])
def test_an_exclusive_call_comes_between_earlier_and_later_queries(max_batch_size):
    engine = ScriptedEngine()
    scheduler = Scheduler(lambda: engine, max_batch_size=max_batch_size)
    worker, requests = scheduler._worker, []

    def ask(token_id):
        requests.append(Request(concurrent.futures.Future(), 1))
        worker.enqueue(requests[-1], [(Query(token_id, (token_id,)), None, None)])
        worker.flush()

    engine.hold()
    ask(0)
    engine.wait_until_entered()
    ask(1)
    call = worker.call(lambda _: engine.batches.copy(), exclusively=True)
    ask(2)
    ask(3)
    engine.release()
    for request in requests:
        request.future.result(TIMEOUT_S)
    scheduler.close()
    assert call.result(TIMEOUT_S) == [[(0,)], [(1,)]]
    assert engine.batches == [[(0,)], [(1,)], [(2,), (3,)]]


def arrive(table: RequestTable, query_id: int) -> None:
    request = Request(concurrent.futures.Future(), 1)
    table.enqueue(request, 0, Query(query_id, (1,)), None, None, 0.0)


def test_a_full_batch_does_not_wait_for_a_flush() -> None:
    policy, table = batching.BatchingPolicy(2), RequestTable()
    assert policy.seconds_to_dispatch(table) is None
    arrive(table, 0)
    assert policy.seconds_to_dispatch(table) is None
    arrive(table, 1)
    assert policy.seconds_to_dispatch(table) == 0


def test_requests_that_arrive_after_a_flush_wait_for_the_next_one() -> None:
    policy, table = batching.BatchingPolicy(None), RequestTable()
    policy.flush(table)
    for query_id in range(2):
        arrive(table, query_id)
        assert not policy.is_flushed
        assert policy.seconds_to_dispatch(table) is None
        policy.flush(table)
        assert policy.is_flushed
        assert policy.seconds_to_dispatch(table) == 0
        table.take(None, 0.0)
        policy.hold()


def test_no_more_than_max_batch_size_queries_are_in_the_engine(start):
    llm, engine = start(max_batch_size=3)

    async def main():
        await asyncio.gather(*(llm.next_token_logprobs([i]) for i in range(8)))

    asyncio.run(main())
    assert [len(batch) for batch in engine.batches] == [3, 3, 2]
    assert [ids for batch in engine.batches for ids in batch] == [(i,) for i in range(8)]


def test_limits_may_be_integers_of_numpy(start):
    llm, engine = start(max_batch_size=np.int64(2), max_pending=np.int64(3))

    async def main():
        await asyncio.gather(*(llm.next_token_logprobs([i]) for i in range(4)))

    asyncio.run(main())
    assert [len(batch) for batch in engine.batches] == [2, 2]


@pytest.mark.parametrize("limits", [{"max_batch_size": 0}, {"max_pending": -1}])
def test_impossible_limits_are_refused_before_the_engine_is_built(limits):
    from genlm import AsyncLM

    def build():
        raise AssertionError("built")

    with pytest.raises(ValueError, match=next(iter(limits))):
        AsyncLM(build, **limits)


def test_new_requests_join_a_running_native_engine(start):
    """An engine that needs several steps a query is fed between them."""

    class Continuous(ScriptedEngine):
        def __init__(self):
            super().__init__()
            self.running = {}
            self.most_running = 0

        def submit(self, query):
            self.running[query.query_id] = (query, 3)

        def step(self):
            self.during_evaluate()
            self.most_running = max(self.most_running, len(self.running))
            for query_id, (query, steps) in list(self.running.items()):
                self.running[query_id] = (query, steps - 1)
                if steps == 1:
                    del self.running[query_id]
                    yield Completion(query_id, oracle_row(query.token_ids, query.adapter, 16))

        def abort(self, query_id):
            self.running.pop(query_id, None)

    engine = Continuous()
    llm, _ = start(engine)
    second_arrived = threading.Event()

    async def main():
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(llm.next_token_logprobs([1]))]

        def ask_second():
            tasks.append(asyncio.create_task(llm.next_token_logprobs([2])))
            loop.call_soon(second_arrived.set)

        def first_step():
            engine.during_evaluate = lambda: None
            loop.call_soon_threadsafe(ask_second)
            assert second_arrived.wait(TIMEOUT_S)

        engine.during_evaluate = first_step
        torch.testing.assert_close(await tasks[0], oracle_row([1], None, 16))
        torch.testing.assert_close(await tasks[1], oracle_row([2], None, 16))

    asyncio.run(main())
    assert engine.most_running == 2


def test_the_event_loop_runs_on_while_the_model_works(start):
    llm, engine = start()
    engine.hold()

    async def main():
        request = asyncio.create_task(llm.next_token_logprobs([1]))
        await asyncio.to_thread(engine.wait_until_entered)
        for _ in range(1000):  # would never end if the model blocked the loop
            await asyncio.sleep(0)
        assert not request.done()
        engine.release()
        await request

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
