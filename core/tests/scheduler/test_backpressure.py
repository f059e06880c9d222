"""Law: at most `max_pending` queries are accepted; the rest waits its turn, in order."""

from __future__ import annotations

import asyncio

import torch
from scripted import oracle_row


def test_requests_beyond_max_pending_wait_outside_and_are_served_in_order(start):
    llm, engine = start(max_pending=4)
    engine.hold()

    async def main():
        tasks = [asyncio.create_task(llm.next_token_logprobs([i])) for i in range(10)]
        await asyncio.to_thread(engine.wait_until_entered)
        statistics = llm.statistics()
        assert (statistics.pending, statistics.waiting) == (4, 6)
        engine.release()
        for i, row in enumerate(await asyncio.gather(*tasks)):
            torch.testing.assert_close(row, oracle_row([i], None, 16))

    asyncio.run(main())
    assert [ids for batch in engine.batches for ids in batch] == [(i,) for i in range(10)]
    assert max(map(len, engine.batches)) <= 4
    assert llm.statistics().waiting == 0


def test_a_caller_that_leaves_while_held_back_gives_its_place_to_the_next(start):
    llm, engine = start(max_pending=1)
    engine.hold()

    async def main():
        tasks = [asyncio.create_task(llm.next_token_logprobs([i])) for i in range(4)]
        await asyncio.to_thread(engine.wait_until_entered)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert llm.statistics().waiting == 2
        engine.release()
        await asyncio.gather(tasks[0], *tasks[2:])

    asyncio.run(main())
    assert engine.batches == [[(0,)], [(2,)], [(3,)]]


def test_a_caller_that_leaves_the_inbox_lets_the_next_one_in(start):
    llm, engine = start(max_pending=3)
    engine.hold()

    async def main():
        first = asyncio.create_task(llm.next_token_logprobs([9]))
        await asyncio.to_thread(engine.wait_until_entered)
        tasks = [asyncio.create_task(llm.next_token_logprobs([i])) for i in range(4)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        statistics = llm.statistics()
        assert (statistics.pending, statistics.waiting) == (3, 1)
        engine.release()
        await asyncio.gather(first, *tasks[1:])

    asyncio.run(main())
    assert [ids for batch in engine.batches for ids in batch] == [(9,), (1,), (2,), (3,)]


def test_requests_join_one_that_is_held_back(start):
    llm, engine = start(max_pending=1)
    engine.hold()

    async def main():
        first = asyncio.create_task(llm.next_token_logprobs([0]))
        await asyncio.to_thread(engine.wait_until_entered)
        same = [asyncio.create_task(llm.next_token_logprobs([1])) for _ in range(3)]
        await asyncio.sleep(0)
        assert llm.statistics().waiting == 1
        engine.release()
        await asyncio.gather(first, *same)

    asyncio.run(main())
    assert engine.batches == [[(0,)], [(1,)]]


def test_a_batch_call_larger_than_max_pending_is_served(start):
    llm, _ = start(max_pending=3)
    contexts = [[i] for i in range(16)]
    expected = torch.stack([oracle_row(ids, None, 16) for ids in contexts])
    torch.testing.assert_close(llm.batch_next_token_logprobs_sync(contexts), expected)
    torch.testing.assert_close(asyncio.run(llm.batch_next_token_logprobs(contexts)), expected)
