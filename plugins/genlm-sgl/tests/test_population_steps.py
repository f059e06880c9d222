"""Passes of populations on SGLang, and populations without enough memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving_populations import PROMPT, TOLERANCE, check, figures

import genlm
from genlm.testing import TINY_VOCABULARY
from genlm_sgl.conformance import TinyLlama

from .particles import served, slots_used


@pytest.fixture
def roomy(tiny: TinyLlama) -> Iterator[genlm.AsyncLM]:
    with served(tiny) as llm:
        yield llm


# -- passes ---------------------------------------------------------------------------


def test_a_step_decodes_the_distinct_new_tokens_in_one_pass(roomy: genlm.AsyncLM) -> None:
    slots_used(roomy)
    grown = figures(roomy, "forwards", "tokens_computed")
    population = roomy.population(PROMPT, 20)
    population.draw_sync(seed=1)
    assert grown() == (1, 40)
    population = population.extend(np.arange(20) // 2 + 3)  # ten distinct members
    population.draw_sync(seed=1)
    assert grown() == (2, 50)
    population = population[[0, 0, 0, 5, 5, 19]].extend(np.full(6, 7))
    population.draw_sync(seed=1)
    assert grown() == (3, 53)
    population = population.finish(np.arange(6) < 3).extend([-1, -1, -1, 8, 9, 8])
    population.draw_sync(seed=1)  # finished members need no row
    assert grown() == (4, 56)
    nothing = np.zeros(TINY_VOCABULARY, bool)
    assert (population.draw_sync(nothing, seed=1).token_ids == -1).all()
    population.finish(np.ones(6, bool)).draw_sync(seed=1)
    assert grown() == (4, 56)  # no pass without tokens
    sampled = population.sample_sync(4, seed=1)
    assert sampled.token_ids.shape == (6, 4)
    assert grown()[0] == 8


def test_tokens_that_follow_one_another_are_decoded_in_one_pass(
    roomy: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    columns = np.stack([np.arange(15) % 5 + 3, np.full(15, 4), np.arange(15) + 3], 1)
    population = roomy.population(PROMPT, 15)
    population.draw_sync(seed=0)
    grown = figures(roomy, "forwards", "tokens_computed")
    population = population.extend(columns)
    check(tiny, population, population.next_token_logprobs_sync())
    assert grown() == (1, 5 + 5 + 15)


def test_a_prompt_is_shared_with_contexts(roomy: genlm.AsyncLM, tiny: TinyLlama) -> None:
    slots_used(roomy)
    grown = figures(roomy, "tokens_computed")
    context = roomy.context(PROMPT)
    context.next_token_logprobs_sync()
    population = roomy.population(PROMPT, 3).extend([3, 4, 5])
    population.draw_sync(seed=0)
    assert grown() == (40 + 3,)
    child = context.extend([9])
    expected = tiny.logprobs(tuple(child.token_ids))
    assert float((child.next_token_logprobs_sync() - expected).abs().max()) <= TOLERANCE
    assert grown() == (40 + 3 + 1,)


def test_the_slots_that_all_members_share_are_written_again_for_more_or_other_members(
    roomy: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    population = roomy.population(PROMPT, 6).extend(np.arange(6) + 3)
    other = roomy.population(PROMPT[1:21], 6).extend(np.arange(6) + 3)
    for members in (population, other):
        members.draw_sync(seed=0)
    for step in range(3):
        population, other = (
            members.extend(np.arange(6) + step) for members in (population, other)
        )
        for members in (population[:2], population, other[:4], population, other):
            check(tiny, members, members.next_token_logprobs_sync())
        context = [9, 8, step, 7]
        expected = tiny.logprobs(tuple(context))
        assert (roomy.next_token_logprobs_sync(context) - expected).abs().max() <= TOLERANCE


# -- memory ---------------------------------------------------------------------------


def test_tables_make_room_for_requests_and_are_computed_again(tiny: TinyLlama) -> None:
    with served(tiny, max_total_tokens=150) as llm:
        populations = [llm.population(PROMPT[:20], 8).extend(np.arange(8) + i) for i in (3, 9)]
        for _ in range(4):
            populations = [members.extend(np.arange(8) + 3) for members in populations]
            for members in populations:
                check(tiny, members, members.next_token_logprobs_sync())
        long = [*PROMPT, *range(3, 90)]
        row = llm.next_token_logprobs_sync(long)
        assert float((row - tiny.logprobs(tuple(long))).abs().max()) <= TOLERANCE
        assert len(llm.sample_sync(PROMPT[:9], max_tokens=100, seed=0)) == 100
        for members in populations:
            check(tiny, members, members.next_token_logprobs_sync())


def test_members_grow_to_the_longest_context(roomy: genlm.AsyncLM, tiny: TinyLlama) -> None:
    longest = roomy.max_context
    assert longest is not None
    population = roomy.population((PROMPT * 20)[: longest - 2], 3)
    for _ in range(2):
        population = population.extend([3, 4, 5])
        check(tiny, population, population.next_token_logprobs_sync())
    with pytest.raises(genlm.PopulationError, match=str(longest)):
        population.extend([-1, 4, 5]).draw_sync(seed=0)
    check(tiny, population, population.next_token_logprobs_sync())


# -- ends and failures ----------------------------------------------------------------


def test_prefixes_are_cleared_between_the_steps_of_a_population(
    roomy: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    population = roomy.population(PROMPT, 3)
    for step in range(4):
        population = population.extend([3, 4, 5])
        check(tiny, population, population.next_token_logprobs_sync())
        if step % 2:
            assert slots_used(roomy) == 0


def test_close_ends_a_population_that_is_computed(tiny: TinyLlama) -> None:
    with served(tiny) as llm:
        population = llm.population(PROMPT, 5).extend([3, 4, 5, 6, 7])
        engine: Any = llm.engine
        step, grown = engine.step, figures(llm, "tokens_computed")
        begun = threading.Event()

        def wait_for_close() -> Any:
            """Step, and wait after some tokens until the model is closed."""
            if grown() >= (90,):
                begun.set()
                while not llm._scheduler.closed:
                    time.sleep(0.001)
            return step()

        engine.step = wait_for_close

        async def ended() -> None:
            task = asyncio.ensure_future(population.sample(400, seed=0))
            assert await asyncio.to_thread(begun.wait, 60)
            llm.close()
            with pytest.raises(genlm.EngineClosedError):
                await task

        asyncio.run(ended())
