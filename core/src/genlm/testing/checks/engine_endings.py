"""Checks that requests end when they are cancelled or the model is closed, and others go on."""

from __future__ import annotations

import asyncio
from typing import Any

from genlm import AsyncLM, EngineClosedError
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.fixture import on_thread
from genlm.testing.probes import EngineProbe
from genlm.testing.strategies import TokenTuple

SCENES = (([0, 1, 2], [1]), ([0, 0], [0]), ([0, 0], [1]), ([0, 0, 1], [0, 1]))
"""Requested sequences by number, and the callers that leave: one, one of two, both of two."""


@engine_check()
def cancelled_requests_change_no_other(fixture: EngineFixture) -> None:
    """A cancelled caller ends at once; all others get their rows, then and later."""
    for salt, (numbers, leaving) in enumerate(SCENES):
        lm, probe = fixture.load_probed()
        some = fixture.some_sequences(3, salt=salt)
        asked = [some[number] for number in numbers]
        fixture.run(_cancelled(fixture, lm, probe, asked, leaving))
        _check_after(fixture, lm, some)


async def _cancelled(
    fixture: EngineFixture,
    lm: AsyncLM,
    probe: EngineProbe,
    asked: list[TokenTuple],
    leaving: list[int],
) -> None:
    """Cancel callers while the engine steps, and ask again before the step ends."""
    tasks = await probe.start_held(*map(lm.next_token_logprobs, asked))
    for place in leaving:
        tasks[place].cancel()
        ended = (await asyncio.gather(tasks[place], return_exceptions=True))[0]
        expect(isinstance(ended, asyncio.CancelledError), "CancelledError", repr(ended))
    again = asyncio.ensure_future(lm.next_token_logprobs(asked[leaving[0]]))
    await asyncio.sleep(0)
    probe.release()
    others = [place for place in range(len(asked)) if place not in leaving]
    rows = await asyncio.gather(*(tasks[place] for place in others), again)
    fixture.check_rows(rows, [asked[place] for place in (*others, leaving[0])], asked=asked)


def _check_after(fixture: EngineFixture, lm: AsyncLM, asked: list[TokenTuple]) -> None:
    lm.clear_output_cache()  # so that the engine evaluates the cancelled request too
    fixture.check_rows(fixture.run(lm.batch_next_token_logprobs(asked)), asked, asked="again")
    left = lm.statistics()
    found = f"{left.pending} pending, {left.waiting} waiting"
    expect(left.pending == left.waiting == 0, "nothing pending when all is answered", found)


@engine_check()
def a_cancelled_continuation_changes_no_other(fixture: EngineFixture) -> None:
    """Cancelling one of several continuations changes none of the others."""
    prompts = [token_ids[:2] for token_ids in fixture.some_sequences(3)]
    length = max(1, min(6, fixture.max_length - 2))
    lm, probe = fixture.load_probed()

    async def drawn(which: int) -> list[int]:
        return await lm.sample(prompts[which], length, stop=(), seed=fixture.seed + which)

    async def play() -> list[list[int]]:
        tasks = await probe.start_held(*map(drawn, range(3)))
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        probe.release()
        return list(await asyncio.gather(tasks[0], tasks[2]))

    uncancelled = [fixture.run(drawn(0)), fixture.run(drawn(2))]
    lm.clear_output_cache()
    found = fixture.run(play())
    expect(found == uncancelled, f"{uncancelled}, as without the third", found)


@engine_check()
def closing_ends_every_request(fixture: EngineFixture) -> None:
    """`close` ends unanswered requests with `EngineClosedError`, even during a step."""
    lm, probe = fixture.load_probed()
    asked = fixture.some_sequences(2)

    async def closed() -> list[Any]:
        (first,) = await probe.start_held(lm.next_token_logprobs(asked[0]))
        second = asyncio.ensure_future(lm.next_token_logprobs(asked[1]))  # not in the engine
        await asyncio.sleep(0)
        closing = on_thread(lm.close)
        found = await asyncio.gather(first, second, return_exceptions=True)
        probe.release()
        await closing
        return list(found)

    for error in fixture.run(closed()):
        fixture.expect_raised(EngineClosedError, error)
    expect(probe.closed == 1, "the engine to be closed once", probe.closed)
