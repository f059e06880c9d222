"""Law: a cancelled or timed-out caller disturbs nobody."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import signal
import threading
from functools import partial

import pytest
import torch
from scripted import TIMEOUT_S, oracle_row

from genlm import Query, Scheduler
from genlm.core.scheduler.delivery import Delivery
from genlm.core.scheduler.request_table import Request


def run_strictly(main) -> None:
    """Run a coroutine; any error that asyncio would only log fails the test."""

    async def strict():
        complaints = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context)
        )
        await main
        await asyncio.sleep(0)
        assert complaints == []

    asyncio.run(strict())


def test_a_request_cancelled_before_its_batch_left_is_never_evaluated(start):
    llm, engine = start()

    async def main():
        doomed = asyncio.create_task(llm.next_token_logprobs([1]))
        remaining = asyncio.create_task(llm.next_token_logprobs([2]))
        await asyncio.sleep(
            0
        )  # both are in the inbox, the inbox is flushed after this iteration
        doomed.cancel()
        torch.testing.assert_close(await remaining, oracle_row([2], None, 16))
        assert doomed.cancelled()

    run_strictly(main())
    assert engine.batches == [[(2,)]]
    assert llm.statistics().abandoned == 1


def test_a_request_cancelled_during_its_evaluation_leaves_the_others_alone(start):
    llm, engine = start()
    engine.hold()

    async def main():
        tasks = [asyncio.create_task(llm.next_token_logprobs([i])) for i in range(4)]
        await asyncio.to_thread(engine.wait_until_entered)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        engine.release()
        for i in (0, 2, 3):
            torch.testing.assert_close(await tasks[i], oracle_row([i], None, 16))

    run_strictly(main())
    llm._scheduler.run(lambda _: None)  # the abort comes before it, after the answers
    assert len(engine.aborted) == 1
    assert llm.statistics().pending == 0


def test_a_request_cancelled_when_its_answer_is_on_the_way_is_no_invalid_state(start):
    llm, engine = start()
    engine.hold()

    async def main():
        tasks = [asyncio.create_task(llm.next_token_logprobs([i])) for i in range(2)]
        await asyncio.to_thread(engine.wait_until_entered)
        engine.release()
        # A call waits behind the step: afterwards the answers are in the loop's queue.
        llm._scheduler.run(lambda _: None)
        tasks[0].cancel()
        torch.testing.assert_close(await tasks[1], oracle_row([1], None, 16))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]

    run_strictly(main())


def test_the_error_of_an_abandoned_request_is_not_logged(start):
    llm, engine = start()
    scheduler = llm._scheduler
    engine.hold()

    async def main():
        request = scheduler.submit([(Query(0, (1,)), None, None)])
        await asyncio.to_thread(engine.wait_until_entered)
        llm.cancel_all()
        await asyncio.sleep(0)
        assert request.future.done()
        scheduler.abandon(request)
        del request
        gc.collect()

    run_strictly(main())


def test_a_timed_out_caller_disturbs_nobody(start):
    llm, engine = start()
    engine.hold()

    async def main():
        patient = asyncio.create_task(llm.next_token_logprobs([2]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.next_token_logprobs([1]), timeout=0.01)
        engine.release()
        torch.testing.assert_close(await patient, oracle_row([2], None, 16))
        torch.testing.assert_close(
            await llm.next_token_logprobs([1]), oracle_row([1], None, 16)
        )

    run_strictly(main())


def test_cancelling_a_batch_call_abandons_all_its_sequences(start):
    llm, engine = start()
    engine.hold()

    async def main():
        batch = asyncio.create_task(llm.batch_next_token_logprobs([[i] for i in range(5)]))
        await asyncio.to_thread(engine.wait_until_entered)
        batch.cancel()
        await asyncio.wait([batch])
        assert batch.cancelled()
        assert llm.statistics().pending == 0
        engine.release()

    run_strictly(main())
    assert llm.statistics().abandoned == 5


def test_many_callers_cancelled_at_random_leave_the_rest_right(start):
    llm, _ = start()

    async def main():
        tasks = [
            asyncio.create_task(llm.next_token_logprobs([i % 16, i // 16])) for i in range(200)
        ]
        for turn in range(6):
            for task in tasks[turn::7]:
                task.cancel()
            await asyncio.sleep(0)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for i, answer in enumerate(answers):
            if not isinstance(answer, asyncio.CancelledError):
                torch.testing.assert_close(answer, oracle_row([i % 16, i // 16], None, 16))
        assert any(isinstance(answer, torch.Tensor) for answer in answers)
        assert any(isinstance(answer, asyncio.CancelledError) for answer in answers)

    run_strictly(main())
    assert llm.statistics().pending == 0


def test_ctrl_c_drops_the_request_and_the_model_works_on(start, request):
    llm, engine = start()
    engine.hold()
    noticed = threading.Event()

    def interrupt(*_):
        if not noticed.is_set():
            noticed.set()
            raise KeyboardInterrupt

    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, interrupt)

    def press():
        engine.wait_until_entered()
        while not noticed.is_set():  # Python overlooks one that comes just before it waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            noticed.wait(0.05)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        llm.next_token_logprobs_sync([1])
    pressing.join()
    assert llm.statistics().abandoned == 1
    assert llm.statistics().pending == 0
    engine.release()
    torch.testing.assert_close(llm.next_token_logprobs_sync([2]), oracle_row([2], None, 16))


def test_a_thread_that_leaves_while_results_are_delivered_disturbs_nobody():
    delivery = Delivery()
    requests = [Request(concurrent.futures.Future(), 1) for _ in range(3)]
    for request in requests:
        assert delivery.add(request)
    leaving, *others = requests
    leaving.future.cancel()
    delivery.send()
    for request in others:
        assert request.future.result(TIMEOUT_S) is request.values


class Unfinished:
    """Never answers; while query 0 is aborted, something happens."""

    def __init__(self):
        self.calls = []
        self.during_abort = lambda: None

    def submit(self, query):
        self.calls.append(("submit", query.query_id))

    def step(self):
        return []

    def abort(self, query_id):
        if query_id == 0:
            self.during_abort()
        self.calls.append(("abort", query_id))

    def close(self): ...


def test_a_call_that_waits_for_queries_waits_until_the_engine_was_told_to_abort_them(caplog):
    engine = Unfinished()
    scheduler = Scheduler(lambda: engine)
    worker = scheduler._worker
    removed = threading.Event()
    requests = [Request(concurrent.futures.Future(), 1) for _ in range(4)]
    for i, request in enumerate(requests[:3]):
        worker.enqueue(request, [(Query(i, (i,)), None, None)])

    def remove(_):
        engine.calls.append("remove")
        removed.set()

    def leave_the_other():  # when the aborts of this round are known already
        worker.leave(requests[1])
        scheduler.run_after(lambda query: query.query_id == 1, remove)

    engine.during_abort = leave_the_other
    worker.flush()
    scheduler.run(lambda _: None)  # all are submitted after it
    scheduler.run(lambda _: None)
    worker.leave(requests[0])
    assert removed.wait(TIMEOUT_S)
    calls = engine.calls.copy()
    scheduler.run_after(lambda query: query.query_id == 2, remove)  # not before the close
    worker.enqueue(requests[3], [(Query(3, (3,)), None, None)])  # does not wait for the call
    worker.flush()
    for _ in range(2):
        scheduler.run(lambda _: None)
    assert ("submit", 3) in engine.calls
    scheduler.close()
    assert calls == [
        *(("submit", 0), ("submit", 1), ("submit", 2)),
        *(("abort", 0), ("abort", 1), "remove"),
    ]
    assert engine.calls.count("remove") == 1
    assert caplog.records == []
