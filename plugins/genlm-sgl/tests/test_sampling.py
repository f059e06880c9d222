"""Continuations drawn in SGLang's batches, compared with draws from the oracle's rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from genlm import Query, SamplingParams
from genlm_sgl.conformance import TinyLlama

from .driving import (
    TOLERANCE,
    answers,
    collected,
    continuation,
    largest_error,
    prompts_of,
)

PROMPTS = prompts_of(3, 9, 1, 20, 4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
def test_draws_are_those_of_the_oracle(
    build: Any, tiny: TinyLlama, overlap: bool, temperature: float
) -> None:
    engine = build(disable_overlap_schedule=not overlap)
    asked = [
        (prompt, SamplingParams(12, temperature, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
    ]
    expected = [continuation(tiny, prompt, params) for prompt, params in asked]
    assert answers(engine, asked) == expected
    for each, drawn in zip(asked, expected, strict=True):  # alone as in company
        assert answers(engine, [each]) == [drawn]


@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 8}], ids=str)
def test_draws_that_sglang_delays_are_the_same(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """It draws the tokens of a pass after it has processed the results of the one before."""
    monkeypatch.setenv("SGLANG_ENABLE_DELAY_SAMPLE", "1")
    engine = build(disable_overlap_schedule=False, **options)
    asked = [(p, SamplingParams(12, 1.0, seed=seed)) for seed, p in enumerate(PROMPTS)]
    mixed = [each for pair in zip(asked, PROMPTS, strict=True) for each in pair]
    found = answers(engine, mixed)
    assert found[::2] == [continuation(tiny, prompt, params) for prompt, params in asked]
    assert largest_error(tiny, PROMPTS, found[1::2]) <= TOLERANCE


def test_equal_prompts_have_streams_of_their_own(build: Any) -> None:
    engine = build()
    asked = [(PROMPTS[0], SamplingParams(8, seed=seed)) for seed in range(20)]
    drawn = answers(engine, asked)
    assert len({tuple(tokens) for tokens in drawn}) == 20
    unseeded = answers(engine, [(PROMPTS[0], SamplingParams(8))] * 2)
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_ids_end_a_continuation_and_the_models_own_end_does_not(
    build: Any, tiny: TinyLlama, overlap: bool
) -> None:
    engine = build(disable_overlap_schedule=not overlap)
    params = SamplingParams(60, temperature=4.0, seed=3)
    whole = continuation(tiny, PROMPTS[0], params)
    for stop in (whole[10], whole[0], whole[-1]):
        stopping = dataclasses.replace(params, stop_token_ids=frozenset({stop, 299}))
        expected = continuation(tiny, PROMPTS[0], stopping)
        assert answers(engine, [(PROMPTS[0], stopping)]) == [expected]
    many = [(PROMPTS[0], SamplingParams(60, 4.0, frozenset({5}), seed)) for seed in range(30)]
    drawn = answers(engine, many)
    assert any(2 in tokens for tokens in drawn)  # 2 is the end of sequence in its config
    assert drawn == [continuation(tiny, prompt, params) for prompt, params in many]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_retracted_continuation_is_drawn_as_if_it_had_not_been(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch, overlap: bool, page_size: int
) -> None:
    """The cache is too small for all; SGLang takes some out and computes them again."""
    engine = build(
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        max_total_tokens=256,
        chunked_prefill_size=64,
        schedule_conservativeness=0.1,
    )
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    retracted = 0
    retract = ScheduleBatch.retract_decode

    def counting(batch: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal retracted
        retracted += 1
        return retract(batch, *arguments, **options)

    monkeypatch.setattr(ScheduleBatch, "retract_decode", counting)
    asked = [
        # Where a continuation may stop early SGLang reckons with less than its full length.
        (prompt, SamplingParams(70, stop_token_ids=frozenset({299}), seed=seed))
        for seed, prompt in enumerate(prompts_of(10, 11, 12, 13, 14, 15))
    ]
    for number, (prompt, params) in enumerate(asked):  # in one batch it would admit too few
        engine.submit(Query(number, prompt, None, params))
        assert engine.step() == []
    drawn = collected(engine, range(len(asked)))
    assert drawn == [continuation(tiny, *each) for each in asked]
    assert retracted
