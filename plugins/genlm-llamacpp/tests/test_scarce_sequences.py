"""Populations with more members than llama.cpp has sequences: what is computed, and when."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genlm.plugin import (
    Generation,
    GroupQuery,
    GroupResult,
    Lineage,
    Query,
    Rows,
    TokenSequence,
)
from genlm_llamacpp.conformance import TinyGguf
from genlm_llamacpp.engine import LlamaCppEngine

from .conftest import check_memory


class Members:
    """A population of distinct members, which is extended by a token for each step."""

    def __init__(self, prompt: tuple[int, ...], count: int) -> None:
        self.count, self.step = count, 0
        self.generation = Generation(Lineage.of_sequences([TokenSequence.of(prompt)]))
        self._extend(np.zeros(count, np.int64), np.arange(count) + 10)

    def extend(self) -> None:
        """Add a token to each member."""
        self._extend(np.arange(self.count), np.arange(self.count) % 7 + 3 + self.step)

    def resample(self) -> None:
        """Replace the last extension by others of the first and the fifth member."""
        assert self.generation.base is not None
        self.generation = self.generation.base
        self._extend(np.arange(self.count) // 4 * 4, np.arange(self.count) + 20)

    def _extend(self, places: np.ndarray, tokens: np.ndarray) -> None:
        self.generation, _ = self.generation.extended(places, tokens[:, None])
        self.step += 1

    def query(self, number: int) -> GroupQuery:
        """Return the query for the rows of all members."""
        places = np.arange(self.count)
        return GroupQuery(number, self.generation, places, places, Rows())

    def check(self, result: object, model: TinyGguf) -> None:
        """Compare the rows of the first and the last member with the oracle."""
        assert isinstance(result, GroupResult)
        assert not result.errors
        for place in (0, self.count - 1):
            ids = self.generation.lineage.sequence(place).token_ids
            row = result.columns[0][place].double()
            torch.testing.assert_close(row, model.logprobs(ids).double(), atol=1e-4, rtol=0)


def prompts(count: int, length: int) -> list[tuple[int, ...]]:
    return [tuple(each.tolist()) for each in np.arange(count * length).reshape(count, -1) % 300]


def computed(engine: LlamaCppEngine) -> int:
    return int(engine.statistics()["tokens_computed"])


def take_turns(
    engine: LlamaCppEngine, model: TinyGguf, populations: list[Members], steps: int
) -> list[int]:
    """Compute steps of populations; callers act between two steps of the engine.

    Returns:
        The number of the population of each step, in the order of their completion.
    """
    order: list[int] = []
    left = [steps] * len(populations)
    for number, population in enumerate(populations):
        engine.submit_group(population.query(number))
    while any(left):
        for number, result, *_ in engine.step():
            population = populations[number]
            population.check(result, model)
            order.append(number)
            left[number] -= 1
            population.extend()
            if left[number]:
                engine.submit_group(population.query(number))
        check_memory(engine)
    return order


def test_populations_with_too_many_members_are_computed_in_turn(llama: TinyGguf) -> None:
    engine = llama.engine(n_seq_max=20, kv_unified=True)
    populations = [Members(prompt, 8) for prompt in prompts(5, 20)]
    order = take_turns(engine, llama, populations, 10)
    assert sorted(order) == sorted([*range(5)] * 10)
    assert order[:20] == [0, 1] * 10
    least = 5 * (20 + 8 * 10)
    assert computed(engine) < 1.5 * least
    assert int(engine.statistics()["forwards"]) == 10 + 3 * 10
    engine.close()


def test_a_population_with_too_many_members_loses_few_of_them(llama: TinyGguf) -> None:
    engine = llama.engine(n_seq_max=20, kv_unified=True)
    population = Members(prompts(1, 20)[0], 24)
    steps = 20
    take_turns(engine, llama, [population], steps)
    cached, evicted = 20 * steps, sum(4 * step for step in range(1, steps + 1))
    assert computed(engine) < 20 + cached + 1.5 * evicted
    engine.close()


def test_a_young_population_is_not_passed_over_for_ever(llama: TinyGguf) -> None:
    engine = llama.engine(n_seq_max=10, kv_unified=True)
    old, young = (Members(prompt, 8) for prompt in prompts(2, 20))
    take_turns(engine, llama, [old], 3)
    engine.submit_group(young.query(1))
    query = old.query(0)
    completed: list[int] = []
    for _ in range(100):
        engine.submit_group(query)
        completed += [completion.query_id for completion in engine.step()]
        if 1 in completed:
            break
    assert completed.index(1) > 60
    assert completed.index(1) < 70
    engine.close()


@pytest.mark.parametrize(("count", "defers"), [(20, False), (10, True)])
def test_groups_are_deferred_if_none_of_them_fits(
    count: int, defers: bool, llama: TinyGguf
) -> None:
    engine = llama.engine(n_seq_max=count, kv_unified=True)
    old, young = (Members(prompt, 8) for prompt in prompts(2, 20))
    take_turns(engine, llama, [old], 3)
    for number, population in enumerate((old, young)):
        engine.submit_group(population.query(number))
    assert not engine.is_deferring
    assert [each.query_id for each in engine.step()] == ([0] if defers else [0, 1])
    assert engine.is_deferring == defers
    engine.close()


def test_contexts_outside_populations_make_room(llama: TinyGguf) -> None:
    """They are evicted before populations whose callers have not requested the next step."""
    engine = llama.engine(n_seq_max=20, kv_unified=True)
    *populations, third = (Members(prompt, 8) for prompt in prompts(3, 20))
    take_turns(engine, llama, populations, 2)
    for number, prompt in enumerate(prompts(24, 5)[20:]):
        engine.submit(Query(number, prompt))
    assert len(engine.step()) == 4
    fitting = Members(prompts(4, 20)[3], 4)
    for number, population in enumerate([third, fitting]):
        engine.submit_group(population.query(number))
    before = computed(engine)
    assert [each.query_id for each in engine.step()] == [1]
    engine.abort(0)
    for number, population in enumerate(populations):
        engine.submit_group(population.query(number))
    assert [each.query_id for each in engine.step()] == [0, 1]
    assert computed(engine) - before == 20 + 4 + 2 * 8
    engine.close()


def test_members_that_nobody_continues_make_room_for_copies_of_others(llama: TinyGguf) -> None:
    engine = llama.engine(n_seq_max=20, kv_unified=True)
    populations = [Members(prompt, 8) for prompt in prompts(2, 20)]
    take_turns(engine, llama, populations, 2)
    before = computed(engine)
    for number, population in enumerate(populations):
        population.resample()
        engine.submit_group(population.query(number))
    results = engine.step()
    assert [each.query_id for each in results] == [0, 1]
    for population, completion in zip(populations, results, strict=True):
        population.check(completion.result, llama)
    assert computed(engine) - before == 2 * 8
    check_memory(engine)
    engine.close()
