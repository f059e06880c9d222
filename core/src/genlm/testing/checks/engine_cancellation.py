"""Checks that a caller can be cancelled at any time without effect on other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch

from genlm import AsyncLM
from genlm.testing.background import on_thread
from genlm.testing.check import engine_check
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.failure import expect
from genlm.testing.probes import EngineProbe
from genlm.testing.strategies import TokenTuple


@dataclass(frozen=True)
class _Scene:
    """A new model with a probe, and three sequences."""

    fixture: EngineFixture
    lm: AsyncLM
    probe: EngineProbe
    asked: list[TokenTuple]


Play = Callable[[_Scene], Coroutine[Any, Any, None]]


@engine_check(
    cases=(
        "before it leaves",
        "held back by max_pending",
        "in the engine",
        "one of two callers",
        "both callers",
        "while it is answered",
    )
)
def cancelled_at_every_stage(fixture: EngineFixture) -> None:
    """A cancelled caller ends at once; all others get their rows, then and later."""
    scenes: dict[str, tuple[Play, int | None]] = {
        "before it leaves": (_before_it_leaves, None),
        "held back by max_pending": (_held_back, 1),
        "in the engine": (_in_the_engine, None),
        "one of two callers": (_one_of_two, None),
        "both callers": (_both, None),
        "while it is answered": (_while_answered, None),
    }
    for salt, (stage, (scene, max_pending)) in enumerate(scenes.items()):
        lm, probe = fixture.load_probed(max_pending=max_pending)
        asked = fixture.some_sequences(3, salt=salt)
        fixture.run(scene(_Scene(fixture, lm, probe, asked)))
        probe.release()
        lm.clear_output_cache()  # so that the engine evaluates the cancelled request too
        again = fixture.run(lm.batch_next_token_logprobs(asked))
        fixture.check_rows(again, asked, cancelled=stage)
        left = lm.statistics()
        expect(
            left.pending == left.waiting == 0,
            "nothing pending or waiting when all is answered",
            f"{left.pending} pending, {left.waiting} waiting",
            cancelled=stage,
        )
        fixture.saw(stage)


def _task(lm: AsyncLM, token_ids: TokenTuple) -> asyncio.Task[torch.Tensor]:
    return asyncio.ensure_future(lm.next_token_logprobs(token_ids))


async def _expect_cancelled(task: asyncio.Task[torch.Tensor], stage: str) -> None:
    (found,) = await asyncio.gather(task, return_exceptions=True)
    expect(
        isinstance(found, asyncio.CancelledError), "CancelledError", repr(found), stage=stage
    )


async def _before_it_leaves(on: _Scene) -> None:
    for turns in range(4):
        tasks = [_task(on.lm, token_ids) for token_ids in on.asked]
        for _ in range(turns):
            await asyncio.sleep(0)
        arrived = tasks[0].done()
        tasks[0].cancel()
        if not arrived:
            await _expect_cancelled(tasks[0], f"after {turns} turns of the event loop")
        on.fixture.check_rows(
            await asyncio.gather(*tasks[1:]), on.asked[1:], cancelled=on.asked[0]
        )
        on.lm.clear_output_cache()


async def _held_back(on: _Scene) -> None:
    on.probe.hold()
    first = _task(on.lm, on.asked[0])
    await on_thread(on.probe.wait_until_entered)
    second, third = _task(on.lm, on.asked[1]), _task(on.lm, on.asked[2])
    await asyncio.sleep(0)
    second.cancel()
    await _expect_cancelled(second, "held back")
    on.probe.release()
    rows = await asyncio.gather(first, third)
    on.fixture.check_rows(rows, [on.asked[0], on.asked[2]], cancelled=on.asked[1])
    wasted = [query for query in on.probe.submitted if query.token_ids == on.asked[1]]
    expect(not wasted, "a cancelled request not to reach the engine", wasted)


async def _in_the_engine(on: _Scene) -> None:
    on.probe.hold()
    tasks = [_task(on.lm, token_ids) for token_ids in on.asked]
    await on_thread(on.probe.wait_until_entered)
    tasks[1].cancel()
    await _expect_cancelled(tasks[1], "in the engine, which is still stepping")
    on.probe.release()
    rows = await asyncio.gather(tasks[0], tasks[2])
    on.fixture.check_rows(rows, [on.asked[0], on.asked[2]], cancelled=on.asked[1])


async def _one_of_two(on: _Scene) -> None:
    for leaving in (0, 1):
        on.probe.hold()
        entered = len(on.probe.in_step)
        tasks = [_task(on.lm, on.asked[leaving]), _task(on.lm, on.asked[leaving])]
        await on_thread(on.probe.wait_until_entered, entered + 1)
        tasks[leaving].cancel()
        await _expect_cancelled(tasks[leaving], f"caller {leaving} of two")
        on.probe.release()
        row = await tasks[1 - leaving]
        on.fixture.check_row(row, on.asked[leaving], cancelled=f"caller {leaving} of two")


async def _both(on: _Scene) -> None:
    on.probe.hold()
    tasks = [_task(on.lm, on.asked[0]), _task(on.lm, on.asked[0]), _task(on.lm, on.asked[1])]
    await on_thread(on.probe.wait_until_entered)
    for task in tasks[:2]:
        task.cancel()
        await _expect_cancelled(task, "both callers")
    again = _task(on.lm, on.asked[0])  # while the abandoned request is still in the engine
    await asyncio.sleep(0)
    on.probe.release()
    on.fixture.check_rows(await asyncio.gather(tasks[2], again), [on.asked[1], on.asked[0]])


async def _while_answered(on: _Scene) -> None:
    """Cancel between the answer and its delivery: this event loop is blocked meanwhile."""
    on.probe.hold()
    answered = on.lm.statistics().answered
    tasks = [_task(on.lm, token_ids) for token_ids in on.asked[:2]]
    await on_thread(on.probe.wait_until_entered)
    on.probe.release()
    on.probe.wait_until_stepped()
    on.fixture.wait_for(
        lambda: on.lm.statistics().answered > answered, "an answer to be counted"
    )
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    on.fixture.check_row(await tasks[1], on.asked[1], cancelled=on.asked[0])


@engine_check(cases=("cancelled while it was drawn",))
def a_cancelled_continuation_changes_no_other(fixture: EngineFixture) -> None:
    """Cancelling one of several continuations changes none of the others."""
    prompts = [token_ids[:2] for token_ids in fixture.some_sequences(3)]
    length = max(1, min(6, fixture.max_length - 2))
    lm, probe = fixture.load_probed()

    async def drawn(which: int) -> list[int]:
        return await lm.sample(prompts[which], length, stop=(), seed=fixture.seed + which)

    async def play() -> list[list[int]]:
        probe.hold()
        tasks = [asyncio.ensure_future(drawn(which)) for which in range(3)]
        await on_thread(probe.wait_until_entered, len(probe.in_step) + 1)
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        fixture.saw("cancelled while it was drawn", tasks[1].cancelled())
        probe.release()
        return list(await asyncio.gather(tasks[0], tasks[2]))

    uncancelled = [fixture.run(drawn(0)), fixture.run(drawn(2))]
    lm.clear_output_cache()
    found = fixture.run(play())
    expect(found == uncancelled, f"{uncancelled}, as without the third", found)
