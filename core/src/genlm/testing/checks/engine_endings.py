"""Checks that requests end when they are cancelled or the model is closed, and others go on."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import torch

from genlm import AsyncLM, EngineClosedError
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.fixture import on_thread
from genlm.testing.probes import EngineProbe, StepGate
from genlm.testing.target import TokenTuple

SCENES = (([0, 1, 2], [1]), ([0, 0], [0]), ([0, 0], [1]), ([0, 0, 1], [0, 1]))
"""Requested sequences by number, and the callers that leave: one, one of two, both of two."""


@engine_check()
def cancelled_requests_change_no_other(fixture: EngineFixture) -> None:
    """A cancelled request ends at once and changes no row of another or a later request."""
    for salt, ((numbers, leaving), skipped) in enumerate(itertools.product(SCENES, (0, 1))):
        lm, probe = fixture.load_probed()
        sequences = fixture.some_sequences(3, salt=salt)
        requested = [sequences[number] for number in numbers]
        probe.skipped = skipped
        fixture.run(_check_cancelled(fixture, lm, probe, requested, leaving))
        _check_after(fixture, lm, sequences)


async def _check_cancelled(
    fixture: EngineFixture,
    lm: AsyncLM,
    probe: EngineProbe,
    sequences: list[TokenTuple],
    leaving: list[int],
) -> None:
    """Cancel callers while the engine steps, and repeat a request before the step ends."""
    async with probe.held(*map(lm.next_token_logprobs, sequences)) as tasks:
        for index in leaving:
            tasks[index].cancel()
            error = (await asyncio.gather(tasks[index], return_exceptions=True))[0]
            expect(isinstance(error, asyncio.CancelledError), "CancelledError", repr(error))
        again = asyncio.ensure_future(lm.next_token_logprobs(sequences[leaving[0]]))
        await asyncio.sleep(0)
    remaining = [index for index in range(len(sequences)) if index not in leaving]
    rows = await asyncio.gather(*(tasks[index] for index in remaining), again)
    fixture.check_rows(
        rows, [sequences[index] for index in (*remaining, leaving[0])], sequences=sequences
    )


def _check_after(fixture: EngineFixture, lm: AsyncLM, sequences: list[TokenTuple]) -> None:
    lm.clear_output_cache()  # so that the engine evaluates the cancelled request too
    fixture.check_batch(lm, sequences, how="again")
    statistics = lm.statistics()
    description = f"{statistics.pending} pending, {statistics.waiting} waiting"
    expect(
        statistics.pending == statistics.waiting == 0,
        "nothing pending when all is answered",
        description,
    )


@engine_check()
def a_cancelled_continuation_changes_no_other(fixture: EngineFixture) -> None:
    """Cancelling one of several continuations does not change the others."""
    prompts = [token_ids[:2] for token_ids in fixture.some_sequences(3)]
    length = max(1, min(6, fixture.max_length - 2))
    lm, probe = fixture.load_probed()

    async def sample(which: int) -> list[int]:
        return await lm.sample(prompts[which], length, stop=(), seed=fixture.seed + which)

    async def sample_and_cancel() -> list[list[int]]:
        async with probe.held(*map(sample, range(3))) as tasks:
            tasks[1].cancel()
            await asyncio.gather(tasks[1], return_exceptions=True)
        return list(await asyncio.gather(tasks[0], tasks[2]))

    uncancelled = [fixture.run(sample(0)), fixture.run(sample(2))]
    lm.clear_output_cache()
    continuations = fixture.run(sample_and_cancel())
    expect(continuations == uncancelled, f"{uncancelled}, as without the third", continuations)


@engine_check()
def closing_ends_every_request(fixture: EngineFixture) -> None:
    """`close` fails pending requests with `EngineClosedError`, even during a step."""
    lm, probe = fixture.load_probed()
    sequences = fixture.some_sequences(2)

    async def close_during_a_step() -> list[Any]:
        async with probe.held(lm.next_token_logprobs(sequences[0])) as (first,):
            # The second request is not in the engine.
            second = asyncio.ensure_future(lm.next_token_logprobs(sequences[1]))
            await asyncio.sleep(0)
            closing = on_thread(lm.close)
            results = await asyncio.gather(first, second, return_exceptions=True)
        await closing
        return list(results)

    for error in fixture.run(close_during_a_step()):
        fixture.expect_raised(EngineClosedError, error)
    expect(probe.closed == 1, "the engine to be closed once", probe.closed)


@engine_check(member="wake")
def waking_does_not_wait_for_the_engine(fixture: EngineFixture) -> None:
    """`wake` returns at once, also while the engine computes a query."""
    lm, probe = fixture.load_probed()
    [token_ids] = fixture.some_sequences(1)
    gate = probe.query_gate = StepGate(fixture.timeout_s)

    async def wake_during_a_request() -> torch.Tensor:
        gate.hold()
        try:
            row = asyncio.ensure_future(lm.next_token_logprobs(token_ids))
            await on_thread(gate.wait_until_entered)
            await on_thread(probe.wake)
        finally:
            gate.release()
        return await row

    fixture.check_rows([fixture.run(wake_during_a_request())], [token_ids])
