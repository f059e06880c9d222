"""Checks that callers on any thread and any event loop get the right rows."""

from __future__ import annotations

import functools

import torch

from genlm import AsyncLM
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture, gathered
from genlm.testing.fixture import LoopThread
from genlm.testing.probes import EngineProbe
from genlm.testing.strategies import TokenTuple

ROUNDS = 4


@engine_check(cases=("without an event loop", "inside a running event loop"))
def sync_equals_async(fixture: EngineFixture) -> None:
    """The `_sync` methods return the same rows, also inside a running event loop."""

    async def inside(batch: list[TokenTuple]) -> tuple[torch.Tensor, torch.Tensor]:
        return _both_sync(fixture.lm, batch)

    def holds(batch: list[TokenTuple]) -> None:
        for case, ask in {
            "without an event loop": lambda: _both_sync(fixture.lm, batch),
            "inside a running event loop": lambda: fixture.run(inside(batch)),
        }.items():
            fixture.lm.clear_output_cache()
            row, rows = fixture.call(ask)
            fixture.check_row(row, batch[-1], case=case)
            fixture.check_rows(rows, batch, case=case, batch=batch)
            fixture.saw(case)
        expect(
            tuple(fixture.lm.batch_next_token_logprobs_sync([]).shape) == (0, len(row)),
            "an empty batch of no rows",
            "another shape",
        )

    fixture.for_all(holds, batch=fixture.batches(max_size=3))


def _both_sync(lm: AsyncLM, batch: list[TokenTuple]) -> tuple[torch.Tensor, torch.Tensor]:
    # The last one, so that the batch has a cache hit after cache misses.
    return lm.next_token_logprobs_sync(batch[-1]), lm.batch_next_token_logprobs_sync(batch)


@engine_check(cases=("two event loops", "two threads", "all at once"))
def threads_and_event_loops_share(fixture: EngineFixture) -> None:
    """Two event loops and two threads at once each get the rows that they requested."""
    lm, probe = fixture.load_probed()
    loops = [fixture.loop, fixture.new_loop()]
    asked = [fixture.some_sequences(6, salt=salt) for salt in range(4)]
    shared = fixture.some_sequences(2, salt=9)  # requested by all callers

    def on_loop(loop: LoopThread, batch: list[TokenTuple]) -> None:
        for _ in range(ROUNDS):
            asked = gathered(lm.next_token_logprobs, batch, use_cache=False)
            rows = loop.run(asked, fixture.timeout_s)
            fixture.check_rows(rows, batch, caller="an event loop")

    def on_thread(batch: list[TokenTuple]) -> None:
        for _ in range(ROUNDS):
            rows = lm.batch_next_token_logprobs_sync(batch)
            fixture.check_rows(rows, batch, caller="a thread")

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
        lm.clear_output_cache()
        count = len(together) * len([*asked[0], *shared])
        probe.hold()  # so that one step answers all callers
        release = functools.partial(
            _release_when_all_wait, fixture, lm, probe, count, lm.statistics().joined
        )
        fixture.call_together([*together, release])
        fixture.saw(case)


def _release_when_all_wait(
    fixture: EngineFixture, lm: AsyncLM, probe: EngineProbe, count: int, joined_before: int
) -> None:
    def all_wait() -> bool:
        found = lm.statistics()
        return found.pending + found.joined - joined_before == count

    fixture.wait_for(all_wait, f"{count} requests to wait")
    probe.release()


@engine_check(cases=("shared by two event loops",))
def one_evaluation_serves_several_loops(fixture: EngineFixture) -> None:
    """Callers on different event loops that share an evaluation each get their own copy."""
    lm, probe = fixture.load_probed()
    (token_ids,) = fixture.some_sequences(1)
    other_loop = fixture.new_loop()
    probe.hold()

    def release_when_both_wait() -> torch.Tensor:
        probe.wait_until_entered()
        fixture.wait_for(lambda: lm.statistics().joined > 0, "the second caller to join")
        probe.release()
        return torch.empty(0)

    async def request() -> torch.Tensor:
        return await lm.next_token_logprobs(token_ids, use_cache=False)

    callers = [
        lambda: fixture.run(request()),
        lambda: other_loop.run(request(), fixture.timeout_s),
    ]
    rows = fixture.call_together([*callers, release_when_both_wait])[:2]
    fixture.saw("shared by two event loops", lm.statistics().joined)
    for position, row in enumerate(rows):
        fixture.check_row(row, token_ids, caller=position)
        row.fill_(7.0)
