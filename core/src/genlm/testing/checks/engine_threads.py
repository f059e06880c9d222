"""Checks that callers of any thread and any event loop get the same answers."""

from __future__ import annotations

import asyncio
import functools

import torch

from genlm import AsyncLM
from genlm.testing.background import LoopThread
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import expect
from genlm.testing.probe import Probe
from genlm.testing.sequences import TokenTuple

ROUNDS = 4


@engine_check(cases=("without an event loop", "inside a running event loop"))
def sync_equals_async(trial: EngineTrial) -> None:
    """The `_sync` methods give the same rows, also inside a running event loop."""

    async def inside(batch: list[TokenTuple]) -> tuple[torch.Tensor, torch.Tensor]:
        return _both_sync(trial.lm, batch)

    def law(batch: list[TokenTuple]) -> None:
        for case, ask in {
            "without an event loop": lambda: _both_sync(trial.lm, batch),
            "inside a running event loop": lambda: trial.run(inside(batch)),
        }.items():
            trial.lm.clear_cache()
            row, rows = trial.call(ask)
            trial.check_row(row, batch[-1], case=case)
            trial.check_rows(rows, batch, case=case, batch=batch)
            trial.saw(case)
        expect(
            tuple(trial.lm.batch_next_token_logprobs_sync([]).shape) == (0, len(row)),
            "an empty batch of no rows",
            "another shape",
        )

    trial.for_all(law, batch=trial.batches(max_size=3))


def _both_sync(lm: AsyncLM, batch: list[TokenTuple]) -> tuple[torch.Tensor, torch.Tensor]:
    # The last one, so that the batch finds a row in the cache after rows that it lacks.
    return lm.next_token_logprobs_sync(batch[-1]), lm.batch_next_token_logprobs_sync(batch)


@engine_check(cases=("two event loops", "two threads", "all at once"))
def threads_and_event_loops_share(trial: EngineTrial) -> None:
    """Two event loops and two threads at once each get the rows that they asked for."""
    lm, probe = trial.load_probed()
    loops = [trial.loop, trial.new_loop()]
    asked = [trial.some_sequences(6, salt=salt) for salt in range(4)]
    shared = trial.some_sequences(2, salt=9)  # asked for by everybody

    def on_loop(loop: LoopThread, batch: list[TokenTuple]) -> None:
        for _ in range(ROUNDS):
            rows = loop.run(_gathered(lm, batch), trial.patience_s)
            trial.check_rows(rows, batch, caller="an event loop")

    def on_thread(batch: list[TokenTuple]) -> None:
        for _ in range(ROUNDS):
            rows = lm.batch_next_token_logprobs_sync(batch)
            trial.check_rows(rows, batch, caller="a thread")

    callers = [
        functools.partial(on_loop, loop, [*batch, *shared])
        for loop, batch in zip(loops, asked[:2], strict=True)
    ]
    callers += [functools.partial(on_thread, [*shared, *batch]) for batch in asked[2:]]
    stages = {
        "two event loops": callers[:2],
        "two threads": callers[2:],
        "all at once": callers,
    }
    for case, together in stages.items():
        lm.clear_cache()
        count = len(together) * len([*asked[0], *shared])
        probe.hold()  # so that one step answers callers of all kinds
        release = functools.partial(
            _release_when_all_wait, trial, lm, probe, count, lm.statistics().joined
        )
        trial.call_together([*together, release])
        trial.saw(case)


def _release_when_all_wait(
    trial: EngineTrial, lm: AsyncLM, probe: Probe, count: int, joined_before: int
) -> None:
    def all_wait() -> bool:
        found = lm.statistics()
        return found.pending + found.joined - joined_before == count

    trial.wait_for(all_wait, f"{count} requests to wait")
    probe.release()


async def _gathered(lm: AsyncLM, asked: list[TokenTuple]) -> list[torch.Tensor]:
    return list(await asyncio.gather(*map(lm.next_token_logprobs_uncached, asked)))


@engine_check(cases=("shared by two event loops",))
def one_evaluation_serves_several_loops(trial: EngineTrial) -> None:
    """Callers on different event loops who share an evaluation each get a row of their own."""
    lm, probe = trial.load_probed()
    (token_ids,) = trial.some_sequences(1)
    other_loop = trial.new_loop()
    probe.hold()

    def release_when_both_wait() -> torch.Tensor:
        probe.wait_until_entered()
        trial.wait_for(lambda: lm.statistics().joined > 0, "the second caller to join")
        probe.release()
        return torch.empty(0)

    async def ask() -> torch.Tensor:
        return await lm.next_token_logprobs_uncached(token_ids)

    callers = [
        lambda: trial.run(ask()),
        lambda: other_loop.run(ask(), trial.patience_s),
    ]
    rows = trial.call_together([*callers, release_when_both_wait])[:2]
    trial.saw("shared by two event loops", lm.statistics().joined)
    for position, row in enumerate(rows):
        trial.check_row(row, token_ids, caller=position)
        row.fill_(7.0)
