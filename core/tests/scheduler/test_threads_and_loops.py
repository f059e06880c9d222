"""Laws: several threads and event loops at once; sync calls in and out of running loops."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm import EvaluationError, OutputCache, Scheduler
from genlm.core.scheduler.worker import Worker


def check(row, ids) -> None:
    torch.testing.assert_close(row, oracle_row(ids, None, 16))


def test_threads_with_and_without_event_loops_ask_at_once(start):
    llm, _ = start(output_cache=OutputCache(20))
    begin = threading.Barrier(8)

    def with_loop(thread: int) -> None:
        async def main():
            for turn in range(20):
                contexts = [[thread, turn % 16, i] for i in range(5)] + [[turn % 16]]
                rows = await asyncio.gather(*map(llm.next_token_logprobs, contexts))
                for row, ids in zip(rows, contexts, strict=True):
                    check(row, ids)

        begin.wait()
        asyncio.run(main())

    def without_loop(thread: int) -> None:
        begin.wait()
        for turn in range(60):
            ids = [thread if turn % 2 else 3, turn % 16]
            check(llm.next_token_logprobs_sync(ids), ids)

    with ThreadPoolExecutor(8) as pool:
        tasks = [pool.submit(with_loop if i % 2 else without_loop, i) for i in range(8)]
        for task in tasks:
            task.result(TIMEOUT_S)
    statistics = llm.statistics()
    assert statistics.requests == 4 * 20 * 6 + 4 * 60
    assert (
        statistics.requests == statistics.cache_hits + statistics.joined + statistics.answered
    )


def test_a_sync_call_works_inside_a_running_loop(start):
    llm, _ = start()

    async def main():
        check(llm.next_token_logprobs_sync([1, 2]), [1, 2])

    asyncio.run(main())


def test_a_sync_call_joins_a_request_of_the_loop_that_it_blocks(start):
    llm, engine = start()

    async def main():
        pending = asyncio.create_task(llm.next_token_logprobs([1]))
        other = asyncio.create_task(llm.next_token_logprobs([2]))
        await asyncio.sleep(0)  # both wait for the end of a turn that the sync call prevents
        check(llm.next_token_logprobs_sync([1]), [1])
        check(await pending, [1])
        check(await other, [2])

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert [len(batch) for batch in engine.batches] == [2]


def test_a_request_joins_one_from_another_thread(start):
    llm, engine = start()
    engine.hold()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(llm.next_token_logprobs_sync, [7])
        engine.wait_until_entered()
        second = pool.submit(asyncio.run, llm.next_token_logprobs([7]))
        while llm.statistics().joined < 1:
            pass
        engine.release()
        check(first.result(TIMEOUT_S), [7])
        check(second.result(TIMEOUT_S), [7])
    assert engine.batches == [[(7,)]]


def test_one_model_serves_one_event_loop_after_another(start):
    llm, _ = start()
    for i in range(5):
        check(asyncio.run(llm.next_token_logprobs([i])), [i])


def test_answers_for_an_event_loop_that_was_closed_hurt_nobody(start):
    llm, engine = start()
    engine.hold()
    loop = asyncio.new_event_loop()
    orphan = loop.create_task(llm.next_token_logprobs([1]))
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.to_thread(engine.wait_until_entered))
    with ThreadPoolExecutor(1) as pool:
        alive = pool.submit(llm.next_token_logprobs_sync, [2])
        while llm.statistics().pending < 2:
            pass
        orphan._log_destroy_pending = False
        loop.close()
        engine.release()
        check(alive.result(TIMEOUT_S), [2])
    check(llm.next_token_logprobs_sync([1]), [1])


def test_waiting_on_the_engines_own_thread_is_refused_instead_of_hanging(start):
    llm, engine = start()
    errors = []

    def ask_again():
        try:
            llm.next_token_logprobs_sync([2])
        except RuntimeError as error:
            errors.append(error)

    engine.during_evaluate = ask_again
    check(llm.next_token_logprobs_sync([1]), [1])
    assert len(errors) == 1
    assert "engine's own thread" in str(errors[0])


def test_the_engine_is_built_stepped_and_closed_on_one_thread():
    from scripted import ScriptedEngine

    from genlm import AsyncLM

    thread_ids = set()

    class Watched(ScriptedEngine):
        def __init__(self):
            thread_ids.add(threading.get_ident())
            super().__init__()

        def submit(self, query):
            thread_ids.add(threading.get_ident())
            super().submit(query)

        def evaluate(self, queries):
            thread_ids.add(threading.get_ident())
            return super().evaluate(queries)

        def add_adapter(self, name, path):
            thread_ids.add(threading.get_ident())

        def close(self):
            thread_ids.add(threading.get_ident())

    with AsyncLM(Watched) as llm:
        llm.load_lora("folder", "a")
        llm.next_token_logprobs_sync([1])
    assert len(thread_ids) == 1
    assert threading.get_ident() not in thread_ids


@pytest.mark.parametrize("error", [ValueError("no such model"), SystemExit(3)])
def test_what_building_the_engine_raises_reaches_the_caller_and_no_thread_stays(error):
    from genlm import AsyncLM

    def build():
        raise error

    with pytest.raises(type(error)) as caught:
        AsyncLM(build, name="unbuildable")
    assert caught.value is error
    for thread in threading.enumerate():
        if thread.name == "genlm-unbuildable":
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def test_a_sync_call_that_fails_while_others_are_answered_leaves_the_engine_alive(start):
    """Its cancelled futures race with the answers on the engine's thread."""
    llm, _ = start(ScriptedEngine(poison=[15]), max_batch_size=1)

    def fail(_):
        with pytest.raises(EvaluationError):
            llm.batch_next_token_logprobs_sync([[15], *([i, i] for i in range(8))])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fail, range(40)))
    check(llm.next_token_logprobs_sync([1]), [1])


def test_the_thread_of_an_idle_engine_waits(start, monkeypatch):
    work, rounds = Worker._work, []

    def counted(worker, engine):
        rounds.append(engine)
        work(worker, engine)

    monkeypatch.setattr(Worker, "_work", counted)
    llm, _ = start()
    for _ in range(50):
        llm._scheduler.run(lambda _: None)
    assert len(rounds) < 100  # many more if the thread did not wait


def test_an_idle_engine_releases_an_item_once_and_the_error_is_logged(caplog):
    released, has_released = [], threading.Event()

    def release(_engine, items):
        released.append(items)
        has_released.set()
        raise OSError("not released")

    scheduler = Scheduler(ScriptedEngine, release=release)
    scheduler.release("item")
    assert has_released.wait(TIMEOUT_S)
    for _ in range(2):
        scheduler.run(lambda _: None)
    scheduler.close()
    assert released == [["item"]]
    assert "OSError: not released" in caplog.text
