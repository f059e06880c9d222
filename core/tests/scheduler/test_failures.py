"""Laws: one bad request fails alone, also when the engine raises; a dead engine says why."""

from __future__ import annotations

import asyncio
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm import (
    Completion,
    EngineDiedError,
    EvaluationError,
    GenlmError,
    OutputCache,
    Query,
    QueryError,
    Scheduler,
    TokenIdError,
)
from genlm.core.base.blocking import run_blocking
from genlm.core.scheduler import results


async def ask_all(llm, contexts):
    return await asyncio.gather(
        *(llm.next_token_logprobs(ids) for ids in contexts), return_exceptions=True
    )


def test_a_request_that_makes_evaluate_raise_fails_alone(start):
    llm, _ = start(ScriptedEngine(poison=[13]))
    answers = asyncio.run(ask_all(llm, [[i] for i in range(16)]))
    for i, answer in enumerate(answers):
        if i == 13:
            assert isinstance(answer, EvaluationError)
            assert "ArithmeticError: poisoned sequence (13,)" in str(answer)
            assert isinstance(answer.__cause__, ArithmeticError)
        else:
            torch.testing.assert_close(answer, oracle_row([i], None, 16))
    assert llm.statistics().failed == 1
    assert llm.statistics().answered == 15


def test_an_error_that_cannot_be_raised_fails_its_request_alone(start):
    class Wordy(ScriptedEngine):
        def submit(self, query):
            super().submit(query)
            if tuple(query.token_ids) == (4,):
                self.refused = query.query_id

        def step(self):
            error = Completion(self.refused, error="out of memory")
            return [
                error if completion.query_id == self.refused else completion
                for completion in super().step()
            ]

    llm, _ = start(Wordy())
    answers = asyncio.run(ask_all(llm, [[4], [5]]))
    assert isinstance(answers[0], EvaluationError)
    assert "'out of memory' as an error" in str(answers[0])
    torch.testing.assert_close(answers[1], oracle_row([5], None, 16))


def test_an_engine_that_cannot_be_woken_ends_all_requests_with_it(start, caplog):
    class Gone(ScriptedEngine):
        gone = False

        def wake(self):
            if self.gone:
                raise ConnectionError("the cluster is gone")

        def step(self):
            self.gone = True
            raise SystemExit

    llm, engine = start(Gone())
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(llm.next_token_logprobs_sync, [1])
        with pytest.raises(EngineDiedError, match="SystemExit"):
            request.result(TIMEOUT_S)
    llm.close()
    assert engine.closed
    assert "waking the engine raised" in caplog.text


def test_a_request_refused_by_submit_fails_alone(start):
    class Picky(ScriptedEngine):
        def submit(self, query):
            if 5 in query.token_ids:
                raise TokenIdError(5, 0, 16)
            super().submit(query)

    llm, _ = start(Picky())
    answers = asyncio.run(ask_all(llm, [[4], [5], [6]]))
    assert isinstance(answers[1], TokenIdError)
    assert answers[1].token_id == 5
    torch.testing.assert_close(answers[0], oracle_row([4], None, 16))
    torch.testing.assert_close(answers[2], oracle_row([6], None, 16))
    assert llm.statistics().batch_sizes == {2: 1}


def test_callers_that_share_a_failed_evaluation_get_exceptions_of_their_own(start):
    llm, _ = start(ScriptedEngine(poison=[1]))
    first, second = asyncio.run(ask_all(llm, [[1], [1]]))
    assert isinstance(first, EvaluationError)
    assert isinstance(second, EvaluationError)
    assert first is not second


def test_the_tensors_of_a_step_that_raises_are_freed_without_a_garbage_collection(start):
    class Raising(ScriptedEngine):
        def step(self):
            memory = torch.zeros(4)
            self.memory = weakref.ref(memory)
            raise MemoryError

    llm, engine = start(Raising())
    with pytest.raises(EvaluationError, match="MemoryError"):
        asyncio.run(llm.next_token_logprobs([1]))
    assert engine.memory() is None


def test_a_step_that_raises_fails_what_is_in_the_engine_and_the_engine_stays_usable(start):
    class Stumbling(ScriptedEngine):
        stumbles = True

        def step(self):
            if self.stumbles:
                self.stumbles = False
                raise OSError("the device went away")
            return super().step()

    llm, engine = start(Stumbling())
    answers = asyncio.run(ask_all(llm, [[1], [2]]))
    for answer in answers:
        assert isinstance(answer, EvaluationError)
        assert "OSError: the device went away" in str(answer)
    torch.testing.assert_close(llm.next_token_logprobs_sync([1]), oracle_row([1], None, 16))
    assert len(engine.aborted) == 2


def test_a_completion_without_result_or_error_is_an_error(start):
    class Empty(ScriptedEngine):
        def step(self):
            return [Completion(completion.query_id) for completion in super().step()]

    llm, _ = start(Empty())
    with pytest.raises(EvaluationError, match="neither a result nor an error"):
        llm.next_token_logprobs_sync([1])


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, "NoneType"),
        ([torch.zeros(16)], "list of Tensor"),
        ({0: torch.zeros(16)}, "dict of int"),
        (Completion(0), "Completion of NoneType, bool, int"),
    ],
)
def test_a_step_that_returns_other_objects_fails_its_requests(start, returned, found):
    class Wrong(ScriptedEngine):
        def step(self):
            return returned

    llm, _ = start(Wrong())
    message = f"the engine's step returned {found}; expected a list of genlm.Completion objects"
    with pytest.raises(EvaluationError, match=message):
        llm.next_token_logprobs_sync([1])
    with pytest.raises(EvaluationError, match=message):  # the core divides the group
        llm.population([1], 3).draw_sync(seed=0)


def test_completions_of_unknown_queries_are_ignored(start):
    class Noisy(ScriptedEngine):
        def step(self):
            yield Completion(10**9, torch.zeros(16))
            for completion in super().step():
                yield completion
                yield Completion(completion.query_id, torch.zeros(16))

    llm, _ = start(Noisy())
    torch.testing.assert_close(llm.next_token_logprobs_sync([1]), oracle_row([1], None, 16))


class Unspeakable(SystemExit):
    def __str__(self):
        raise OSError("cannot say")


@pytest.mark.parametrize("fatal", [SystemExit("stop"), KeyboardInterrupt(), Unspeakable()])
def test_an_engine_thread_that_dies_fails_all_waiters_and_says_why(start, fatal, caplog):
    class Dying(ScriptedEngine):
        def step(self):
            if len(self.batches) == 1:
                raise fatal
            return super().step()

    llm, engine = start(Dying(), max_batch_size=2)

    async def main():
        return await ask_all(llm, [[i] for i in range(6)])

    with caplog.at_level(logging.CRITICAL, "genlm"):
        answers = asyncio.run(main())
    assert sum(isinstance(answer, torch.Tensor) for answer in answers) == 2
    dead = [answer for answer in answers if not isinstance(answer, torch.Tensor)]
    for answer in dead:
        assert isinstance(answer, EngineDiedError)
        assert type(fatal).__name__ in str(answer)
        assert answer.__cause__ is fatal
    with pytest.raises(EngineDiedError, match=type(fatal).__name__):
        llm.next_token_logprobs_sync([1])
    llm._scheduler._worker.join(30)
    assert engine.closed


def test_a_result_that_cannot_be_stored_fails_its_own_request_only():
    class Unstorable(Exception):
        pass

    class Full(OutputCache):
        def put(self, key, row):
            if key == 2:
                raise Unstorable("no room")

    scheduler = Scheduler(ScriptedEngine, cache=Full(8))

    async def main():
        submissions = [(Query(i, (i,)), i, None) for i in range(4)]
        return await scheduler.results(scheduler.submit(submissions))

    answers = asyncio.run(main())
    scheduler.close()
    assert isinstance(answers[2], EvaluationError)
    assert isinstance(answers[2].__cause__, Unstorable)
    assert sum(isinstance(answer, torch.Tensor) for answer in answers) == 3


@pytest.mark.parametrize("max_pending", [None, 1])
def test_an_id_that_is_in_use_is_refused_and_its_owner_is_answered(max_pending):
    engine = ScriptedEngine()
    scheduler = Scheduler(lambda: engine, max_pending=max_pending)
    engine.hold()

    async def main():
        in_engine = asyncio.create_task(scheduler.answer(Query(1, (1,))))
        await asyncio.to_thread(engine.wait_until_entered)
        waiting = asyncio.create_task(scheduler.answer(Query(2, (2,))))
        await asyncio.sleep(0)
        for query_id in (1, 2):
            with pytest.raises(ValueError, match=f"query id {query_id} belongs to an unfin"):
                await scheduler.answer(Query(query_id, (3,)))
            with pytest.raises(ValueError, match=f"query id {query_id} belongs to an unfin"):
                scheduler.submit([(Query(i, (4,)), None, None) for i in (0, query_id)])
        engine.release()
        rows = [
            *await asyncio.gather(in_engine, waiting),
            await scheduler.answer(Query(1, (3,))),
        ]
        for token_id, row in enumerate(rows, start=1):
            torch.testing.assert_close(row, oracle_row([token_id], None, 16))

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    scheduler.close()
    assert [(4,)] not in engine.batches  # of requests of which one query was refused


def test_invalid_requests_never_reach_the_engine(start):
    llm, engine = start(ScriptedEngine(max_context=3))
    answers = asyncio.run(ask_all(llm, [[], [16], [-1], [1, 2, 3, 4], ["a"], [1.5], [1]]))
    assert all(isinstance(answer, QueryError) for answer in answers[:-1])
    torch.testing.assert_close(answers[-1], oracle_row([1], None, 16))
    assert engine.batches == [[(1,)]]


def test_an_error_that_cannot_be_copied_still_reaches_every_waiter(start):
    class Uncopyable(GenlmError):
        def __init__(self, needed, *, also):
            super().__init__("only this")
            self.needed, self.also = needed, also

    class Refusing(ScriptedEngine):
        def submit(self, query):
            raise Uncopyable(1, also=2)

    llm, _ = start(Refusing())
    for error in asyncio.run(ask_all(llm, [[1], [1]])):
        assert isinstance(error, EvaluationError)
        assert "Uncopyable: only this" in str(error)
        assert isinstance(error.__cause__, Uncopyable)


def test_a_call_behind_one_that_kills_the_thread_is_answered(start):
    llm, engine = start()
    engine.hold()

    def kill(_):
        raise SystemExit("killed by a call")

    with ThreadPoolExecutor(3) as pool:
        pool.submit(llm.next_token_logprobs_sync, [1])
        engine.wait_until_entered()
        worker = llm._scheduler._worker
        calls = [worker.call(kill), worker.call(lambda _: None)]
        engine.release()
        with pytest.raises(SystemExit):
            calls[0].result(TIMEOUT_S)
        with pytest.raises(EngineDiedError, match="killed by a call"):
            calls[1].result(TIMEOUT_S)


class Stuck(ScriptedEngine):
    """An engine that cannot abort."""

    def abort(self, query_id):
        self.aborted.append(query_id)
        raise OSError("cannot abort")


def test_an_abort_that_raises_concerns_no_other_request(start, caplog):
    llm, engine = start(Stuck())
    engine.hold()

    async def main():
        requests = [asyncio.create_task(llm.next_token_logprobs([i])) for i in (1, 2, 3)]
        await asyncio.to_thread(engine.wait_until_entered)
        for request in requests[:2]:
            request.cancel()
        await asyncio.wait(requests[:2])
        call = llm._scheduler._worker.call(lambda _: "called")
        engine.release()
        assert await asyncio.to_thread(call.result, TIMEOUT_S) == "called"
        torch.testing.assert_close(await requests[2], oracle_row([3], None, 16))

    asyncio.run(main())
    assert len(engine.aborted) == 2
    assert caplog.text.count("OSError: cannot abort") == 2
    torch.testing.assert_close(llm.next_token_logprobs_sync([4]), oracle_row([4], None, 16))


def test_aborts_that_raise_after_a_step_that_raises_leave_the_engine_usable(start):
    class Broken(Stuck):
        is_broken = True

        def step(self):
            if self.is_broken:
                raise RuntimeError("the step failed")
            return super().step()

    llm, engine = start(Broken())
    for answer in asyncio.run(ask_all(llm, [[1], [2]])):
        assert isinstance(answer, EvaluationError)
        assert "the step failed" in str(answer)
    assert len(engine.aborted) == 2
    engine.is_broken = False
    torch.testing.assert_close(llm.next_token_logprobs_sync([4]), oracle_row([4], None, 16))


def test_results_that_cannot_be_checked_fail_their_step_and_the_engine_stays_usable(
    monkeypatch,
):
    def unreadable(rows, size):
        raise MemoryError("no room to check")

    class Unchecked(ScriptedEngine):
        def step(self):
            return [Completion(each.query_id, each.result) for each in super().step()]

    scheduler = Scheduler(Unchecked)
    with monkeypatch.context() as patch:
        patch.setattr(results, "invalid_rows", unreadable)
        with pytest.raises(EvaluationError, match="no room to check"):
            run_blocking(scheduler.answer(Query(0, (1,))))
    row = run_blocking(scheduler.answer(Query(1, (2,))))
    torch.testing.assert_close(row, oracle_row([2], None, 16))
    scheduler.close()


def test_a_row_of_nan_is_neither_handed_out_nor_remembered(start):
    class Overflowing(ScriptedEngine):
        overflows = True

        def evaluate(self, queries):
            rows = super().evaluate(queries)
            if self.overflows:
                rows[[q.token_ids == (5,) for q in queries]] = float("nan")
            return rows

    llm, engine = start(Overflowing(), output_cache=OutputCache(10))
    answers = asyncio.run(ask_all(llm, [[4], [5], [6]]))
    assert isinstance(answers[1], EvaluationError)
    assert "NaN at 16 of 16 ids" in str(answers[1])
    torch.testing.assert_close(answers[0], oracle_row([4], None, 16))
    torch.testing.assert_close(answers[2], oracle_row([6], None, 16))
    assert len(engine.batches) == 1  # and nothing was evaluated again
    engine.overflows = False
    row = llm.next_token_logprobs_sync([5])
    torch.testing.assert_close(row, oracle_row([5], None, 16))
