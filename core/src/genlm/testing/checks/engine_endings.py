"""Checks of `close` and `reset_async_queries`: every request ends."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from genlm import AsyncLM, EngineClosedError, QueryResetError
from genlm.testing.background import on_thread
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import expect
from genlm.testing.probe import Probe
from genlm.testing.sequences import TokenTuple


@engine_check(cases=("in the engine", "not yet in the engine", "sync caller"))
def closing_ends_every_request(trial: EngineTrial) -> None:
    """`close` ends unanswered requests with `EngineClosedError`, even during a step."""
    lm, probe = trial.load_probed()
    asked = trial.some_sequences(3)

    async def end() -> asyncio.Future[None]:
        return on_thread(lm.close)

    found, closing = _ended(trial, lm, probe, asked, end)
    for error in found:
        trial.expect_raised(EngineClosedError, error)
    trial.run(_awaited(closing))
    expect(probe.closed == 1, "the engine to be closed once", probe.closed)


@engine_check(cases=("in the engine", "not yet in the engine", "sync caller", "asked again"))
def resetting_ends_every_request(trial: EngineTrial) -> None:
    """`reset_async_queries` ends unanswered requests with `QueryResetError`; others go on."""
    lm, probe = trial.load_probed()
    asked = trial.some_sequences(3)

    async def end() -> None:
        lm.reset_async_queries()

    found, _ = _ended(trial, lm, probe, asked, end)
    for error in found:
        trial.expect_raised(QueryResetError, error)
    rows = trial.run(lm.batch_next_token_logprobs(asked))
    trial.check_rows(rows, asked, after="reset_async_queries")
    trial.saw("asked again")


@engine_check(cases=("closed twice", "asked after closing", "context manager"))
def closed_means_closed(trial: EngineTrial) -> None:
    """`close` may be called twice, and every later request raises `EngineClosedError`."""
    token_ids = trial.some_sequences(1)[0]
    lm, probe = trial.load_probed()
    trial.check_row(trial.run(lm.next_token_logprobs(token_ids)), token_ids)
    for _ in range(2):
        trial.call(lm.close)
    trial.saw("closed twice")
    expect(probe.closed == 1, "the engine to be closed once", probe.closed)
    _check_closed(trial, lm, token_ids)
    lm = trial.load()
    with lm as entered:
        trial.check_row(trial.run(entered.next_token_logprobs(token_ids)), token_ids)
    _check_closed(trial, lm, token_ids)

    async def inside(lm: AsyncLM) -> None:
        async with lm:
            trial.check_row(await lm.next_token_logprobs(token_ids), token_ids)

    lm = trial.load()
    trial.run(inside(lm))
    _check_closed(trial, lm, token_ids)
    trial.saw("context manager")


def _check_closed(trial: EngineTrial, lm: AsyncLM, token_ids: TokenTuple) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "next_token_logprobs": lambda: lm.next_token_logprobs(token_ids),
        "next_token_logprobs_uncached": lambda: lm.next_token_logprobs_uncached(token_ids),
        "batch_next_token_logprobs": lambda: lm.batch_next_token_logprobs([token_ids]),
        "next_token_logprobs_sync": lambda: lm.next_token_logprobs_sync(token_ids),
        "batch_sample": lambda: lm.batch_sample([token_ids], 2),
    }
    for name, call in calls.items():
        trial.expect_error(EngineClosedError, call, call=name)
        trial.saw("asked after closing")


def _ended(
    trial: EngineTrial,
    lm: AsyncLM,
    probe: Probe,
    asked: list[TokenTuple],
    end: Callable[[], Any],
) -> tuple[list[Any], Any]:
    """End requests of three kinds while the engine's step is held; return what they got."""

    async def play() -> tuple[list[Any], Any]:
        probe.hold()
        first = asyncio.ensure_future(lm.next_token_logprobs(asked[0]))
        await on_thread(probe.wait_until_entered)
        trial.saw("in the engine", not first.done())
        second = asyncio.ensure_future(lm.batch_next_token_logprobs(asked[1:2]))
        sync = functools.partial(lm.next_token_logprobs_sync, asked[2])
        third = on_thread(sync)
        await on_thread(
            trial.wait_for, lambda: lm.statistics().pending == 3, "three requests to arrive"
        )
        trial.saw("not yet in the engine", len(probe.submitted) == 1)
        trial.saw("sync caller", not third.done())
        result = await end()
        found = await asyncio.gather(first, second, third, return_exceptions=True)
        probe.release()
        return list(found), result

    return trial.run(play())


async def _awaited(future: Any) -> Any:
    return await future
