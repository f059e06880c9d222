"""Contexts that stay in SGLang: right rows whatever becomes of them; an end to each wait."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import genlm
from genlm import ContextLengthError, Query, SamplingParams, TokenIdError, UnknownAdapterError
from genlm.plugin import TokenSequence
from genlm.testing import TINY_VOCABULARY
from genlm_sgl.conformance import TinyLlama

from .driving import TOLERANCE, answers, collected, continuation, largest_error, prompts_of
from .walks import Walk, check_nothing_is_lost

ADAPTER_TOLERANCE = 1e-4
"""As in test_adapters.py."""

OVERLAP = {"disable_overlap_schedule": False}
UNMIXED = {"enable_mixed_chunk": False}


def counters(engine: Any, *names: str) -> list[int]:
    figures = engine.statistics()
    return [figures[name] for name in names]


def ask(
    engine: Any, contexts: Sequence[tuple[int, ...]], adapter: str | None = None
) -> list[Any]:
    """Rows of contexts, as a program with handles asks for them."""
    for number, context in enumerate(contexts):
        engine.submit(Query(number, TokenSequence.of(context), adapter))
    return collected(engine, range(len(contexts)))


def check(engine: Any, tiny: TinyLlama, contexts: Sequence[tuple[int, ...]]) -> None:
    assert largest_error(tiny, contexts, ask(engine, contexts)) <= TOLERANCE


# -- rows -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        OVERLAP,
        UNMIXED,
        UNMIXED | OVERLAP,
        {"page_size": 16},
        {"page_size": 16, "max_total_tokens": 512, "chunked_prefill_size": 32, **OVERLAP},
        {"max_total_tokens": 300},
        {"max_total_tokens": 300, **OVERLAP, **UNMIXED},
        {"max_total_tokens": 90},
        {"max_total_tokens": 90, "max_running_requests": 3, **OVERLAP},
        {"max_running_requests": 4},
        {"max_running_requests": 4, **OVERLAP, **UNMIXED},
        {"chunked_prefill_size": 16},
        {"chunked_prefill_size": 16, **OVERLAP, **UNMIXED},
        {"disable_radix_cache": True, "max_total_tokens": 600},
        {"schedule_policy": "lpm"},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_random_walks_of_contexts_get_right_rows(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    """Steps of one token and of several, forks, siblings, parents, waits, draws, aborts ..."""
    engine = build(**options)
    walk = Walk(engine, tiny, seed=1)
    walk.run(steps=60, population=12)
    assert walk.largest_error() <= TOLERANCE
    assert len(walk.answered) >= 300
    check_nothing_is_lost(engine)
    assert counters(engine, "contexts_continued")[0] > 0
    assert counters(engine, "contexts_ended")[0] > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_loras_per_batch": 2, **OVERLAP},
        {"max_loras_per_batch": 1, **UNMIXED},
        {"max_loras_per_batch": 1, "max_total_tokens": 150, **OVERLAP},
        {"max_loras_per_batch": 1, "max_total_tokens": 100, "max_running_requests": 5},
        {"max_loras_per_batch": 2, "max_total_tokens": 400, "page_size": 16},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "plain",
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
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_contexts_are_computed_again(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """SGLang's own test switch takes a request out of every other decode."""
    engine = build(disable_overlap_schedule=not overlap, **UNMIXED)
    from sglang.srt.managers import schedule_batch, scheduler

    retracted: list[int] = []
    retract = schedule_batch.ScheduleBatch.retract_decode

    def counting(batch: Any) -> Any:
        found = retract(batch)
        retracted.append(len(found[0]))
        return found

    monkeypatch.setattr(schedule_batch.ScheduleBatch, "retract_decode", counting)
    monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler, "TEST_RETRACT_INTERVAL", 2)
    walk = Walk(engine, tiny, 4)
    walk.run(steps=40, population=12)
    assert sum(retracted) >= 5
    assert walk.largest_error() <= TOLERANCE
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("options", [{}, OVERLAP, {"page_size": 16, "max_total_tokens": 96}])
def test_a_context_grows_to_the_end_of_the_window(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    engine = build(**({"context_length": 48} | options))
    longest = engine.max_context
    [whole] = prompts_of(longest + 1)
    rows = [ask(engine, [whole[:length]])[0] for length in range(1, longest + 1)]
    contexts = [whole[:length] for length in range(1, longest + 1)]
    assert largest_error(tiny, contexts, rows) <= TOLERANCE
    assert counters(engine, "contexts_continued") == [longest - 1]
    with pytest.raises(ContextLengthError):
        engine.submit(Query(0, TokenSequence.of(whole)))
    check_nothing_is_lost(engine)


def test_queries_that_no_model_can_answer_are_refused_though_their_parents_stay(
    build: Any,
) -> None:
    engine = build()
    [context] = prompts_of(5)
    ask(engine, [context])
    for token in (TINY_VOCABULARY, 2**32 - 1, -1):
        with pytest.raises(TokenIdError):
            engine.submit(Query(1, (*context, token)))
    with pytest.raises(UnknownAdapterError):
        engine.submit(Query(1, (*context, 3), "red"))
    assert engine.step() == []
    check_nothing_is_lost(engine)


# -- costs ----------------------------------------------------------------------------


def test_contexts_that_grow_cost_a_token_and_share_one_pass(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    contexts = prompts_of(*range(5, 25))
    check(engine, tiny, contexts)
    batches, computed = counters(engine, "batches", "tokens_computed")
    for step in range(5):
        contexts = [(*context, (7 * step + len(context)) % 50) for context in contexts]
        with monkeypatch.context() as patched:  # the ids of a context are not put together
            patched.setattr(Query, "token_ids", property(lambda _: 1 / 0))
            rows = ask(engine, contexts)
        assert largest_error(tiny, contexts, rows) <= TOLERANCE
    assert counters(engine, "batches", "tokens_computed") == [batches + 5, computed + 5 * 20]
    names = ("contexts_resident", "contexts_continued", "contexts_ended")
    assert counters(engine, *names) == [20, 100, 0]
    assert engine.statistics()["contexts"] == "kept"


@pytest.mark.parametrize("options", [{}, OVERLAP])
def test_forks_and_those_that_continue_share_one_pass(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    engine = build(**options)
    contexts = prompts_of(30, 40)
    check(engine, tiny, contexts)
    for length in range(3):  # tokens that the radix cache does not have yet
        contexts = [(*context, length) for context in contexts]
        check(engine, tiny, contexts)
    batches, computed, continued = counters(
        engine, "batches", "tokens_computed", "contexts_continued"
    )
    forks = [(*context, token) for context in contexts for token in range(10)]
    check(engine, tiny, forks)
    assert counters(engine, "tokens_computed", "contexts_continued") == [
        computed + 20,
        continued + 2,
    ]
    assert counters(engine, "batches")[0] == batches + 1
    late = [(*context, 77) for context in contexts]  # the first ones have gone on
    check(engine, tiny, [(*fork, 1) for fork in forks])
    check(engine, tiny, [(*fork, 1, 2) for fork in forks])
    [computed] = counters(engine, "tokens_computed")
    check(engine, tiny, late)
    assert counters(engine, "tokens_computed") == [computed + 2]


def test_jumps_repeats_and_draws_compute_what_is_new(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    [context] = prompts_of(20)
    check(engine, tiny, [context])
    context = (*context, 5)
    check(engine, tiny, [context])
    for asked, tokens in (
        ((*context, 6, 7, 8), 3),
        ((*context, 6, 7, 8), 1),  # the last token again, as SGLang wants
        (context, 1),
        ((*context, *range(20, 28)), 8),
    ):
        [computed] = counters(engine, "tokens_computed")
        check(engine, tiny, [asked])
        assert counters(engine, "tokens_computed") == [computed + tokens]
    [computed] = counters(engine, "tokens_computed")
    params = SamplingParams(4, seed=1)
    assert answers(engine, [(context, params)]) == [continuation(tiny, context, params)]
    assert counters(engine, "tokens_computed") == [computed + 4]  # its last and three draws


def test_the_radix_cache_never_has_tokens_that_were_replaced(
    build: Any, tiny: TinyLlama
) -> None:
    """Id 0 stands where a context has its next token later."""
    engine = build()
    [context] = prompts_of(20)
    check(engine, tiny, [context])
    context = (*context, 3)
    check(engine, tiny, [context])
    check(engine, tiny, [(*context, 5, 6)])  # shares the tokens so far
    engine.submit(Query(9, TokenSequence.of((*context, 7))))
    engine.abort(9)
    check(engine, tiny, [(*context, 8)])
    engine.keeps_contexts = False  # the radix cache takes them all
    check(engine, tiny, [(*context, token, 4) for token in (0, 5, 7, 8)])


def test_only_one_of_equal_contexts_stays(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    [context] = prompts_of(20)
    check(engine, tiny, [context] * 5)
    check(engine, tiny, [context])
    assert counters(engine, "contexts_resident") == [1]
    check_nothing_is_lost(engine)


# -- nobody waits for ever ------------------------------------------------------------


class Callers:
    """As many callers, each of which extends its context as soon as it has its row."""

    def __init__(
        self,
        engine: Any,
        tiny: TinyLlama,
        count: int,
        adapters: Sequence[str | None] = (None,),
    ) -> None:
        self._engine, self._tiny = engine, tiny
        self._contexts = prompts_of(*[3 + i % 5 for i in range(count)])
        self._adapters = [adapters[i % len(adapters)] for i in range(count)]
        self.answered = [0] * count
        self.others = 0
        for caller in range(count):
            self._ask(caller)

    def _ask(self, caller: int) -> None:
        context = TokenSequence.of(self._contexts[caller])
        self._engine.submit(Query(caller, context, self._adapters[caller]))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for completion in self._engine.step():
                assert completion.error is None, completion.error
                caller = completion.query_id
                if caller >= len(self.answered):
                    self.others += 1
                    continue
                expected = self._tiny.logprobs(self._contexts[caller], self._adapters[caller])
                assert (completion.result - expected).abs().max() <= ADAPTER_TOLERANCE
                self.answered[caller] += 1
                grown = (*self._contexts[caller], caller)
                self._contexts[caller] = grown if len(grown) < 25 else grown[:4]
                self._ask(caller)

    def stop(self) -> None:
        for caller in range(len(self.answered)):
            self._engine.abort(caller)
        check_nothing_is_lost(self._engine)


@pytest.mark.parametrize(
    "options",
    [
        {"max_running_requests": 4},
        {"max_running_requests": 4, **OVERLAP},
        {"max_running_requests": 1, **UNMIXED},
        {"max_total_tokens": 120},
        {"max_total_tokens": 120, **OVERLAP, **UNMIXED},
        {"max_total_tokens": 160, "page_size": 16, "chunked_prefill_size": 16},
        {"disable_radix_cache": True, "max_total_tokens": 120},
    ],
    ids=str,
)
def test_more_callers_than_there_is_room_for_are_all_answered(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    """Those who have a place ask again at once, and would keep it for ever."""
    callers = Callers(build(**options), tiny, 12)
    callers.run(150)
    assert min(callers.answered) >= max(callers.answered) / 4 >= 1
    callers.stop()


@pytest.mark.parametrize(
    "options",
    [
        {"max_loras_per_batch": 1},
        {"max_loras_per_batch": 1, **OVERLAP, **UNMIXED},
        {"max_loras_per_batch": 2, "max_running_requests": 4},
        {"max_loras_per_batch": 1, "max_total_tokens": 100},
    ],
    ids=str,
)
def test_callers_with_more_adapters_than_fit_a_batch_are_all_answered(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    engine = build(enable_lora=True, max_lora_rank=8, **options)
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    callers = Callers(engine, tiny, 9, (None, *tiny.adapters))
    callers.run(150)
    assert min(callers.answered) >= max(callers.answered) / 4 >= 1
    callers.stop()


@pytest.mark.parametrize("overlap", [False, True])
def test_contexts_that_wait_for_their_adapter_give_up_their_memory(
    build: Any, tiny: TinyLlama, overlap: bool
) -> None:
    """One batch serves one adapter, and three contexts fill the KV cache."""
    engine = build(
        enable_lora=True,
        max_lora_rank=8,
        max_loras_per_batch=1,
        max_total_tokens=64,
        disable_overlap_schedule=not overlap,
    )
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    *full, grown = prompts_of(20, 20, 18)
    contexts = {"red": full[0], "blue": full[1], None: grown}
    for adapter, context in contexts.items():
        ask(engine, [context], adapter)
    for token in range(6):
        contexts[None] = (*contexts[None], token)
        ask(engine, [contexts[None]])
    assert engine.free_tokens == 0
    assert counters(engine, "contexts_resident", "contexts_ended") == [3, 0]
    for number, (adapter, context) in enumerate(contexts.items()):
        engine.submit(Query(number, TokenSequence.of((*context, 9)), adapter))
    for row, (adapter, context) in zip(
        collected(engine, range(3)), contexts.items(), strict=True
    ):
        expected = tiny.logprobs((*context, 9), adapter)
        assert (row - expected).abs().max() <= ADAPTER_TOLERANCE
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("options", [UNMIXED, UNMIXED | OVERLAP])
def test_contexts_grow_while_new_prompts_arrive_at_every_step(
    build: Any, tiny: TinyLlama, options: dict[str, Any]
) -> None:
    """SGLang computes prompts first."""
    engine = build(**options)
    callers = Callers(engine, tiny, 3)
    for number, prompt in enumerate(prompts_of(*[9] * 60, seed=8)):
        engine.submit(Query(100 + number, prompt))
        callers.run(1)
    assert min(callers.answered) >= 15
    assert callers.others >= 15
    for number in range(100, 160):
        engine.abort(number)
    callers.stop()


@pytest.mark.parametrize("overlap", [False, True])
def test_thousands_of_contexts_leave_as_many_as_there_is_room_for(
    build: Any, tiny: TinyLlama, overlap: bool
) -> None:
    engine = build(
        max_running_requests=32, max_total_tokens=2048, disable_overlap_schedule=not overlap
    )
    contexts = [(i % 290, i // 290, 5) for i in range(2000)]
    rows = ask(engine, contexts)
    assert largest_error(tiny, contexts[::50], rows[::50]) <= TOLERANCE
    assert counters(engine, "contexts_resident")[0] <= 32
    check(engine, tiny, [(*context, 9) for context in contexts[::100]])
    check_nothing_is_lost(engine)


def test_a_draw_gets_the_memory_of_contexts_that_are_idle(build: Any, tiny: TinyLlama) -> None:
    engine = build(max_total_tokens=128)
    check(engine, tiny, prompts_of(*[20] * 5))
    asked = [(prompts_of(30, seed=9)[0], SamplingParams(80, seed=3))]
    assert answers(engine, asked) == [continuation(tiny, *asked[0])]
    assert counters(engine, "contexts_ended")[0] >= 4
    check_nothing_is_lost(engine)


def test_a_context_that_grows_gets_the_memory_of_those_that_are_idle(
    build: Any, tiny: TinyLlama
) -> None:
    engine = build(max_total_tokens=64)
    first, *others = prompts_of(18, 18, 18)
    check(engine, tiny, [first])
    check(engine, tiny, others)
    for token in range(20):
        first = (*first, token)
        check(engine, tiny, [first])
    assert counters(engine, "contexts_continued") == [20]
    check_nothing_is_lost(engine)


# -- ends -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, OVERLAP, UNMIXED], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("added", [(7,), (6, 8)], ids=["sibling", "child"])
def test_an_aborted_token_is_taken_back_or_computed_and_the_context_goes_on(
    build: Any, tiny: TinyLlama, options: dict[str, Any], steps: int, added: tuple[int, ...]
) -> None:
    engine = build(**options)
    [context, other] = prompts_of(20, 30)
    check(engine, tiny, [context])
    engine.submit(Query(50, TokenSequence.of((*context, 6))))
    engine.submit(Query(51, TokenSequence.of(other)))  # a prefill goes before it, if unmixed
    answered = {each.query_id for _ in range(steps) for each in engine.step()}
    engine.abort(50)
    collected(engine, sorted({51} - answered))
    check(engine, tiny, [(*context, *added)])
    check(engine, tiny, [(*context, 6)])
    check(engine, tiny, [(*context, 6, 8), (*context, 7, 9)])
    assert counters(engine, "contexts_continued")[0] >= 2
    check_nothing_is_lost(engine)


def test_a_new_context_that_is_aborted_leaves_nothing(build: Any, tiny: TinyLlama) -> None:
    engine = build(chunked_prefill_size=16)
    for steps in range(4):
        engine.submit(Query(60, prompts_of(40)[0]))
        for _ in range(steps):
            engine.step()
        engine.abort(60)
        assert engine.step() == []
        check_nothing_is_lost(engine)


def test_a_released_context_ends_unless_it_is_used(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    contexts = prompts_of(5, 6, 7)
    check(engine, tiny, contexts)
    keys = [TokenSequence.of(context).key for context in contexts]
    engine.release_context(None, keys[0])
    engine.release_context(None, keys[0])
    engine.release_context("red", keys[1])
    engine.release_context(None, b"unknown")
    assert counters(engine, "contexts_resident", "contexts_ended") == [2, 0]
    engine.release_context(None, keys[1])
    engine.submit(Query(9, TokenSequence.of((*contexts[1], 4))))
    engine.release_context(None, keys[1])  # its resident goes on already
    [row] = collected(engine, [9])
    assert largest_error(tiny, [(*contexts[1], 4)], [row]) <= TOLERANCE
    assert counters(engine, "contexts_resident", "contexts_continued") == [2, 1]
    assert counters(engine, "contexts_ended") == [1]
    check(engine, tiny, contexts)
    check_nothing_is_lost(engine)


def test_prefixes_are_cached_and_cleared_among_contexts_that_stay(
    build: Any, tiny: TinyLlama
) -> None:
    engine = build()
    contexts = prompts_of(30, 31)
    check(engine, tiny, contexts)
    contexts = [(*context, 3) for context in contexts]
    check(engine, tiny, contexts)
    [computed] = counters(engine, "tokens_computed")
    engine.cache_prefix((*contexts[0], 8), None)  # shares what the context has
    assert counters(engine, "tokens_computed", "contexts_resident") == [computed + 1, 2]
    engine.submit(Query(5, TokenSequence.of((*contexts[1], 8))))
    engine.clear_prefix_cache()  # after what runs
    assert engine.free_tokens == engine.statistics()["kv_tokens"]
    rows = collected(engine, [5])
    assert largest_error(tiny, [(*contexts[1], 8)], rows) <= TOLERANCE
    assert counters(engine, "contexts_resident") == [0]
    check(engine, tiny, [(*context, 8, 9) for context in contexts])
    check_nothing_is_lost(engine)


def test_a_pass_that_raises_ends_all_contexts(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    contexts = prompts_of(5, 6, 7)
    check(engine, tiny, contexts)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(engine.model), "forward", broken)
        engine.submit(Query(10, (*contexts[0], 3)))
        assert list(map(str, collected(engine, [10]))) == ["out of memory"]
    assert counters(engine, "contexts_resident") == [0]
    assert engine.free_tokens == engine.statistics()["kv_tokens"]
    check(engine, tiny, [(*context, 3) for context in contexts])
    check_nothing_is_lost(engine)


def test_another_adapter_of_the_same_name_gets_its_own_rows(
    build: Any, tiny: TinyLlama
) -> None:
    engine = build(enable_lora=True, max_lora_rank=8)
    [context] = prompts_of(9)
    for adapter in ("red", "blue"):
        engine.add_adapter("colour", tiny.adapters[adapter])
        for asked in (context, (*context, 4)):
            [row] = ask(engine, [asked], "colour")
            assert (row - tiny.logprobs(asked, adapter)).abs().max() <= ADAPTER_TOLERANCE
        engine.remove_adapter("colour")
        assert counters(engine, "contexts_resident") == [0]
    check_nothing_is_lost(engine)


# -- where contexts do not stay -------------------------------------------------------


def test_contexts_stay_only_if_they_are_to(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    contexts = prompts_of(9, 12)
    for keeps, found in ((False, "not kept: keep_contexts=False"), (True, "kept")):
        engine.keeps_contexts = keeps
        assert engine.statistics()["contexts"] == found
        check(engine, tiny, contexts)
        check(engine, tiny, [(*context, 3) for context in contexts])
    assert counters(engine, "contexts_resident", "contexts_continued") == [2, 2]
    engine.keeps_contexts = False
    assert counters(engine, "contexts_resident") == [0]
    check_nothing_is_lost(engine)


def test_where_they_were_not_tested_each_step_is_a_request(build: Any, tiny: TinyLlama) -> None:
    engine = build(enable_priority_scheduling=True)
    assert engine.statistics()["contexts"] == "not kept: enable_priority_preemption"
    assert not engine.keeps_contexts
    contexts = prompts_of(9, 12)
    for token in (3, 4):
        check(engine, tiny, contexts)
        contexts = [(*context, token) for context in contexts]
    engine.keeps_contexts = True
    engine.release_context(None, TokenSequence.of(contexts[0]).key)
    assert not engine.keeps_contexts
    assert counters(engine, "contexts_resident", "contexts_continued") == [0, 0]
    check_nothing_is_lost(engine)


# -- programs -------------------------------------------------------------------------


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
        kinds = {type(each) for each in ended}
        assert kinds <= {asyncio.CancelledError, genlm.QueryResetError, type(None)}, kinds
        assert len(kinds) >= 2
        await asyncio.gather(*[particle(lm, context, 5) for context in contexts])

    with genlm.load_model(tiny.path, "sgl", engine_opts=options) as lm:
        asyncio.run(program(lm))
        assert lm.statistics().engine["contexts_continued"] > 0
        lm.clear_kv_cache()
        assert lm.statistics().engine["contexts_resident"] == 0


# -- the attention on the CPU ---------------------------------------------------------


def attention(engine: Any) -> Any:
    return engine._api._scheduler.tp_worker.model_runner.attn_backend


def test_extends_of_one_token_run_the_decode_kernel(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    engine.keeps_contexts = False
    queries: list[int] = []
    scaled = torch.nn.functional.scaled_dot_product_attention

    def counting(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        queries.append(query.shape[-2])
        return scaled(query, *arguments, **options)

    module = type(attention(engine)).forward_extend.__globals__
    monkeypatch.setitem(module, "scaled_dot_product_attention", counting)
    contexts = prompts_of(40, 50, 60)
    check(engine, tiny, contexts)
    assert set(queries) == {40, 50, 60}
    queries.clear()
    check(engine, tiny, [(*context, 3) for context in contexts])
    assert set(queries) == {1}
    queries.clear()
    grown = [(*contexts[0], 5), *prompts_of(7, seed=3), (*contexts[1], 5, 6), (*contexts[2], 7)]
    check(engine, tiny, grown)
    assert set(queries) == {1, 7, 52}


@pytest.mark.parametrize("name", ["_run_sdpa_forward_extend", "_run_sdpa_forward_decode"])
def test_changed_code_of_the_attention_is_not_touched_and_warned_of(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    build().close()  # imports SGLang
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    original: Callable[..., Any] = getattr(TorchNativeAttnBackend, name)

    def another(self: Any, *arguments: Any, **options: Any) -> Any:
        return original(self, *arguments, **options)

    monkeypatch.setattr(TorchNativeAttnBackend, name, another)
    with pytest.warns(RuntimeWarning, match=rf"TorchNativeAttnBackend\.{name} of SGLang 0\.5"):
        engine = build()
    assert vars(attention(engine)).get("_run_sdpa_forward_extend") is None
    contexts = prompts_of(9, 12)
    check(engine, tiny, contexts)
    check(engine, tiny, [(*context, 3) for context in contexts for _ in range(2)])


def test_known_code_gives_no_warning(build: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "_run_sdpa_forward_extend" in vars(attention(build()))


def test_contexts_that_are_computed_when_they_are_not_kept_any_more_end(
    build: Any, tiny: TinyLlama
) -> None:
    engine = build()
    prompts = prompts_of(5, 9, 12)
    for number, prompt in enumerate(prompts):
        engine.submit(Query(number, prompt))
    engine.keeps_contexts = False
    assert largest_error(tiny, prompts, collected(engine, range(3))) <= TOLERANCE
    assert engine.statistics()["contexts_resident"] == 0
