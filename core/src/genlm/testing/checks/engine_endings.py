"""Checks that `close` and `cancel_all` end every request."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from genlm import AsyncLM, EngineClosedError, QueryResetError
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.fixture import on_thread
from genlm.testing.probes import EngineProbe
from genlm.testing.strategies import TokenTuple


@engine_check(cases=("in the engine", "not yet in the engine", "sync caller"))
def closing_ends_every_request(fixture: EngineFixture) -> None:
    """`close` ends unanswered requests with `EngineClosedError`, even during a step."""
    lm, probe = fixture.load_probed()
    asked = fixture.some_sequences(3)

    async def end() -> asyncio.Future[None]:
        return on_thread(lm.close)

    found, closing = _ended(fixture, lm, probe, asked, end)
    for error in found:
        fixture.expect_raised(EngineClosedError, error)
    fixture.run(_awaited(closing))
    expect(probe.closed == 1, "the engine to be closed once", probe.closed)


@engine_check(cases=("in the engine", "not yet in the engine", "sync caller", "asked again"))
def resetting_ends_every_request(fixture: EngineFixture) -> None:
    """`cancel_all` ends unanswered requests with `QueryResetError`; later ones run."""
    lm, probe = fixture.load_probed()
    asked = fixture.some_sequences(3)

    async def end() -> None:
        lm.cancel_all()

    found, _ = _ended(fixture, lm, probe, asked, end)
    for error in found:
        fixture.expect_raised(QueryResetError, error)
    rows = fixture.run(lm.batch_next_token_logprobs(asked))
    fixture.check_rows(rows, asked, after="cancel_all")
    fixture.saw("asked again")


@engine_check(cases=("closed twice", "asked after closing", "context manager"))
def closed_means_closed(fixture: EngineFixture) -> None:
    """`close` may be called twice, and every later request raises `EngineClosedError`."""
    token_ids = fixture.some_sequences(1)[0]
    lm, probe = fixture.load_probed()
    fixture.check_row(fixture.run(lm.next_token_logprobs(token_ids)), token_ids)
    for _ in range(2):
        fixture.call(lm.close)
    fixture.saw("closed twice")
    expect(probe.closed == 1, "the engine to be closed once", probe.closed)
    _check_closed(fixture, lm, token_ids)
    lm = fixture.load()
    with lm as entered:
        fixture.check_row(fixture.run(entered.next_token_logprobs(token_ids)), token_ids)
    _check_closed(fixture, lm, token_ids)

    async def inside(lm: AsyncLM) -> None:
        async with lm:
            fixture.check_row(await lm.next_token_logprobs(token_ids), token_ids)

    lm = fixture.load()
    fixture.run(inside(lm))
    _check_closed(fixture, lm, token_ids)
    fixture.saw("context manager")


def _check_closed(fixture: EngineFixture, lm: AsyncLM, token_ids: TokenTuple) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "next_token_logprobs": lambda: lm.next_token_logprobs(token_ids),
        "uncached": lambda: lm.next_token_logprobs(token_ids, use_cache=False),
        "batch_next_token_logprobs": lambda: lm.batch_next_token_logprobs([token_ids]),
        "next_token_logprobs_sync": lambda: lm.next_token_logprobs_sync(token_ids),
        "batch_sample": lambda: lm.batch_sample([token_ids], 2),
    }
    for name, call in calls.items():
        fixture.expect_error(EngineClosedError, call, call=name)
        fixture.saw("asked after closing")


def _ended(
    fixture: EngineFixture,
    lm: AsyncLM,
    probe: EngineProbe,
    asked: list[TokenTuple],
    end: Callable[[], Any],
) -> tuple[list[Any], Any]:
    """End requests of three kinds while the engine's step is held; return their results."""

    async def play() -> tuple[list[Any], Any]:
        (first,) = await probe.start_held(lm.next_token_logprobs(asked[0]))
        fixture.saw("in the engine", not first.done())
        second = asyncio.ensure_future(lm.batch_next_token_logprobs(asked[1:2]))
        sync = functools.partial(lm.next_token_logprobs_sync, asked[2])
        third = on_thread(sync)
        await on_thread(
            fixture.wait_for, lambda: lm.statistics().pending == 3, "three requests to arrive"
        )
        fixture.saw("not yet in the engine", len(probe.submitted) == 1)
        fixture.saw("sync caller", not third.done())
        result = await end()
        found = await asyncio.gather(first, second, third, return_exceptions=True)
        probe.release()
        return list(found), result

    return fixture.run(play())


async def _awaited(future: Any) -> Any:
    return await future
