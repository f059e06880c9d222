"""Queries that are given up, by the caller or all at once."""

from __future__ import annotations

from typing import Any

import pytest

from genlm import Query, SamplingParams
from genlm_sgl.conformance import TinyLlama

from .driving import TOLERANCE, collected, largest_error, prompts_of


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_aborted_query_is_forgotten_and_its_slots_are_free(
    build: Any, tiny: TinyLlama, overlap: bool, steps: int
) -> None:
    engine = build(disable_overlap_schedule=not overlap, chunked_prefill_size=64)
    prompts = prompts_of(5, 200, 7, 300)
    engine.submit(Query(0, prompts[0], None, SamplingParams(50, seed=1)))
    engine.submit(Query(1, prompts[1], None, SamplingParams(50, seed=1)))
    engine.submit(Query(2, prompts[2]))
    engine.submit(Query(3, prompts[3]))
    early = [each.query_id for _ in range(steps) for each in engine.step()]
    for query_id in (0, 1, 3):
        engine.abort(query_id)
    engine.abort(99)
    rows = [] if 2 in early else collected(engine, [2])
    assert {0, 1}.isdisjoint(early)
    assert largest_error(tiny, [prompts[2]] * len(rows), rows or []) <= TOLERANCE if rows else 1
    engine.clear_prefix_cache()
    assert engine.free_tokens == engine.statistics()["kv_tokens"]
    assert engine.step() == []


@pytest.mark.parametrize("overlap", [False, True])
def test_aborting_the_last_query_frees_its_slots_at_once(build: Any, overlap: bool) -> None:
    engine = build(disable_overlap_schedule=not overlap, disable_radix_cache=True)
    engine.submit(Query(0, prompts_of(50)[0], None, SamplingParams(400, seed=1)))
    for _ in range(5):
        engine.step()
    assert engine.free_tokens < engine.statistics()["kv_tokens"]
    engine.abort(0)
    assert engine.free_tokens == engine.statistics()["kv_tokens"]


def test_aborting_one_query_spares_those_whose_ids_begin_alike(
    build: Any, tiny: TinyLlama
) -> None:
    """SGLang aborts every request whose id begins with the one it is told."""
    engine = build()
    prompts = prompts_of(*range(1, 26))
    for number, prompt in enumerate(prompts):
        engine.submit(Query(number, prompt))
    for number in (1, 2):
        engine.abort(number)
    kept = [number for number in range(25) if number not in {1, 2}]
    rows = collected(engine, kept)
    assert largest_error(tiny, [prompts[number] for number in kept], rows) <= TOLERANCE


def test_an_answer_that_came_early_can_still_be_aborted(build: Any) -> None:
    engine = build()
    prompts = prompts_of(5, 6)
    engine.submit(Query(0, prompts[0]))
    engine.cache_prefix(prompts[1], None)  # the answer to 0 waits for the next step
    engine.abort(0)
    assert engine.step() == []
