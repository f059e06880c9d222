"""Reductions of rows, computed from the logits of a whole pass before rows are copied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from row_oracle import Entropy, check_output, check_outputs, mask, outputs_of

from genlm import EvaluationError, Query, Reduction, SamplingParams
from genlm.core.rows.reductions import Draw, LogMass, TopK
from genlm.plugin import TokenSequence, stream_uniform
from genlm_sgl.conformance import TinyLlama

from .conftest import SETTINGS, adapted_engine
from .driving import collected, continuation, prompts_of

Ids = tuple[int, ...]


class CountedEntropy(Entropy):
    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Entropy]) -> Sequence[float]:
        SIZES.append(len(rows))
        return super().compute(rows, requests)


@dataclass(frozen=True)
class Failing(Reduction):
    number: int

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Failing]) -> Sequence[Any]:
        if any(request.number % 2 for request in requests):
            raise ValueError("odd")
        return [request.number for request in requests]


SIZES: list[int] = []
"""Of the batches that `CountedEntropy` got."""


@pytest.fixture(scope="module", params=SETTINGS)
def engine(request: pytest.FixtureRequest, tiny: TinyLlama) -> Iterator[Any]:
    engine = adapted_engine(tiny, SETTINGS[request.param])
    yield engine
    engine.close()


@pytest.fixture(params=["residents", "no residents"])
def either(request: pytest.FixtureRequest, engine: Any) -> Iterator[Any]:
    """The engine, with contexts that stay and without."""
    engine.clear_prefix_cache()
    engine.keeps_contexts = request.param == "residents"
    yield engine
    engine.keeps_contexts = True
    assert not len(engine._requests)


def ask(engine: Any, asked: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Put contexts, their outputs and perhaps adapters through the engine."""
    for number, (ids, outputs, *adapter) in enumerate(asked):
        engine.submit(Query(number, TokenSequence.of(ids), *adapter, outputs=outputs))
    return collected(engine, range(len(asked)))


def test_each_reduction_is_that_of_its_row(either: Any, tiny: Any) -> None:
    contexts = prompts_of(*range(5, 17), 130, 70)
    for _ in range(3):  # begun, then continued
        asked = [
            (ids, outputs_of(number, CountedEntropy())) for number, ids in enumerate(contexts)
        ]
        for (ids, of), result in zip(asked, ask(either, asked), strict=True):
            check_outputs(result, of, tiny.logprobs(ids))
        contexts = [(*ids, 7) for ids in contexts]


def test_twins_that_want_different_things(either: Any, tiny: Any) -> None:
    [prompt] = prompts_of(40, seed=8)
    for length in range(4):
        ids = (*prompt, *prompts_of(length, seed=9)[0])
        asked = [(ids, (TopK(3),)), (ids, (LogMass(mask(length)), None)), (ids, (None,))]
        for (_, outputs), result in zip(asked, ask(either, asked), strict=True):
            check_outputs(result, outputs, tiny.logprobs(ids))


def test_draws_do_not_depend_on_the_batch(either: Any) -> None:
    contexts = prompts_of(9, 40, 33, 100, 5)
    draws = [Draw(stream_uniform(seed, 1), 1.0, mask(seed)) for seed in range(5)]
    pairs = [(ids, (draw,)) for ids, draw in zip(contexts, draws, strict=True)]
    one_by_one = [ask(either, [pair])[0].values[0].token_id for pair in pairs]
    at_once = [result.values[0].token_id for result in ask(either, pairs * 3)]
    assert at_once == one_by_one * 3


def test_adapters_have_their_own_rows(either: Any, tiny: Any) -> None:
    for ids in prompts_of(70, 3):
        names = (None, "red", "blue")
        found = ask(either, [(ids, (TopK(4), LogMass(mask(1))), name) for name in names])
        for result, name in zip(found, names, strict=True):
            check_outputs(result, (TopK(4), LogMass(mask(1))), tiny.logprobs(ids, name))


def test_reductions_rows_and_continuations_mix(either: Any, tiny: Any) -> None:
    asked = prompts_of(70, 3, 120)
    plan = SamplingParams(8, 1.0, frozenset(), 4)
    for place, ids in enumerate(asked):
        either.submit(Query(3 * place, ids, outputs=(TopK(2),)))
        either.submit(Query(3 * place + 1, ids))
        either.submit(Query(3 * place + 2, ids, None, plan))
    found = collected(either, range(9))
    for place, ids in enumerate(asked):
        reduced, row, tokens = found[3 * place : 3 * place + 3]
        check_outputs(reduced, (TopK(2),), tiny.logprobs(ids))
        check_output(row, None, tiny.logprobs(ids))
        assert tokens == continuation(tiny, ids, plan)


# -- failures -------------------------------------------------------------------------


def test_a_reduction_that_fails_fails_alone(either: Any, tiny: Any) -> None:
    asked = [(ids, (Failing(i), TopK(2))) for i, ids in enumerate(prompts_of(9, 20, 33, 5))]
    for number, result in enumerate(ask(either, asked)):
        check_output(result.values[1], TopK(2), tiny.logprobs(asked[number][0]))
        if number % 2:
            assert "odd" in str(result.values[0])
        else:
            assert result.values[0] == number


def test_a_row_that_is_not_a_distribution_fails_alone(
    either: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = type(either._requests).on_logits

    def spoiled(requests: Any, rids: Any, lengths: Any, logits: Any) -> None:
        wrong = torch.tensor([length == 20 for length in lengths])
        original(requests, rids, lengths, logits.masked_fill(wrong[:, None], math.nan))

    monkeypatch.setattr(type(either._requests), "on_logits", spoiled)
    right, wrong = ask(either, [(ids, (TopK(2),)) for ids in prompts_of(9, 20)])
    check_outputs(right, (TopK(2),), tiny.logprobs(prompts_of(9, 20)[0]))
    assert isinstance(wrong, EvaluationError)
    assert "not a distribution" in str(wrong)


def test_rows_that_nobody_asked_for_are_not_made_all_at_once(
    either: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*arguments: Any) -> Any:
        raise AssertionError("rows were made")

    monkeypatch.setattr("genlm_sgl.requests.rows_from_logits", made)
    for result in ask(either, [(ids, (TopK(2),)) for ids in prompts_of(9, 20)]):
        assert len(result.values[0].token_ids) == 2


def test_cancelled_reductions_leave_nothing(either: Any, tiny: Any) -> None:
    asked = prompts_of(120, 40, 100, 7, 90)
    for _ in range(2):
        for number, ids in enumerate(asked):
            either.submit(Query(number, ids, outputs=(TopK(3), None)))
        found = {each.query_id: each.result for each in either.step()}
        for number in (0, 2, 4):
            either.abort(number)
        waiting = [number for number in (1, 3) if number not in found]
        found |= zip(waiting, collected(either, waiting) if waiting else [], strict=True)
        for number in (1, 3):
            check_outputs(found[number], (TopK(3), None), tiny.logprobs(asked[number]))


# -- where they are computed ----------------------------------------------------------


def test_a_pass_is_reduced_at_once(either: Any) -> None:
    SIZES.clear()
    contexts = prompts_of(*[6] * 6)
    ask(either, [(ids, (CountedEntropy(),)) for ids in contexts])
    ask(either, [((*ids, 4), (CountedEntropy(),)) for ids in contexts])
    assert SIZES == [6, 6]


def test_a_row_that_nobody_asked_for_is_not_copied(
    either: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(*arguments: Any) -> Any:
        raise AssertionError("a row was copied")

    monkeypatch.setattr("torch.unbind_copy", copied)
    contexts = prompts_of(9, 20, 33)
    for result in ask(either, [(ids, (TopK(2), CountedEntropy())) for ids in contexts]):
        assert not isinstance(result, Exception), result
