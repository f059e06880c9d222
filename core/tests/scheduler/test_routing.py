"""Law: a row never reaches another sequence's caller, and nobody's row is another's memory."""

from __future__ import annotations

import asyncio
import random
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, oracle_row

from genlm import AsyncLM, OutputCache

sequences = st.lists(st.integers(0, 15), min_size=1, max_size=4)


def neighbours(ids: list[int]) -> list[list[int]]:
    """The near misses of a sequence: what a wrong key would confuse with it."""
    return [ids, ids[::-1], ids[1:] + ids[:1], [*ids, 0], ids[1:] or ids, sorted(ids)]


@settings(max_examples=30)
@given(
    requests=st.lists(
        st.tuples(sequences, st.sampled_from([None, "a", "b"])), min_size=1, max_size=8
    ),
    cache_entries=st.sampled_from([0, 1, 3, 100]),
    max_batch_size=st.sampled_from([None, 1, 2, 5]),
    seed=st.integers(0, 2**16),
)
def test_every_caller_gets_the_row_of_its_own_sequence(
    requests, cache_entries, max_batch_size, seed
):
    with AsyncLM(
        ScriptedEngine, output_cache=OutputCache(cache_entries), max_batch_size=max_batch_size
    ) as llm:
        llm.load_lora("somewhere", "a")
        llm.load_lora("elsewhere", "b")
        order = random.Random(seed)

        async def ask(ids, adapter):
            for _ in range(order.randrange(4)):
                await asyncio.sleep(0)
            row = await llm.next_token_logprobs(ids, lora_name=adapter)
            torch.testing.assert_close(row, oracle_row(ids, adapter, 16))

        async def main():
            calls = [(near, adapter) for ids, adapter in requests for near in neighbours(ids)]
            order.shuffle(calls)
            await asyncio.gather(*(ask(*call) for call in calls))

        asyncio.run(main())


def test_callers_that_join_share_no_memory(start):
    llm, engine = start(output_cache=OutputCache(8))

    async def main():
        rows = await asyncio.gather(*(llm.next_token_logprobs([1, 2]) for _ in range(3)))
        rows += [await llm.next_token_logprobs([1, 2])]
        for row in rows:
            torch.testing.assert_close(row, oracle_row([1, 2], None, 16))
            row.fill_(7.0)

    asyncio.run(main())
    assert engine.batches == [[(1, 2)]]


def test_a_row_does_not_keep_its_batch_alive(start):
    llm, _ = start()

    async def main():
        return await asyncio.gather(*(llm.next_token_logprobs([i]) for i in range(10)))

    for row in asyncio.run(main()):
        assert row.untyped_storage().nbytes() == row.nbytes


def test_a_row_lives_no_longer_than_its_caller_wants_while_the_engine_waits(start):
    llm, _ = start()

    async def main():
        rows = await asyncio.gather(*(llm.next_token_logprobs([i]) for i in range(3)))
        return [weakref.ref(row) for row in rows]

    rows = asyncio.run(main())
    llm._scheduler.run(lambda _: None)  # the step that computed them is over
    assert [row() for row in rows] == [None] * 3
