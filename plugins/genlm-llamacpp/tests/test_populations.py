"""Populations on sequences of llama.cpp, against unbatched forward passes of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from population_programs import run_population_programs

from genlm import AsyncLM, OutputCache, PopulationError
from genlm_llamacpp.conformance import TinyGguf
from genlm_llamacpp.context import CacheFullError, LlamaContext
from genlm_llamacpp.engine import LlamaCppEngine

from .conftest import Make, check_memory

TOLERANCE = {"llama": 1e-4, "gemma2": 4e-3, "mamba": 1e-4}

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "all fit": ("llama", {}),
    "one sequence": ("llama", {"n_seq_max": 1}),
    "few sequences": ("llama", {"n_seq_max": 5}),
    "few cells": ("llama", {"n_ctx": 256, "n_batch": 7}),
    "divided cache": ("llama", {"n_seq_max": 8, "kv_unified": False}),
    "windows": ("gemma2", {"n_ctx": 256, "n_batch": 16, "n_ubatch": 8}),
    "recurrent": ("mamba", {"n_seq_max": 5}),
}


@pytest.fixture(autouse=True)
def small_populations_as_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaCppEngine, "smallest_group", 2)


def used(lm: AsyncLM) -> int:
    """Return the number of sequences with tokens after the release of dropped contexts."""
    lm._scheduler.run(lambda _: None)  # contexts are released after calls
    return lm._scheduler.run(lambda engine: engine._sequences.used)


@pytest.mark.parametrize("name", SETTINGS)
def test_members_have_the_rows_of_their_sequences(name: str, make: Make) -> None:
    family, options = SETTINGS[name]
    model = make(family)
    engine = model.engine(**options)
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        for seed in range(3):
            run_population_programs(
                lm, model.logprobs, seed=seed, programs=2, tolerance=TOLERANCE[family]
            )
            if family != "mamba":
                lm._scheduler.run(check_memory)


class Calls:
    """Counts the tokens of each `llama_decode`, and the copies of sequences."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        self.copies = 0
        decode, copy = LlamaContext.decode, LlamaContext.copy

        def counted_decode(own: Any, batch: Any, part: Any) -> Any:
            self.tokens.append(part.end - part.first)
            return decode(own, batch, part)

        def counted_copy(own: Any, source: int, target: int, length: int) -> None:
            self.copies += 1
            copy(own, source, target, length)

        monkeypatch.setattr(LlamaContext, "decode", counted_decode)
        monkeypatch.setattr(LlamaContext, "copy", counted_copy)


def test_unique_children_continue_and_others_are_copied(
    llama: TinyGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    engine = llama.engine()
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        population = lm.population(tuple(range(20)), 8)
        population.next_token_logprobs_sync()
        for step, copies in enumerate([7, 0, 0]):
            calls.tokens, calls.copies = [], 0
            population = population.extend(np.arange(8) + 100 + step)
            population.next_token_logprobs_sync()
            assert (calls.tokens, calls.copies) == ([8], copies)
        population = population[[0, 0, 0, 3, 3, 5, 5, 7]]
        calls.tokens, calls.copies = [], 0
        population = population.extend(np.arange(8) + 50)
        rows = population.next_token_logprobs_sync()
        assert (calls.tokens, calls.copies) == ([8], 4)
        expected = torch.stack([llama.logprobs(each.token_ids) for each in population])
        torch.testing.assert_close(rows.double(), expected.double(), atol=1e-4, rtol=0)
        lm._scheduler.run(check_memory)
        assert used(lm) == 8  # those that nobody continued are free


def test_members_that_wait_are_not_computed_again(
    llama: TinyGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    engine = llama.engine()
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        population = lm.population(tuple(range(20)), 4).extend(np.arange(4) + 100)
        population.draw_sync()
        for step in range(4):
            tokens = np.full(4, 7)
            tokens[step % 2 :: 2] = -1
            population, calls.tokens = population.extend(tokens), []
            members = population[1 - step % 2 :: 2]
            rows = members.next_token_logprobs_sync()
            assert calls.tokens == [2]
            expected = torch.stack([llama.logprobs(each.token_ids) for each in members])
            torch.testing.assert_close(rows.double(), expected.double(), atol=1e-4, rtol=0)


def test_a_population_outlives_the_division_of_its_cache(llama: TinyGguf) -> None:
    engine = llama.engine(n_ctx=1024)
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        population = lm.population([5, 6, 7], 6).extend(range(6))
        population.next_token_logprobs_sync()
        lm.clear_kv_cache()
        lm.batch_next_token_logprobs_sync([[i, *range(20 * i, 20 * i + 20)] for i in range(4)])
        assert engine._context.parts == 4
        later = population[[0, 3]].extend([8, 9])  # fits into the parts
        for members, parts in ((later, 4), (population, 0)):
            rows = members.next_token_logprobs_sync()
            assert engine._context.parts == parts
            lm._scheduler.run(check_memory)
            for row, context in zip(rows, members, strict=True):
                expected = llama.logprobs(context.token_ids)
                torch.testing.assert_close(row.double(), expected, atol=1e-4, rtol=0)


def test_a_cache_is_divided_for_all_members_of_a_population(llama: TinyGguf) -> None:
    """It is divided once, also if the members are computed in several parts."""
    engine = llama.engine()
    engine._max_outputs = 4
    prompts = np.arange(6 * 20).reshape(6, 20)
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        population = lm.population([tuple(each.tolist()) for each in prompts])
        for step in range(2):
            rows = population.next_token_logprobs_sync()
            expected = torch.stack([llama.logprobs(one.token_ids) for one in population])
            torch.testing.assert_close(rows.double(), expected.double(), atol=1e-4, rtol=0)
            assert engine._context.parts == 6
            assert engine.statistics()["tokens_computed"] == 6 * (20 + step)
            assert engine.statistics()["sequences_evicted"] == 0
            population = population.extend(np.arange(6) + 10)


def test_a_population_that_is_dropped_frees_its_sequences(llama: TinyGguf) -> None:
    engine = llama.engine()
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        kept = lm.population((1, 2, 3), 3).extend([4, 5, 6])
        kept.next_token_logprobs_sync()
        population = kept[[0, 0, 1, 1, 2, 2]].extend(np.arange(6) + 10)
        population.next_token_logprobs_sync()
        assert used(lm) == 6
        del population
        lm._scheduler.run(check_memory)
        assert used(lm) == 3
        del kept
        assert used(lm) == 0


def test_adapters_have_sequences_of_their_own(llama: TinyGguf) -> None:
    with AsyncLM(llama.engine, output_cache=OutputCache(0)) as lm:
        for name in ("red", "blue"):
            lm.load_lora(llama.adapters[name], name)
        run_population_programs(lm, llama.logprobs, adapters=(None, "red", "blue"))


@pytest.mark.parametrize("error", [CacheFullError, RuntimeError])
def test_rows_are_right_after_a_batch_that_failed(
    error: type[Exception], llama: TinyGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the batch has stored of sequences that it continued is removed again."""
    engine = llama.engine()
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        population = lm.population((5, 6, 7), 3).extend([8, 9, 10])
        population.next_token_logprobs_sync()
        extended = population[[0, 0, 1, 2]].extend([11, 12, 13, 14])
        decode, failures = LlamaContext.decode, [error, error]

        def failing(own: Any, batch: Any, part: Any) -> Any:
            if failures and failures[0] is CacheFullError:  # which stores nothing
                raise failures.pop()
            logits = decode(own, batch, part)
            if failures:
                raise failures.pop()
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(LlamaContext, "decode", failing)
            if error is CacheFullError:  # computed again, in smaller parts
                extended.next_token_logprobs_sync()
            else:
                failures *= 20
                with pytest.raises(Exception, match="4 of 4 members"):
                    extended.next_token_logprobs_sync()
        for each in (extended, population):
            rows = each.next_token_logprobs_sync()
            expected = torch.stack([llama.logprobs(one.token_ids) for one in each])
            torch.testing.assert_close(rows.double(), expected.double(), atol=1e-4, rtol=0)
        lm._scheduler.run(check_memory)


def test_a_sequence_that_lost_its_end_is_not_continued_as_if_it_had_it(
    llama: TinyGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that computes the last token again fails; a request then has another one."""
    engine = llama.engine()
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        population = lm.population((5, 6, 7, 8), 2)
        population.next_token_logprobs_sync()
        with monkeypatch.context() as patch:
            patch.setattr(LlamaContext, "decode", lambda *_: 1 / 0)
            with pytest.raises(PopulationError, match="division by zero"):
                population.next_token_logprobs_sync()
        lm.next_token_logprobs_sync([5, 6, 7, 9])
        extended = population.extend([10, 11])
        rows = extended.next_token_logprobs_sync()
        expected = torch.stack([llama.logprobs(one.token_ids) for one in extended])
        torch.testing.assert_close(rows.double(), expected.double(), atol=1e-4, rtol=0)


def test_sequences_that_others_of_their_batch_evicted_are_computed_again(
    llama: TinyGguf,
) -> None:
    """Eight prompts of 60 tokens are computed in halves: 256 cells hold four of them."""
    engine = llama.engine(n_ctx=256, kv_unified=True)
    generator = np.random.default_rng(3)
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        prompts = [tuple(each.tolist()) for each in generator.integers(3, 300, (8, 60))]
        population = lm.population(prompts)
        for _ in range(2):
            rows = population.next_token_logprobs_sync()
            expected = torch.stack([llama.logprobs(one.token_ids) for one in population])
            torch.testing.assert_close(rows.double(), expected.double(), atol=1e-4, rtol=0)
            lm._scheduler.run(check_memory)
            population = population.extend(generator.integers(3, 300, 8))
