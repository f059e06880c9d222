"""Tensor-parallel ranks: rows, draws, scores, adapters and weights equal those of one rank."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from population_programs import run_population_programs

import genlm
from genlm import EngineDiedError, EvaluationError
from genlm_sgl.conformance import TinyLlama

from .driving import TOLERANCE, prompts_of
from .particles import served, slots_used
from .ranks import ENDED, PARALLEL, children


@pytest.fixture(scope="module")
def llm(tiny: TinyLlama) -> Iterator[genlm.AsyncLM]:
    with served(tiny, **PARALLEL) as llm:
        yield llm


def check(llm: genlm.AsyncLM, tiny: TinyLlama, expected: Any = None) -> None:
    """Compare rows of contexts with unbatched forward passes."""
    for name in (None, *tiny.adapters):
        prompts = prompts_of(3, 90, 40, 91, 1, seed=len(name or ""))
        rows = llm.batch_next_token_logprobs_sync(prompts, lora_name=name)
        for prompt, row in zip(prompts, rows, strict=True):
            oracle = expected or tiny.logprobs
            assert float((row.double() - oracle(prompt, name)).abs().max()) <= TOLERANCE


def test_two_ranks_give_the_rows_of_one(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    check(llm, tiny)
    assert llm.statistics().engine["ranks"] == 2
    assert len(children()) == 1


def test_random_programs_on_populations(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    run_population_programs(llm, tiny.logprobs, seed=0, steps=15, adapters=(None, "red"))
    assert slots_used(llm) == 0


def test_all_ranks_compute_scores(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    assert llm.statistics().engine["scores"] == "in one pass"
    for name, [text] in ((None, prompts_of(90)), ("red", prompts_of(40))):
        scores = llm.score_sync(text, start=2, lora_name=name)
        for position, score in enumerate(scores.tolist(), 2):
            row = tiny.logprobs(text[:position], name)
            assert abs(score - float(row[text[position]])) <= TOLERANCE


def test_interrupts_do_not_end_the_ranks(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    for child in children():
        child.send_signal(signal.SIGINT)
    check(llm, tiny)


def test_errors_of_ranks_leave_the_engine_usable(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    def fail_on_rank_1(engine: Any) -> None:
        engine._served._ranks.run("absent")

    def fail_on_all_ranks(engine: Any) -> None:
        one = np.ones(1, np.int64)
        engine._served.decode(one, one, one, one, "an absent adapter")

    with pytest.raises(
        EvaluationError, match=r"rank 1 of SGLang raised AttributeError.*absent"
    ):
        llm.update_weights(fail_on_rank_1)
    with pytest.raises(AssertionError):
        llm.update_weights(fail_on_all_ranks)
    check(llm, tiny)


def test_all_ranks_replace_the_weights(llm: genlm.AsyncLM, tmp_path: Path) -> None:
    tiny = TinyLlama(tmp_path / "llama", max_position_embeddings=512)
    for read, expected in reversed(tiny.weights):
        llm.update_weights(dict(read()))
        check(llm, tiny, expected)


def test_the_weights_of_rank_0_are_not_the_model(llm: genlm.AsyncLM) -> None:
    with pytest.raises(RuntimeError, match=r"divided among 2 ranks.*update_weights"):
        _ = llm.engine.model


def test_a_rank_that_ends_ends_the_engine(llm: genlm.AsyncLM) -> None:
    # The last test of this module, whose engine it ends.
    [child] = children()
    child.kill()
    for _ in range(2):
        with pytest.raises(EngineDiedError, match=ENDED):
            llm.batch_next_token_logprobs_sync(prompts_of(4, 30))
