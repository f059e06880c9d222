"""Populations on engines that answer single sequences."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine, oracle_row

import genlm
from genlm.core.engine.group_engine import MemberColumns, with_groups
from genlm.core.queries.generations import Generation, Lineage, first_generation
from genlm.core.queries.query import Completion, GroupQuery, Query, Reduced
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.group_reductions import Rows
from genlm.core.rows.outputs import reduce_rows

SIZE = 16
MEMBERS = [(3,), (3, 1), (5, 5), (3,), (7,)]


def whole_row(query: Query) -> Any:
    """As an engine that ignores what queries ask of their rows."""
    return oracle_row(query.token_ids, query.adapter, SIZE)


def reduced(query: Query) -> Any:
    """As an engine that reduces rows itself."""
    [result] = reduce_rows(whole_row(query)[None], [query.outputs])
    return result


class Single:
    """Answers one query a step, the latest first, as a function says."""

    max_context = None
    capabilities: frozenset[genlm.Capability] = frozenset()

    def __init__(self, answer: Callable[[Query], Any] = whole_row) -> None:
        self.vocabulary = ScriptedEngine(SIZE).vocabulary
        self.answer = answer
        self.refused: set[tuple[int, ...]] = set()
        self.pending: dict[int, Query] = {}
        self.answered: list[tuple[int, ...]] = []
        self.aborted: list[int] = []
        self.released: Counter[bytes] = Counter()

    def submit(self, query: Query) -> None:
        if query.token_ids in self.refused:
            raise ArithmeticError(f"refused {query.token_ids}")
        self.pending[query.query_id] = query

    def step(self) -> list[Completion]:
        query_id, query = self.pending.popitem()
        self.answered.append(query.token_ids)
        return [Completion(query_id, self.answer(query))]

    def abort(self, query_id: int) -> None:
        self.aborted.append(query_id)
        self.pending.pop(query_id, None)

    def close(self) -> None:
        pass

    def statistics(self) -> dict[str, int]:
        return {}

    def release_context(self, adapter: str | None, key: bytes) -> None:
        self.released[key] += 1


@pytest.mark.parametrize("answer", [whole_row, reduced])
def test_each_distinct_sequence_is_one_query(make_model, answer):
    engine = Single(answer)
    population = make_model(engine).population(MEMBERS)
    expected = torch.stack([oracle_row(ids, None, SIZE) for ids in MEMBERS])
    assert torch.equal(population.next_token_logprobs_sync(), expected)
    assert sorted(engine.answered) == sorted(set(MEMBERS))
    batched = make_model(ScriptedEngine(SIZE)).population(MEMBERS)
    masks = [[1, 2], [5], None, [3, 9, 10], [4]]
    reference = batched.draw_sync(masks, temperature=0.5, seed=6)
    for column, expected in zip(
        population.draw_sync(masks, temperature=0.5, seed=6), reference, strict=True
    ):
        assert torch.equal(column, expected)


@pytest.mark.parametrize("others", ["none", "a single query", "an earlier group"])
def test_small_groups_share_passes_with_single_queries_if_there_are_any(make_model, others):
    class Recording(ScriptedEngine):
        groups = 0

        def submit_group(self, group):
            self.groups += 1
            super().submit_group(group)

    engine = Recording(SIZE)
    llm = make_model(engine)
    llm.next_token_logprobs_sync((5, 5))  # has its row before the groups arrive
    small = [llm.population([(1, 2), (3, 4, 5)]), llm.population([(6,), (7, 1), (8, 8)])]
    single = [(9, 9), (9, 1)]
    if others == "an earlier group":  # that shared a pass with single queries

        async def earlier() -> None:
            await asyncio.gather(small[0].draw(seed=1), *map(llm.next_token_logprobs, single))

        asyncio.run(earlier())
    engine.batches.clear()

    async def together() -> list[torch.Tensor]:
        requests = [each.next_token_logprobs() for each in small]
        if others == "a single query":  # which arrives last
            requests += map(llm.next_token_logprobs, single)
        return await asyncio.gather(*requests)

    found = asyncio.run(together())
    members = [[(1, 2), (3, 4, 5)], [(6,), (7, 1), (8, 8)]]
    for rows, each in zip(found, members, strict=False):
        assert torch.equal(rows, torch.stack([oracle_row(ids, None, SIZE) for ids in each]))
    [batch] = engine.batches
    assert len(batch) == 7 if others == "a single query" else 5
    assert engine.groups == (2 if others == "none" else 0)


@pytest.mark.parametrize(
    ("sizes", "adapters", "chosen"),
    [
        ([3, 1, 2], [None] * 3, [0, 1]),
        ([2, 3, 1], [None] * 3, [0]),  # a later group does not overtake
        ([5, 1], [None] * 2, [0]),
        ([1, 1, 3, 1], ["poet", None, "poet", "poet"], [0, 2]),
    ],
)
def test_groups_of_one_adapter_are_chosen_together_up_to_the_limit(
    sizes: list[int],
    adapters: list[str | None],
    chosen: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine(SIZE)
    monkeypatch.setattr(engine, "group_limit", lambda _group: 4)
    generation, places = first_generation([TokenSequence.of([token]) for token in range(5)])
    groups = [
        GroupQuery(number, generation, places[:size], places[:size], Rows(), adapter)
        for number, (size, adapter) in enumerate(zip(sizes, adapters, strict=True))
    ]
    assert [group.query_id for group in engine.choose_groups(groups)] == chosen


def test_groups_and_single_queries_take_turns() -> None:
    class OneByOne(ScriptedEngine):
        def choose(self, pending):
            return pending[:1]

        def choose_groups(self, pending):
            return pending[:1]

    engine = OneByOne(SIZE)
    generation, places = first_generation([TokenSequence.of([token]) for token in range(4)])
    for number in range(3):
        engine.submit(Query(number, [number]))
        engine.submit_group(GroupQuery(10 + number, generation, places, places, Rows()))
    engine.submit(Query(3, [3]))
    completed = [completion.query_id for _ in range(7) for completion in engine.step()]
    assert completed == [10, 0, 11, 1, 12, 2, 3]


def test_a_small_group_that_is_refused_fails_alone(make_model):
    class Refusing(ScriptedEngine):
        def submit_group(self, group):
            if len(group.wanted) == 2:
                raise ArithmeticError("refused")
            super().submit_group(group)

    llm = make_model(Refusing(SIZE))
    populations = [llm.population(MEMBERS[:2]), llm.population([(6,), (7, 1), (8, 8)])]

    async def together() -> list[Any]:
        requests = [each.draw(seed=1) for each in populations]
        return await asyncio.gather(*requests, return_exceptions=True)

    error, drawn = asyncio.run(together())
    assert isinstance(error, genlm.EvaluationError)
    assert "refused" in str(error)
    assert drawn.token_ids.min() >= 0


def test_a_waiting_group_can_be_cancelled() -> None:
    engine = ScriptedEngine(SIZE)
    groups = with_groups(engine)
    generation, places = first_generation([TokenSequence.of(ids) for ids in [(1,), (2,)]])
    groups.submit_group(GroupQuery(1, generation, places, places, Rows()))
    groups.abort(1)
    assert list(groups.step()) == []
    assert not engine.batches


def test_a_refused_query_fails_its_members_alone(make_model):
    engine = Single()
    engine.refused = {(3,)}
    population = make_model(engine).population(MEMBERS)
    with pytest.raises(genlm.PopulationError, match="refused") as caught:
        population.draw_sync(seed=0)
    assert caught.value.members == (0, 3)
    engine.refused.clear()
    assert (population.draw_sync(seed=0).token_ids >= 0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 7, [1, 2], Reduced(()), Reduced((1, 2)), Reduced((3,))),
        *(torch.zeros(3), torch.zeros(SIZE), torch.full((SIZE,), torch.nan)),
        Reduced(((torch.zeros(7), torch.zeros(7)),)),
    ],
)
def test_a_wrong_answer_fails_the_members_of_its_sequence(make_model, wrong):
    engine = Single(lambda query: wrong if query.token_ids == (3, 1) else whole_row(query))
    population = make_model(engine).population(MEMBERS)
    with pytest.raises(genlm.PopulationError) as caught:
        population.token_logprobs_sync([9] * 5)
    assert caught.value.members == (1,)
    engine.answer = whole_row
    expected = [float(oracle_row(ids, None, SIZE)[9]) for ids in MEMBERS]
    assert population.token_logprobs_sync([9] * 5).tolist() == expected


def test_an_aborted_group_aborts_all_its_queries():
    engine = Single()
    both = with_groups(engine)
    lineage = Lineage.of_sequences([TokenSequence.of(ids) for ids in ((1,), (2,), (3,))])
    places = np.arange(3)
    both.submit(Query(5, (9,)))
    both.submit_group(GroupQuery(8, Generation(lineage), places, places, Rows()))
    both.step()
    remaining = set(engine.pending) - {5}
    assert len(remaining) == 2
    both.abort(8)
    assert set(engine.aborted) == remaining
    [completion] = both.step()
    assert completion.query_id == 5
    assert engine.pending == {}


def test_an_engine_that_takes_groups_and_samples_them_is_left_as_it_is():
    engine = ScriptedEngine(SIZE)
    engine.samples_groups = 64
    assert with_groups(engine) is engine


def test_contexts_are_leased_once_and_released_with_the_population(make_model):
    engine = Single()
    llm = make_model(engine)
    population = llm.population(MEMBERS)
    population.draw_sync(seed=0)
    population.draw_sync(seed=1)
    copies = population[[0, 0, 1]]
    del population
    gc.collect()
    llm.next_token_logprobs_sync((1,))
    assert not engine.released
    del copies
    gc.collect()
    llm.next_token_logprobs_sync((2,))  # the engine's thread releases before it steps
    assert engine.released == {TokenSequence.of(ids).key: 1 for ids in MEMBERS}


def test_contexts_of_a_continuation_are_released_with_its_population(make_model):
    engine = Single()
    llm = make_model(engine)
    sampled = llm.population([(3,), (5, 5)]).sample_sync(3, stop=(), seed=0)
    computed = [TokenSequence.of(context.token_ids[:-1]).key for context in sampled.population]
    llm.next_token_logprobs_sync((1,))
    assert not engine.released
    del sampled
    gc.collect()
    llm.next_token_logprobs_sync((2,))
    assert engine.released == dict.fromkeys(computed, 1)


def test_columns_that_stay_on_the_device_are_not_moved_for_few_members() -> None:
    rows = torch.empty(2, 5, device="meta")
    requests = [MemberColumns(Rows(), np.array(members)) for members in ([0, 2], [1])]
    for (column,), request in zip(MemberColumns.compute(rows, requests), requests, strict=True):
        assert column.device.type == "meta"
        assert len(column) == len(request.members)


def test_every_query_of_a_cancelled_group_is_aborted_if_aborts_raise(caplog):
    class Stuck(Single):
        def abort(self, query_id: int) -> None:
            super().abort(query_id)
            raise OSError("cannot abort")

    engine = Stuck()
    groups = with_groups(engine)
    lineage = Lineage.of_sequences([TokenSequence.of(ids) for ids in [(1,), (2,), (3,)]])
    places = np.arange(3)
    for query_id in (1, 2):
        groups.submit_group(GroupQuery(query_id, Generation(lineage), places, places, Rows()))
    groups.abort(1)
    assert len(engine.aborted) == 3
    assert caplog.text.count("OSError: cannot abort") == 3
    completions: list[Completion] = []
    while not completions:
        completions += groups.step()
    [completion] = completions
    assert completion.query_id == 2
    assert len(completion.result.columns[0]) == 3


def test_rows_of_a_step_are_reduced_together(make_model, monkeypatch):
    class Together(Single):
        def step(self):
            return [completion for _ in list(self.pending) for completion in Single.step(self)]

    counts = []
    compute = MemberColumns.compute

    def counted(rows, requests):
        counts.append(len(rows))
        return compute(rows, requests)

    monkeypatch.setattr(MemberColumns, "compute", counted)
    rows = make_model(Together()).population(MEMBERS).next_token_logprobs_sync()
    assert counts == [4]
    assert torch.equal(rows, torch.stack([oracle_row(ids, None, SIZE) for ids in MEMBERS]))
