"""Law: identical requests in flight share one evaluation."""

from __future__ import annotations

import asyncio

import pytest
import torch
from scripted import oracle_row

from genlm import UnknownAdapterError


def test_identical_requests_of_one_turn_are_evaluated_once(start):
    llm, engine = start()

    async def main():
        await asyncio.gather(*(llm.next_token_logprobs([1, 2]) for _ in range(50)))

    asyncio.run(main())
    assert engine.batches == [[(1, 2)]]
    assert llm.statistics().joined == 49
    assert llm.statistics().answered == 1


def test_a_request_joins_one_that_the_engine_works_on(start):
    llm, engine = start()
    engine.hold()

    async def main():
        first = asyncio.create_task(llm.next_token_logprobs([1, 2]))
        await asyncio.to_thread(engine.wait_until_entered)
        second = asyncio.create_task(llm.next_token_logprobs([1, 2]))
        await asyncio.sleep(0)
        engine.release()
        return await asyncio.gather(first, second)

    for row in asyncio.run(main()):
        torch.testing.assert_close(row, oracle_row([1, 2], None, 16))
    assert engine.batches == [[(1, 2)]]


def test_requests_for_different_adapters_do_not_join(start):
    llm, engine = start()
    llm.load_lora("folder", "a")

    async def main():
        return await asyncio.gather(
            llm.next_token_logprobs([1]), llm.next_token_logprobs([1], lora_name="a")
        )

    base, adapted = asyncio.run(main())
    torch.testing.assert_close(base, oracle_row([1], None, 16))
    torch.testing.assert_close(adapted, oracle_row([1], "a", 16))
    assert engine.batches == [[(1,), (1,)]]
    with pytest.raises(UnknownAdapterError):
        llm.next_token_logprobs_sync([1], lora_name="b")


def test_a_request_does_not_join_one_whose_callers_have_all_left(start):
    llm, engine = start()
    engine.hold()

    async def main():
        abandoned = asyncio.create_task(llm.next_token_logprobs([3]))
        await asyncio.to_thread(engine.wait_until_entered)
        abandoned.cancel()
        await asyncio.wait([abandoned])
        again = asyncio.create_task(llm.next_token_logprobs([3]))
        await asyncio.sleep(0)
        engine.release()
        return await again

    torch.testing.assert_close(asyncio.run(main()), oracle_row([3], None, 16))
    assert engine.batches == [[(3,)], [(3,)]]


def test_a_joined_request_survives_when_the_first_asker_leaves(start):
    llm, engine = start()
    engine.hold()

    async def main():
        first = asyncio.create_task(llm.next_token_logprobs([3]))
        second = asyncio.create_task(llm.next_token_logprobs([3]))
        await asyncio.to_thread(engine.wait_until_entered)
        first.cancel()
        await asyncio.wait([first])
        engine.release()
        return await second

    torch.testing.assert_close(asyncio.run(main()), oracle_row([3], None, 16))
    assert engine.batches == [[(3,)]]
    assert engine.aborted == []
