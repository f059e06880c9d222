"""A later request does not wait for all sequences of a long one, and does not delay it forever.

A step has 64 tokens and 8 places, so that a sequence of 30 tokens takes half of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from genlm import Query
from genlm.plugin import Generation, GroupQuery, Lineage, Rows, TokenSequence
from genlm_vllm.conformance import TinyLlama

from .interpreted_triton import SECOND_RUNNER
from .traffic import Ids, largest_error, prompts, submit

COUNT = 8 if SECOND_RUNNER else 40


@pytest.fixture(scope="module")
def engine(tiny: TinyLlama) -> Iterator[Any]:
    engine = tiny.engine(lora=False, max_num_seqs=8, max_num_batched_tokens=64)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def fresh(engine: Any) -> None:
    engine.clear_prefix_cache()


def batch(engine: Any, sequences: Sequence[Ids], **options: Any) -> list[int]:
    """Submit the queries of one request."""
    return [
        submit(engine, ids, turn=turn, **options).query_id for turn, ids in enumerate(sequences)
    ]


def finished_in(engine: Any, count: int) -> dict[int, int]:
    """Step until some queries are complete; return the numbers of their steps."""
    steps: dict[int, int] = {}
    for step in range(500):
        for completion in engine.step():
            assert completion.error is None
            steps[completion.query_id] = step
        if len(steps) == count:
            break
    return steps


@pytest.mark.parametrize("scored", [0, 20])
def test_a_row_does_not_wait_for_a_batch(engine: Any, scored: int) -> None:
    sequences = prompts(*[30] * COUNT)
    for turn, ids in enumerate(sequences):
        submit(engine, ids, turn=turn, targets=ids[-scored:] if scored else ())
    assert len(engine.step()) == 2
    lone = submit(engine, prompts(20, seed=1)[0]).query_id
    steps = finished_in(engine, COUNT - 1)
    assert steps[lone] <= 1  # the third sequence of the batch has begun
    assert max(steps.values()) <= COUNT // 2


def test_two_batches_take_turns_and_keep_their_order(engine: Any) -> None:
    first = batch(engine, prompts(*[30] * COUNT))
    engine.step()
    second = batch(engine, prompts(*[30] * 4, seed=1))
    steps = finished_in(engine, COUNT + 2)
    assert steps[second[3]] <= 5
    assert sorted(first[2:], key=steps.__getitem__) == first[2:]
    assert sorted(second, key=steps.__getitem__) == second


def test_a_batch_is_computed_although_later_requests_fill_every_step(engine: Any) -> None:
    first = batch(engine, prompts(*[30] * 6))
    unfinished = set(first)
    for step in range(20):
        unfinished |= {submit(engine, ids).query_id for ids in prompts(30, 31, seed=step + 1)}
        unfinished -= {completion.query_id for completion in engine.step()}
    assert unfinished.isdisjoint(first)
    assert len(finished_in(engine, len(unfinished))) == len(unfinished)


def test_a_row_does_not_wait_for_all_members_that_begin(engine: Any, tiny: TinyLlama) -> None:
    places = np.arange(COUNT)
    sequences = [TokenSequence.of(ids) for ids in prompts(*[60] * COUNT, seed=2)]
    generation = Generation(Lineage.of_sequences(sequences))
    engine.submit_group(GroupQuery(10**6, generation, places, places, Rows()))
    assert engine.step() == []
    [ids] = prompts(20, seed=3)
    lone = submit(engine, ids)
    completions = [completion for _ in range(3) for completion in engine.step()]
    assert [completion.query_id for completion in completions] == [lone.query_id]
    assert largest_error(tiny, [completions[0].result], [ids]) <= 1e-4
    assert 10**6 in finished_in(engine, 1)


def test_idle_requests_make_place_for_a_request_before_its_step(engine: Any) -> None:
    batch(engine, prompts(*[5] * 8))
    assert len(finished_in(engine, 8)) == 8
    assert engine.statistics()["contexts_resident"] == 8
    engine.submit(Query(10**7, prompts(9, seed=4)[0]))
    assert [completion.query_id for completion in engine.step()] == [10**7]


def test_contexts_and_new_rows_do_not_wait_for_long_prompts(
    engine: Any, tiny: TinyLlama
) -> None:
    """A prompt of 250 tokens is computed in four steps if it is alone."""
    sequences = prompts(250, 250, 250, 250, seed=5)
    long = batch(engine, sequences)
    [context] = prompts(8, seed=6)
    requests = engine._residents.requests.by_name
    steps: dict[int, int] = {}
    results: dict[int, Any] = {}
    short: list[int] = []
    for step in range(1000 // 64 + 6):
        context = (*context, 9 + step)
        ids = context if step % 3 else (5, *context)  # extends a context, or does not
        short.append(submit(engine, ids).query_id)
        for completion in engine.step():
            steps[completion.query_id] = step
            results[completion.query_id] = completion.result
        begun = [request for request in requests.values() if request.num_computed_tokens]
        assert sum(request.num_computed_tokens < request.num_tokens for request in begun) <= 3
    assert largest_error(tiny, [results[query_id] for query_id in long], sequences) <= 1e-4
    assert all(steps[query_id] - step <= 1 for step, query_id in enumerate(short))


def test_a_prompt_has_the_whole_step_if_no_other_request_needs_it(engine: Any) -> None:
    for ids in prompts(250, 250, seed=7):
        submit(engine, ids)
    steps = finished_in(engine, 2)
    assert sorted(steps.values()) == [3, 7]
