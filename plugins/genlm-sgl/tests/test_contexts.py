"""Contexts that grow: their rows under caching, eviction and cancellation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import genlm
from genlm import EvaluationError, Query, TokenIdError, UnknownAdapterError
from genlm.plugin import TokenSequence
from genlm.testing import TINY_LOGITS
from genlm_sgl.conformance import TinyLlama

from .driving import TOLERANCE, answers, check, collected, largest_error, prompts_of
from .walks import Walk

ADAPTER_TOLERANCE = 1e-4
"""Maximum error with adapters; see test_adapters.py."""


def counters(engine: Any, *names: str) -> list[int]:
    figures = engine.statistics()
    return [figures[name] for name in names]


# -- rows -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_total_tokens": 300},
        {"max_total_tokens": 90, "max_running_requests": 3},
        {"chunked_prefill_size": 16},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_random_walks_of_contexts_get_right_rows(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    """Steps of one and several tokens, forks, siblings, parents, waits and aborts."""
    engine = build(**options)
    walk = Walk(engine, tiny, seed=1)
    walk.run(steps=60, population=12)
    assert walk.largest_error() <= TOLERANCE
    assert len(walk.answered) >= 300


@pytest.mark.parametrize(
    "options", [{}, {"max_loras_per_batch": 1, "max_total_tokens": 150}], ids=str
)
def test_random_walks_with_adapters_get_right_rows(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    engine = build(enable_lora=True, max_lora_rank=8, **options)
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    walk = Walk(engine, tiny, 3, adapters=(None, *tiny.adapters))
    walk.run(steps=40, population=12)
    assert walk.largest_error() <= ADAPTER_TOLERANCE


@pytest.mark.parametrize("options", [{"context_length": 48}, {"max_total_tokens": 48}])
def test_a_context_grows_to_the_end_of_the_window(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    engine = build(**options)
    assert engine.max_context == 48
    [whole] = prompts_of(48)
    for length in range(1, 49):
        check(engine, tiny, [whole[:length]])
    assert counters(engine, "tokens_computed") == [48]


def test_queries_that_no_model_can_answer_are_refused(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    [context] = prompts_of(5)
    check(engine, tiny, [context])
    for token in (TINY_LOGITS, 2**32 - 1, -1):
        with pytest.raises(TokenIdError):
            engine.submit(Query(1, (*context, token)))
        with pytest.raises(TokenIdError):
            engine.cache_prefix((*context, token), None)
    with pytest.raises(UnknownAdapterError):
        engine.submit(Query(1, (*context, 3), "red"))
    assert engine.step() == []


# -- costs ----------------------------------------------------------------------------


def test_contexts_that_grow_cost_a_token_and_share_one_pass(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    contexts = prompts_of(*range(5, 25))
    check(engine, tiny, contexts)
    forwards, computed = counters(engine, "forwards", "tokens_computed")
    for step in range(5):
        contexts = [(*context, (7 * step + len(context)) % 50) for context in contexts]
        with monkeypatch.context() as patched:  # the ids of a context are not collected
            patched.setattr(Query, "token_ids", property(lambda _: 1 / 0))
            rows = answers(engine, contexts)
        assert largest_error(tiny, contexts, rows) <= TOLERANCE
    assert counters(engine, "forwards", "tokens_computed") == [forwards + 5, computed + 5 * 20]


def test_forks_jumps_and_repeats_compute_what_is_new(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    [context] = prompts_of(20)
    check(engine, tiny, [context])
    for contexts, passes, tokens in (
        ([(*context, 6, 7, 8)], 1, 3),
        ([(*context, 6, 7, 8)], 1, 1),  # the last token again
        ([context], 1, 1),
        ([(*context, *range(20, 28)), (*context, 6, 9)], 1, 9),
        ([(*context, token) for token in range(10)], 1, 10),
        ([(*context, *range(30, 60)), (*context, 9, 3)], 2, 31),  # an extend and a decode
    ):
        before = counters(engine, "forwards", "tokens_computed")
        check(engine, tiny, contexts)
        after = counters(engine, "forwards", "tokens_computed")
        grown = [now - then for now, then in zip(after, before, strict=True)]
        assert grown == [passes, tokens], contexts


@pytest.mark.parametrize("reads_states", [True, False])
def test_a_context_within_a_prompt_of_the_same_pass(
    build: Any, tiny: TinyLlama, reads_states: bool
) -> None:
    """SGLang computes the logits of the last token of an extend only."""
    engine = build()
    engine._choice.path.forward._reads_states = reads_states
    [prompt] = prompts_of(60)
    check(engine, tiny, [prompt, prompt[:30], prompt[:45], (*prompt[:45], 3)])
    assert counters(engine, "tokens_computed") == [60 + 1]


def test_one_token_after_many_is_decoded(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's attention on a CPU pads the queries of an extend to the whole sequence."""
    engine = build()
    queries: list[int] = []
    scaled = torch.nn.functional.scaled_dot_product_attention

    def counting(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        queries.append(query.shape[-2])
        return scaled(query, *arguments, **options)

    from sglang.srt.layers.attention import torch_native_backend

    monkeypatch.setattr(torch_native_backend, "scaled_dot_product_attention", counting)
    contexts = prompts_of(40, 50, 60)
    check(engine, tiny, contexts)
    assert set(queries) == {40, 50, 60}
    queries.clear()
    check(engine, tiny, [(*context, 3) for context in contexts])
    check(engine, tiny, [(*context, 4, 5) for context in contexts])
    assert set(queries) == {1}


# -- programs -------------------------------------------------------------------------


def test_thousands_of_contexts_are_answered_in_a_small_cache(
    build: Any, tiny: TinyLlama
) -> None:
    engine = build(max_running_requests=32, max_total_tokens=2048)
    contexts = [(i % 290, i // 290, 5) for i in range(2000)]
    rows = answers(engine, contexts)
    assert largest_error(tiny, contexts[::50], rows[::50]) <= TOLERANCE
    check(engine, tiny, [(*context, 9) for context in contexts[::100]])


def test_a_released_context_is_computed_again(build: Any, tiny: TinyLlama) -> None:
    engine = build(max_total_tokens=64)
    contexts = prompts_of(25, 26)
    check(engine, tiny, contexts)
    engine.release_context(None, TokenSequence.of(contexts[1]).key)
    engine.release_context("red", b"unknown")
    check(engine, tiny, prompts_of(20, seed=3))  # evicts the released one
    [computed] = counters(engine, "tokens_computed")
    check(engine, tiny, [(*contexts[0], 4)])
    assert counters(engine, "tokens_computed") == [computed + 1]
    check(engine, tiny, contexts)


def test_another_adapter_of_the_same_name_gets_its_own_rows(
    build: Any, tiny: TinyLlama
) -> None:
    engine = build(enable_lora=True, max_lora_rank=8)
    [context] = prompts_of(9)
    for adapter in ("red", "blue"):
        engine.add_adapter("colour", tiny.adapters[adapter])
        for ids in (context, (*context, 4)):
            [row] = answers(engine, [ids], "colour")
            assert (row - tiny.logprobs(ids, adapter)).abs().max() <= ADAPTER_TOLERANCE
        engine.remove_adapter("colour")


def test_programs_get_right_rows_after_cancellations_and_a_reset(tiny: TinyLlama) -> None:
    options = {"device": "cpu", "max_total_tokens": 1024, "max_running_requests": 8}
    generator = random.Random(5)

    async def particle(lm: genlm.AsyncLM, context: list[int], steps: int) -> None:
        for _ in range(steps):
            row = await lm.next_token_logprobs(context)
            assert (row - tiny.logprobs(tuple(context))).abs().max() <= TOLERANCE
            context.append(int(row.exp().multinomial(1)))

    async def program(lm: genlm.AsyncLM) -> None:
        torch.manual_seed(1)
        contexts = [list(prompt) for prompt in prompts_of(*range(3, 23))]
        await asyncio.gather(*[particle(lm, context, 5) for context in contexts])
        tasks = [asyncio.create_task(particle(lm, context, 50)) for context in contexts]
        await asyncio.sleep(0)
        await lm.next_token_logprobs(contexts[0][:2])
        for task in generator.sample(tasks, 10):
            task.cancel()
        await lm.next_token_logprobs(contexts[1][:2])
        lm.cancel_all()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {type(result) for result in ended}
        assert kinds <= {asyncio.CancelledError, genlm.QueryResetError, type(None)}, kinds
        assert len(kinds) >= 2
        await asyncio.gather(*[particle(lm, context, 5) for context in contexts])

    with genlm.load_model(tiny.path, "sgl", engine_opts=options) as lm:
        asyncio.run(program(lm))
        lm.clear_kv_cache()
        assert lm.statistics().engine["kv_tokens"] == 0


# -- failures -------------------------------------------------------------------------


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of memory")


def test_a_pass_that_raises_fails_its_queries_and_no_later_ones(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    contexts = prompts_of(5, 6, 70)
    check(engine, tiny, contexts[:2])
    with monkeypatch.context() as patched:
        patched.setattr(type(engine.model), "forward", broken)
        errors = answers(engine, [(*contexts[0], 3), contexts[2]])
        assert list(map(str, errors)) == ["out of memory"] * 2
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.cache_prefix(contexts[2], None)
    check(engine, tiny, [*((*context, 3) for context in contexts), contexts[2]])


def test_logits_that_are_no_numbers_fail_their_own_query_alone(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    prompts = prompts_of(15, 16, 17)
    forward: Callable[..., Any] = type(engine.model).forward

    def poisoned(self: Any, input_ids: Any, positions: Any, batch: Any, **more: Any) -> Any:
        output = forward(self, input_ids, positions, batch, **more)
        for row, length in enumerate(batch.seq_lens.tolist()):
            if length == 16:
                output.next_token_logits[row, 3:5] = float("nan")
        return output

    with monkeypatch.context() as patched:
        patched.setattr(type(engine.model), "forward", poisoned)
        first, row, last = answers(engine, prompts)
    assert largest_error(tiny, [prompts[0], prompts[2]], [first, last]) <= TOLERANCE
    assert isinstance(row, EvaluationError)
    check(engine, tiny, prompts)


def test_a_cancelled_query_leaves_nothing(build: Any, tiny: TinyLlama) -> None:
    engine = build(chunked_prefill_size=16)
    prompts = prompts_of(40, 12, 50)
    for number, prompt in enumerate(prompts):
        engine.submit(Query(number, prompt))
    for number in (0, 2, 99):
        engine.abort(number)
    [row] = collected(engine, [1])
    assert largest_error(tiny, [prompts[1]], [row]) <= TOLERANCE
    assert engine.step() == []
