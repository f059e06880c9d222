"""What SGLang does with requests that it does not expect, and that the engine lets none by."""

from __future__ import annotations

from typing import Any

import pytest

from genlm import (
    ContextLengthError,
    EmptySequenceError,
    EvaluationError,
    Query,
    SamplingParams,
    TokenIdError,
    UnknownAdapterError,
)
from genlm.testing import TINY_LOGITS, TINY_VOCABULARY
from genlm_sgl.conformance import TinyLlama
from genlm_sgl.versions import CPU_PAGES_FROM, check_version, installed_version

from .driving import TOLERANCE, answers, collected, largest_error, prompts_of


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, 512 - 7),
        ({"context_length": 64}, 64 - 7),
        ({"max_total_tokens": 64}, 64 - 7),
        ({"max_total_tokens": 64, "page_size": 16, "chunked_prefill_size": 16}, 64 - 33),
        ({"max_total_tokens": 96, "page_size": 16, "disable_radix_cache": True}, 96 - 33),
        ({"max_total_tokens": 40, "disable_overlap_schedule": False}, 40 - 7),
        ({"max_total_tokens": 40, "disable_radix_cache": True}, 40 - 7),
    ],
    ids=str,
)
def test_the_longest_context_is_answered_and_a_longer_one_is_refused(
    build: Any, tiny: TinyLlama, options: dict[str, Any], longest: int
) -> None:
    if "page_size" in options and check_version(installed_version()) < CPU_PAGES_FROM:
        longest = options["max_total_tokens"] - 7  # there `build` makes pages of one token
    engine = build(**options)
    assert engine.max_context == longest
    exact, longer, other = prompts_of(longest, longest + 1, longest)
    with pytest.raises(ContextLengthError) as refused:
        engine.submit(Query(9, longer))
    assert (refused.value.length, refused.value.max_context) == (longest + 1, longest)
    prompts = [exact, other, exact[:-1], exact]
    assert largest_error(tiny, prompts, answers(engine, prompts)) <= TOLERANCE
    # One token fits where the context is full, as everywhere in genlm.
    drawn = answers(engine, [(exact, SamplingParams(5, seed=1)), (exact[:-2], _few(9))])
    assert [len(tokens) for tokens in drawn] == [1, 3]


def test_a_continuation_that_sglang_cuts_short_is_an_error(build: Any) -> None:
    engine = build(max_total_tokens=64)
    [prompt] = prompts_of(20)
    engine.max_context = None
    [found] = answers(engine, [(prompt, SamplingParams(100, seed=1))])
    assert isinstance(found, EvaluationError)
    assert "of 100 tokens" in str(found)


def _few(count: int) -> SamplingParams:
    return SamplingParams(count, seed=2)


def test_an_answer_to_another_prompt_is_an_error_and_no_row(
    build: Any, tiny: TinyLlama
) -> None:
    """A prompt that is too long becomes `[0]` and "finishes"; its reason tells."""
    engine = build(context_length=64)
    good, long = prompts_of(20, 60)
    engine.max_context = None  # so that it reaches SGLang
    row, error = answers(engine, [good, long])
    assert largest_error(tiny, [good], [row]) <= TOLERANCE
    assert isinstance(error, EvaluationError)
    assert "60 tokens" in str(error)
    assert largest_error(tiny, [good], answers(engine, [good])) <= TOLERANCE


def test_a_request_that_never_enters_a_batch_is_an_error(build: Any, tiny: TinyLlama) -> None:
    engine = build(max_queued_requests=2)
    prompts = prompts_of(5, 6, 7, 8)
    found = answers(engine, prompts)
    assert largest_error(tiny, prompts[:2], found[:2]) <= TOLERANCE
    assert [type(each) for each in found[2:]] == [EvaluationError] * 2
    assert "queue is full" in str(found[2])


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_beside_hot_continuations_are_not_overwritten(
    build: Any, tiny: TinyLlama, overlap: bool
) -> None:
    """SGLang's sampler divides and normalises the logits of the whole batch in place."""
    engine = build(disable_overlap_schedule=not overlap)
    prompts = prompts_of(9, 4, 12)
    asked: list[Any] = [(prompts[0], SamplingParams(3, temperature=9.0, seed=1)), *prompts]
    rows = answers(engine, asked)[1:]
    assert largest_error(tiny, prompts, rows) <= TOLERANCE


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ((), EmptySequenceError),
        ((3, TINY_VOCABULARY), TokenIdError),
        ((3, TINY_LOGITS, 4), TokenIdError),
        ((10**6,), TokenIdError),
        ((3, -1), TokenIdError),
    ],
)
def test_what_breaks_the_scheduler_or_leaks_slots_never_reaches_it(
    build: Any, tiny: TinyLlama, prompt: tuple[int, ...], error: type[Exception]
) -> None:
    engine = build()
    good = prompts_of(5, 9)
    engine.submit(Query(0, good[0]))
    for sampling in (None, SamplingParams(3)):
        with pytest.raises(error):
            engine.submit(Query(7, prompt, None, sampling))
        with pytest.raises(error):
            engine.cache_prefix(prompt, None)
    engine.submit(Query(1, good[1]))
    assert largest_error(tiny, good, collected(engine, [0, 1])) <= TOLERANCE
    engine.clear_prefix_cache()
    assert engine.free_tokens == engine.statistics()["kv_tokens"]


def test_adapters_are_refused(build: Any) -> None:
    engine = build()
    with pytest.raises(UnknownAdapterError):
        engine.submit(Query(0, (3, 4), "red"))


def test_identical_prompts_in_one_cold_batch_are_each_answered(
    build: Any, tiny: TinyLlama
) -> None:
    """SGLang computes each of them; the core asks for them once."""
    engine = build()
    [prompt] = prompts_of(30)
    rows = answers(engine, [prompt] * 5)
    assert largest_error(tiny, [prompt] * 5, rows) <= TOLERANCE
    assert engine.statistics()["tokens_computed"] == 5 * 30


def test_a_chunk_of_a_prompt_gives_no_row(build: Any, tiny: TinyLlama) -> None:
    """It occupies a row of the logits in every batch but is finished in the last only."""
    engine = build(chunked_prefill_size=16)
    prompts = prompts_of(100, 3, 90, 2)
    rows = answers(engine, prompts)
    assert largest_error(tiny, prompts, rows) <= TOLERANCE
    assert engine.statistics()["rows"] == 4


def test_a_request_that_never_fits_ends_with_an_error(build: Any) -> None:
    engine = build(max_total_tokens=64, page_size=16, chunked_prefill_size=16)
    engine.max_context = None
    [found] = answers(engine, prompts_of(63))
    assert isinstance(found, EvaluationError)
