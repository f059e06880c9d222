"""Checks with faults injected into the engine: which requests get the error."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from genlm import AsyncLM, EngineDiedError, EvaluationError, Query
from genlm.testing.check import NotApplicable, engine_check, expect
from genlm.testing.engine_fixture import EngineFixture, gathered
from genlm.testing.probes import InjectedFault
from genlm.testing.strategies import TokenTuple


@engine_check(cases=("refused by submit",))
def a_refused_query_fails_alone(fixture: EngineFixture) -> None:
    """An exception of `submit` reaches only the caller of that query."""
    lm, probe = fixture.load_probed()
    asked = fixture.some_sequences(4)
    probe.refuse = _is(asked[1])
    _check_one_fails(fixture, lm, asked, bad=1)
    fixture.saw("refused by submit")


@engine_check(cases=("poisoned batch",))
def a_poisoned_sequence_fails_alone(fixture: EngineFixture) -> None:
    """A sequence that makes a whole batch raise fails; the rest of the batch is answered."""
    lm, probe = fixture.load_probed()
    if not probe.is_batch_engine:
        raise NotApplicable("the engine has no `evaluate` to inject an exception into")
    asked = fixture.some_sequences(7)
    for bad in (0, 3, 6):
        lm.clear_output_cache()
        probe.poison = _is(asked[bad])
        _check_one_fails(fixture, lm, asked, bad)
        fixture.saw("poisoned batch")


@engine_check(cases=("NaN", "+inf", "sum of 2", "another shape", "another dtype"))
def invalid_rows_are_refused(fixture: EngineFixture) -> None:
    """A row with NaN, with +inf or with a sum other than 1 is an error of that request only."""
    lm, probe = fixture.load_probed()
    asked = fixture.some_sequences(5)
    for case, spoiled in _SPOILED.items():
        bad = len(case) % 5
        probe.spoil = _spoiling(asked[bad], spoiled)
        lm.clear_output_cache()
        found = fixture.run(gathered(lm.next_token_logprobs, asked, errors=True))
        fixture.expect_raised(EvaluationError, found[bad], row_with=case)
        good = [row for row in found if isinstance(row, torch.Tensor)]
        fixture.check_rows(good, [ids for ids in asked if ids != asked[bad]], row_with=case)
        probe.spoil = lambda _query, row: row
        row = fixture.run(lm.next_token_logprobs(asked[bad]))
        fixture.check_row(row, asked[bad], after=f"a row with {case}")
        fixture.saw(case)


@engine_check(cases=("broken step", "asked again"))
def a_broken_step_is_survived(fixture: EngineFixture) -> None:
    """An exception of `step` ends the requests in the engine; later ones are answered."""
    lm, probe = fixture.load_probed()
    asked = fixture.some_sequences(4)
    for _ in range(2):
        lm.clear_output_cache()
        probe.break_step = InjectedFault("the step broke")
        for found in fixture.run(gathered(lm.next_token_logprobs, asked, errors=True)):
            _check_cause(fixture, found)
        fixture.saw("broken step")
        rows = fixture.run(lm.batch_next_token_logprobs(asked))
        fixture.check_rows(rows, asked, after="a broken step")
        fixture.saw("asked again")


@engine_check(cases=("in the engine", "asked later"))
def a_dead_engine_ends_every_request(fixture: EngineFixture) -> None:
    """When the engine's thread ends, every request, present and future, ends with an error."""
    lm, probe = fixture.load_probed()
    asked = fixture.some_sequences(3)
    probe.break_step = SystemExit("the thread ends")
    with _quiet_log():
        for found in fixture.run(gathered(lm.next_token_logprobs, asked, errors=True)):
            fixture.expect_raised(EngineDiedError, found, when="in the engine")
            fixture.saw("in the engine")
        calls = {
            "next_token_logprobs": lambda: lm.next_token_logprobs(asked[0]),
            "next_token_logprobs_sync": lambda: lm.next_token_logprobs_sync(asked[0]),
            "sample": lambda: lm.sample(asked[0], 2),
        }
        for name, call in calls.items():
            fixture.expect_error(EngineDiedError, call, when="asked later", call=name)
            fixture.saw("asked later")
        fixture.call(lm.close)


def _with_one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoiled(row: torch.Tensor) -> torch.Tensor:
        row[len(row) // 2] = value
        return row

    return spoiled


_SPOILED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": _with_one(math.nan),
    "+inf": _with_one(math.inf),
    "sum of 2": lambda row: row + math.log(2),
    "another shape": lambda row: row[1:].log_softmax(-1),
    "another dtype": lambda row: row.double(),
}


def _spoiling(token_ids: TokenTuple, spoiled: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def spoil(query: Query, row: torch.Tensor) -> torch.Tensor:
        return spoiled(row) if query.token_ids == token_ids else row

    return spoil


def _is(token_ids: TokenTuple) -> Any:
    def is_bad(query: Query) -> bool:
        return query.token_ids == token_ids

    return is_bad


def _check_one_fails(
    fixture: EngineFixture, lm: AsyncLM, asked: list[TokenTuple], bad: int
) -> None:
    found = fixture.run(gathered(lm.next_token_logprobs, asked, errors=True))
    _check_cause(fixture, found.pop(bad))
    good = [token_ids for token_ids in asked if token_ids != asked[bad]]
    rows = [row if isinstance(row, torch.Tensor) else _expect_row(row) for row in found]
    fixture.check_rows(rows, good, failing=asked[bad])


def _expect_row(error: BaseException) -> torch.Tensor:
    expect(False, "a row for a good sequence", repr(error))
    raise error


def _check_cause(fixture: EngineFixture, found: object) -> None:
    error = fixture.expect_raised(EvaluationError, found)
    expect(
        isinstance(error.__cause__, InjectedFault),
        "an EvaluationError whose __cause__ is what the engine raised",
        repr(error.__cause__),
    )


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Hide the traceback that the core logs; it would look like a failure of the run."""
    log = logging.getLogger("genlm")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
