"""Rows, however SGLang batches: compared with an unbatched float32 forward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from genlm import Engine, EvaluationError, PrefixCacheEngine, Query, SamplingParams
from genlm.testing import TINY_LOGITS, TINY_VOCABULARY
from genlm_sgl.conformance import TinyLlama

from .driving import TOLERANCE, answers, collected, continuation, largest_error, prompts_of

# Alone, of length 1, a shared prefix, duplicates, one that is another's beginning.
[SHARED] = prompts_of(40)
MIXED = [
    *prompts_of(9, 1, 23, 4, 150, 1),
    SHARED,
    (*SHARED, 5),
    (*SHARED, 6, 7, 8),
    SHARED,
    SHARED[:17],
    (0,),
    (0, 0),
]


def test_the_engine_has_what_the_protocols_ask_for(build: Any) -> None:
    engine = build()
    assert isinstance(engine, Engine)
    assert isinstance(engine, PrefixCacheEngine)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 16},
        {"chunked_prefill_size": 48, "page_size": 16},
        {"disable_overlap_schedule": False},
        {"disable_overlap_schedule": False, "chunked_prefill_size": 16},
        {"disable_overlap_schedule": False, "page_size": 16, "chunked_prefill_size": 32},
        {"disable_radix_cache": True},
        {"max_running_requests": 2},
        {"max_total_tokens": 170},
        {"max_total_tokens": 192, "page_size": 16},
        {"schedule_policy": "lpm"},
        {"enable_mixed_chunk": True, "chunked_prefill_size": 16},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_rows_do_not_depend_on_how_sglang_batches(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    engine = build(**options)
    for _ in range(3):  # computed, from the cache, and beside continuations
        assert largest_error(tiny, MIXED, answers(engine, MIXED)) <= TOLERANCE
    hot = SamplingParams(max_tokens=6, temperature=3.0, seed=1)
    mixed = [each for prompt in MIXED for each in ((prompt, hot), prompt)]
    rows = answers(engine, mixed)[1::2]
    assert largest_error(tiny, MIXED, rows) <= TOLERANCE
    engine.clear_prefix_cache()
    assert engine.free_tokens == engine.statistics()["kv_tokens"]


@pytest.mark.parametrize("overlap", [False, True])
def test_more_prompts_than_run_at_once_are_all_answered(
    build: Any, tiny: TinyLlama, overlap: bool
) -> None:
    """Where batches overlap, one holds its slots while the next is chosen."""
    engine = build(
        disable_overlap_schedule=not overlap, max_running_requests=4, chunked_prefill_size=24
    )
    prompts = prompts_of(*[1 + 7 * i % 60 for i in range(50)])
    assert largest_error(tiny, prompts, answers(engine, prompts)) <= TOLERANCE
    assert engine.statistics()["batches"] >= 13


def test_a_query_joins_what_is_running(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    long = SamplingParams(max_tokens=100, seed=3)
    prompts = prompts_of(5, 6, 7)
    engine.submit(Query(0, prompts[0], None, long))
    rows = []
    for number in (1, 2):
        for _ in range(3):
            assert engine.step() == []
        engine.submit(Query(number, prompts[number]))
        rows += collected(engine, [number])  # while the continuation goes on
    assert largest_error(tiny, prompts[1:], rows) <= TOLERANCE
    [drawn] = collected(engine, [0])
    assert len(drawn) == 100


def test_rows_are_the_callers_own(build: Any) -> None:
    engine = build()
    prompts = prompts_of(5, 9, 3)
    rows = answers(engine, prompts)
    kept = [row.clone() for row in rows]
    for row in answers(engine, prompts):
        row.fill_(7.0)
        assert row.untyped_storage().nbytes() == row.nbytes
        assert not row.is_inference()
        assert not row.requires_grad
    assert all(torch.equal(row, copy) for row, copy in zip(rows, kept, strict=True))


def test_logits_beyond_the_tokenizer_are_cut_before_normalising(build: Any) -> None:
    engine = build()
    assert (engine.vocabulary.size, engine.embedding_rows) == (TINY_VOCABULARY, TINY_LOGITS)
    [row] = answers(engine, prompts_of(5))
    assert row.shape == (TINY_VOCABULARY,)
    assert row.dtype == torch.float32
    assert abs(float(row.logsumexp(0))) <= 1e-5


def test_bfloat16_rows_are_float32_and_close(build: Any, tiny: TinyLlama) -> None:
    engine = build(dtype="bfloat16")
    rows = answers(engine, MIXED)
    assert {row.dtype for row in rows} == {torch.float32}
    # These weights are large on purpose; a trained model's rows come within 2e-2.
    assert largest_error(tiny, MIXED, rows) <= 0.15


def test_a_cached_prefix_is_computed_once(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    engine.cache_prefix(SHARED, None)
    computed = engine.statistics()["tokens_computed"]
    assert computed == len(SHARED)
    longer = [(*SHARED, token) for token in range(10)]
    assert largest_error(tiny, longer, answers(engine, longer)) <= TOLERANCE
    assert engine.statistics()["tokens_computed"] == computed + 10
    engine.clear_prefix_cache()
    assert largest_error(tiny, longer[:1], answers(engine, longer[:1])) <= TOLERANCE
    assert engine.statistics()["tokens_computed"] == computed + 10 + len(SHARED) + 1


def test_prefixes_are_kept_and_cleared_while_others_are_running(
    build: Any, tiny: TinyLlama
) -> None:
    engine = build()
    prompts = prompts_of(5, 6)
    engine.submit(Query(0, prompts[0], None, SamplingParams(max_tokens=8, seed=3)))
    engine.step()
    engine.cache_prefix(SHARED, None)
    engine.submit(Query(1, prompts[1]))
    engine.clear_prefix_cache()
    assert engine.free_tokens == engine.statistics()["kv_tokens"]
    drawn, row = collected(engine, [0, 1])
    assert len(drawn) == 8
    assert largest_error(tiny, prompts[1:], [row]) <= TOLERANCE


def test_a_pass_that_raises_fails_its_queries_and_no_later_ones(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    prompts = prompts_of(5, 6, 7)
    assert largest_error(tiny, prompts, answers(engine, prompts)) <= TOLERANCE

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(engine.model), "forward", broken)
    engine.submit(Query(10, prompts[0]))
    engine.submit(Query(11, prompts[1], None, SamplingParams(max_tokens=3)))
    assert list(map(str, collected(engine, [10, 11]))) == ["out of memory"] * 2
    monkeypatch.undo()
    assert engine.free_tokens == engine.statistics()["kv_tokens"]
    assert largest_error(tiny, prompts, answers(engine, prompts)) <= TOLERANCE


def test_a_pass_that_raises_during_a_call_fails_the_queries_that_run(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    prompts = prompts_of(5, 6, 7)
    forward = type(engine.model).forward
    passes = itertools.count()

    def breaks_once(*arguments: Any, **options: Any) -> Any:
        if next(passes) == 0:
            raise RuntimeError("out of memory")
        return forward(*arguments, **options)

    monkeypatch.setattr(type(engine.model), "forward", breaks_once)
    engine.submit(Query(10, prompts[0]))
    engine.submit(Query(11, prompts[1], None, SamplingParams(max_tokens=3)))
    engine.clear_prefix_cache()  # which first runs what was submitted
    assert list(map(str, collected(engine, [10, 11]))) == ["out of memory"] * 2
    engine.submit(Query(12, prompts[0], None, SamplingParams(max_tokens=3)))
    engine.step()
    passes = itertools.count()
    engine.abort(12)  # which runs until nothing is left of it
    assert largest_error(tiny, prompts, answers(engine, prompts)) <= TOLERANCE


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_that_are_no_numbers_fail_their_own_request_alone(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    engine = build(disable_overlap_schedule=not overlap)
    prompts = prompts_of(5, 6, 7)
    drawing = SamplingParams(4, seed=1)
    forward = type(engine.model).forward

    def poisoned(self: Any, input_ids: Any, positions: Any, batch: Any, **more: Any) -> Any:
        output = forward(self, input_ids, positions, batch, **more)
        # The row of the prompt of 6 tokens, and what the one of 5 has after its first draw.
        for j, length in enumerate(batch.seq_lens.tolist()):
            if length == 6:
                output.next_token_logits[j, 3:5] = float("nan")
        return output

    monkeypatch.setattr(type(engine.model), "forward", poisoned)
    asked = [*prompts, (prompts[0], drawing), (prompts[1], drawing), (prompts[2], drawing)]
    first, row, last, *draws = answers(engine, asked)
    assert largest_error(tiny, [prompts[0], prompts[2]], [first, last]) <= TOLERANCE
    assert row.isnan().all()  # the core refuses it
    assert [isinstance(each, EvaluationError) for each in draws] == [True, True, False]
    assert "not a distribution" in str(draws[0])
    assert draws[2] == continuation(tiny, prompts[2], drawing)
    monkeypatch.undo()
    assert largest_error(tiny, prompts, answers(engine, prompts)) <= TOLERANCE
