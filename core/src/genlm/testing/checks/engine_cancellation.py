"""Checks that a caller may leave at any moment, and that nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch

from genlm import AsyncLM
from genlm.testing.background import on_thread
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import expect
from genlm.testing.probe import Probe
from genlm.testing.sequences import TokenTuple


@dataclass(frozen=True)
class _Stage:
    """A model of its own, with a probe, and three sequences to ask for."""

    trial: EngineTrial
    lm: AsyncLM
    probe: Probe
    asked: list[TokenTuple]


Scene = Callable[[_Stage], Coroutine[Any, Any, None]]


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
def cancelled_at_every_stage(trial: EngineTrial) -> None:
    """A caller that is cancelled ends at once; all others get their rows, then and later."""
    scenes: dict[str, tuple[Scene, int | None]] = {
        "before it leaves": (_before_it_leaves, None),
        "held back by max_pending": (_held_back, 1),
        "in the engine": (_in_the_engine, None),
        "one of two callers": (_one_of_two, None),
        "both callers": (_both, None),
        "while it is answered": (_while_answered, None),
    }
    for salt, (stage, (scene, max_pending)) in enumerate(scenes.items()):
        lm, probe = trial.load_probed(max_pending=max_pending)
        asked = trial.some_sequences(3, salt=salt)
        trial.run(scene(_Stage(trial, lm, probe, asked)))
        probe.release()
        lm.clear_cache()  # so that the engine answers for the one who left as well
        again = trial.run(lm.batch_next_token_logprobs(asked))
        trial.check_rows(again, asked, cancelled=stage)
        left = lm.statistics()
        expect(
            left.pending == left.waiting == 0,
            "nothing pending or waiting when all is answered",
            f"{left.pending} pending, {left.waiting} waiting",
            cancelled=stage,
        )
        trial.saw(stage)


def _task(lm: AsyncLM, token_ids: TokenTuple) -> asyncio.Task[torch.Tensor]:
    return asyncio.ensure_future(lm.next_token_logprobs(token_ids))


async def _expect_cancelled(task: asyncio.Task[torch.Tensor], stage: str) -> None:
    (found,) = await asyncio.gather(task, return_exceptions=True)
    expect(
        isinstance(found, asyncio.CancelledError), "CancelledError", repr(found), stage=stage
    )


async def _before_it_leaves(on: _Stage) -> None:
    for turns in range(4):
        tasks = [_task(on.lm, token_ids) for token_ids in on.asked]
        for _ in range(turns):
            await asyncio.sleep(0)
        arrived = tasks[0].done()
        tasks[0].cancel()
        if not arrived:
            await _expect_cancelled(tasks[0], f"after {turns} turns of the event loop")
        on.trial.check_rows(
            await asyncio.gather(*tasks[1:]), on.asked[1:], cancelled=on.asked[0]
        )
        on.lm.clear_cache()


async def _held_back(on: _Stage) -> None:
    on.probe.hold()
    first = _task(on.lm, on.asked[0])
    await on_thread(on.probe.wait_until_entered)
    second, third = _task(on.lm, on.asked[1]), _task(on.lm, on.asked[2])
    await asyncio.sleep(0)
    second.cancel()
    await _expect_cancelled(second, "held back")
    on.probe.release()
    rows = await asyncio.gather(first, third)
    on.trial.check_rows(rows, [on.asked[0], on.asked[2]], cancelled=on.asked[1])
    wasted = [query for query in on.probe.submitted if query.token_ids == on.asked[1]]
    expect(not wasted, "the engine not to be asked for whom nobody waits", wasted)


async def _in_the_engine(on: _Stage) -> None:
    on.probe.hold()
    tasks = [_task(on.lm, token_ids) for token_ids in on.asked]
    await on_thread(on.probe.wait_until_entered)
    tasks[1].cancel()
    await _expect_cancelled(tasks[1], "in the engine, which is still stepping")
    on.probe.release()
    rows = await asyncio.gather(tasks[0], tasks[2])
    on.trial.check_rows(rows, [on.asked[0], on.asked[2]], cancelled=on.asked[1])


async def _one_of_two(on: _Stage) -> None:
    for leaver in (0, 1):
        on.probe.hold()
        entered = len(on.probe.in_step)
        tasks = [_task(on.lm, on.asked[leaver]), _task(on.lm, on.asked[leaver])]
        await on_thread(on.probe.wait_until_entered, entered + 1)
        tasks[leaver].cancel()
        await _expect_cancelled(tasks[leaver], f"caller {leaver} of two")
        on.probe.release()
        row = await tasks[1 - leaver]
        on.trial.check_row(row, on.asked[leaver], cancelled=f"caller {leaver} of two")


async def _both(on: _Stage) -> None:
    on.probe.hold()
    tasks = [_task(on.lm, on.asked[0]), _task(on.lm, on.asked[0]), _task(on.lm, on.asked[1])]
    await on_thread(on.probe.wait_until_entered)
    for task in tasks[:2]:
        task.cancel()
        await _expect_cancelled(task, "both callers")
    again = _task(on.lm, on.asked[0])  # while the abandoned one is still in the engine
    await asyncio.sleep(0)
    on.probe.release()
    on.trial.check_rows(await asyncio.gather(tasks[2], again), [on.asked[1], on.asked[0]])


async def _while_answered(on: _Stage) -> None:
    """Cancel when the answer is on its way: this loop is kept from taking it."""
    on.probe.hold()
    answered = on.lm.statistics().answered
    tasks = [_task(on.lm, token_ids) for token_ids in on.asked[:2]]
    await on_thread(on.probe.wait_until_entered)
    on.probe.release()
    on.probe.wait_until_stepped()
    on.trial.wait_for(lambda: on.lm.statistics().answered > answered, "an answer to be counted")
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    on.trial.check_row(await tasks[1], on.asked[1], cancelled=on.asked[0])


@engine_check(cases=("cancelled while it was drawn",))
def a_cancelled_continuation_disturbs_nobody(trial: EngineTrial) -> None:
    """Cancelling one of several continuations changes none of the others."""
    prompts = [token_ids[:2] for token_ids in trial.some_sequences(3)]
    length = max(1, min(6, trial.max_length - 2))
    lm, probe = trial.load_probed()

    async def drawn(which: int) -> list[int]:
        return await lm.sample(prompts[which], length, seed=trial.seed + which)

    async def play() -> list[list[int]]:
        probe.hold()
        tasks = [asyncio.ensure_future(drawn(which)) for which in range(3)]
        await on_thread(probe.wait_until_entered, len(probe.in_step) + 1)
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        trial.saw("cancelled while it was drawn", tasks[1].cancelled())
        probe.release()
        return list(await asyncio.gather(tasks[0], tasks[2]))

    undisturbed = [trial.run(drawn(0)), trial.run(drawn(2))]
    lm.clear_cache()
    found = trial.run(play())
    expect(found == undisturbed, f"{undisturbed}, as without the third", found)
