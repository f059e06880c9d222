"""Checks that a model's statistics are consistent."""

from __future__ import annotations

import asyncio

from genlm import AsyncLM, EmptySequenceError, Statistics
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.strategies import TokenTuple

DISTINCT, DUPLICATES, REPEATED = 6, 3, 4


@engine_check(cases=("joined", "cache hit", "failed", "abandoned"))
def statistics_add_up(fixture: EngineFixture) -> None:
    """Each request is counted once: answered, joined, a cache hit, failed or abandoned."""
    lm, probe = fixture.load_probed()
    asked = fixture.some_sequences(DISTINCT + 2)
    poisoned, left, distinct = asked[0], asked[1], asked[2:]
    probe.refuse = lambda query: query.token_ids == poisoned

    async def traffic() -> None:
        requests = [*distinct, *distinct[:DUPLICATES]]
        await asyncio.gather(*map(lm.next_token_logprobs, requests))
        await asyncio.gather(*map(lm.next_token_logprobs, distinct[:REPEATED]))
        await lm.batch_next_token_logprobs(distinct[:REPEATED])
        await asyncio.gather(lm.next_token_logprobs(poisoned), return_exceptions=True)
        await _request_and_cancel(lm, left)

    fixture.run(traffic())
    fixture.expect_error(EmptySequenceError, lambda: lm.next_token_logprobs([]))
    found = lm.statistics()
    again = [*distinct[:DUPLICATES], *2 * distinct[:REPEATED]]
    lengths = sum(map(len, [*asked, *again]))
    cached = 4 * (DISTINCT * lm.vocab_size + sum(map(len, distinct)))  # rows and their ids
    _check_counts(found, lengths, cached)
    for case, count in {
        "joined": found.joined,
        "cache hit": found.cache_hits,
        "failed": found.failed,
        "abandoned": found.abandoned,
    }.items():
        fixture.saw(case, count)


async def _request_and_cancel(lm: AsyncLM, token_ids: TokenTuple) -> None:
    task = asyncio.ensure_future(lm.next_token_logprobs(token_ids))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _check_counts(found: Statistics, lengths: int, cached: int) -> None:
    expected = {
        "requests": DISTINCT + DUPLICATES + 2 * REPEATED + 2,
        "tokens_asked": lengths,
        "joined": DUPLICATES,
        "cache_hits": 2 * REPEATED,
        "answered": DISTINCT,
        "failed": 1,
        "abandoned": 1,
        "pending": 0,
        "waiting": 0,
        "cache_entries": DISTINCT,
        "cache_bytes": cached,
        "batches": sum(found.batch_sizes.values()),
    }
    for name, value in expected.items():
        count = getattr(found, name)
        expect(count == value, f"{name} = {value}", count, statistics=found)
    in_batches = sum(size * count for size, count in found.batch_sizes.items())
    expect(in_batches == DISTINCT, f"{DISTINCT} rows in all batches", in_batches)
    expect(found.queue_seconds >= 0, "queue_seconds of at least 0", found.queue_seconds)
