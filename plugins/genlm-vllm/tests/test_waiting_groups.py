"""Groups that wait for places or KV blocks: which of them begin, and when they end to wait."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from serving_populations import check, figures

import genlm
from genlm.plugin import Generation, GroupQuery, Lineage, Query, Rows, TokenSequence
from genlm_vllm.conformance import TinyLlama
from genlm_vllm.member_requests import MemberRequests
from genlm_vllm.pending_query import PendingQuery
from genlm_vllm.waiting_groups import WaitingGroups

from .interpreted_triton import SECOND_RUNNER
from .traffic import prompts

BLOCKS = 28
STEPS = 8 if SECOND_RUNNER else 40


class Requests:
    """Room of an engine on which no group has a request yet."""

    by_name: ClassVar[dict[str, Any]] = {}
    block_tokens = 2

    def __init__(self, places: int, blocks: int = 100) -> None:
        self.free_room = np.array([places, blocks])
        self.in_progress: dict[int, PendingQuery] = {}

    def missing_blocks(self, prefixes: Any) -> int:
        return sum(count for _, count in prefixes)

    def unused(self) -> list[str]:
        return []

    def make_room(self, room: Any, names: Any, *, partly: bool = False) -> set[str]:
        return set()


def group(query_id: int, count: int, length: int = 2) -> GroupQuery:
    members = np.arange(count)
    sequences = [TokenSequence.of([query_id + 1, i] * length) for i in range(count)]
    generation = Generation(Lineage.of_sequences(sequences))
    return GroupQuery(query_id, generation, members, members, Rows())


def waiting(requests: Any, *groups: GroupQuery) -> WaitingGroups:
    found = WaitingGroups(requests, requests, requests.in_progress)
    for each in groups:
        found.add(each)
    return found


def ids(groups: list[GroupQuery]) -> list[int]:
    return [one.query_id for one in groups]


def test_all_groups_are_computed_together_if_there_is_room() -> None:
    requests = Requests(places=5, blocks=11)
    groups = waiting(requests, group(1, 3, length=2), group(0, 2, length=2))
    assert not groups.lacks_room
    assert ids(groups.take()) == [1, 0]
    assert not groups


@pytest.mark.parametrize(
    ("places", "blocks", "first", "later"),
    [
        (4, 100, [1, 3], [0, 2]),
        (20, 4, [1], [0, 2, 3]),  # keeps blocks for the growth of those that are computed
    ],
)
def test_the_oldest_groups_that_fit_begin_first(
    places: int, blocks: int, first: list[int], later: list[int]
) -> None:
    requests = Requests(places, blocks)
    counts = enumerate((6, 3, 2, 1))
    groups = waiting(requests, *(group(i, count, length=1) for i, count in counts))
    assert not groups.lacks_room
    assert ids(groups.take()) == first
    requests.free_room = np.zeros(2, int)
    requests.in_progress[9] = PendingQuery(group(9, 1), 1, 0)
    assert not groups.take()
    requests.in_progress.clear()
    assert groups.lacks_room
    for query_id in later:
        assert ids(groups.take()) == [query_id]
    assert not groups


def test_only_the_oldest_of_many_groups_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = waiting(Requests(places=4), *(group(i, 3) for i in range(100)))
    compared, cost = [], groups._cost

    def counted(query: GroupQuery) -> Any:
        compared.append(query.query_id)
        return cost(query)

    monkeypatch.setattr(groups, "_cost", counted)
    taken = []
    while groups:
        taken += ids(groups.take())
    assert taken == [*range(100)]
    assert len(compared) <= 600


def test_a_group_is_not_passed_over_for_ever() -> None:
    requests = Requests(places=4)
    requests.in_progress[9] = PendingQuery(group(9, 1), 1, 0)
    groups = waiting(requests, group(0, 6))
    choices = 0
    while not groups.take():
        choices += 1
    assert 60 < choices < 70


@pytest.mark.parametrize(
    ("wanted", "places", "blocks"),
    [
        ([0, 1, 2], 1, 2),
        ([0, 1], 1, 2),  # the request of the other member stays
        ([2], 0, 0),
    ],
)
def test_requests_of_members_that_wait_are_not_counted_as_free(
    wanted: list[int], places: int, blocks: int
) -> None:
    requests: Any = Requests(places=10)
    requests.by_name = {"a": None, "b": None}
    first = group(0, 3, length=1).generation  # of 2 tokens, which are a block
    residents: Any = [SimpleNamespace(name="a"), SimpleNamespace(name="b"), None]
    lengths, none_waited = np.array([2, 1, 0]), np.zeros(3, np.int64)
    generation, members = first.extended(np.array([0, 0, 1]), np.array([[5], [6], [-1]]))
    query = GroupQuery(1, generation, members[wanted], np.arange(len(wanted)), Rows())
    groups = waiting(requests, query)
    assert groups._cost(query)[0] == len(wanted)
    first.keep(MemberRequests(np.array(residents), lengths, none_waited))  # while it waits
    assert groups._cost(query).tolist() == [places, blocks]
    assert groups._max_cost(query).tolist() == [len(wanted), 2 * len(wanted) - (2 in wanted)]


# -- on vLLM, with few KV blocks -------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny: TinyLlama) -> Iterator[genlm.AsyncLM]:
    def build() -> Any:
        return tiny.engine(
            lora=False, max_num_batched_tokens=128, num_gpu_blocks_override=BLOCKS + 1
        )

    with genlm.AsyncLM(build, output_cache=genlm.OutputCache(0)) as llm:
        yield llm


def test_populations_that_exceed_the_blocks_together_are_computed_in_turn(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    """They need 54 blocks. Every fourth step replaces half of the members of a population."""
    count, members, length = 6, 4, 62
    generations = {
        number: Generation(Lineage.of_sequences([TokenSequence.of(ids)]))
        for number, ids in enumerate(prompts(*[length - 1] * count))
    }

    def extend(number: int, places: Any) -> None:
        columns = np.arange(3, 3 + members)[:, None]
        generations[number], _ = generations[number].extended(places, columns)

    def submit(engine: Any, number: int, step: int) -> None:
        every = np.arange(members)
        query_id = step * count + number
        engine.submit_group(GroupQuery(query_id, generations[number], every, every, Rows()))

    def compute(engine: Any) -> None:
        """Submit the next step of a population as soon as the last one is computed."""
        for number in generations:
            extend(number, np.zeros(members, np.int64))
            submit(engine, number, 0)
        while generations:
            for completion in engine.step():
                step, number = divmod(completion.query_id, count)
                if step == STEPS:
                    lineage = generations.pop(number).lineage
                    for place, row in enumerate(completion.result.columns[0]):
                        expected = tiny.logprobs(lineage.sequence(place).token_ids)
                        assert float((row.cpu() - expected).abs().max()) <= 1e-4
                    continue
                kept = np.arange(members)
                extend(number, kept // 2 * 2 if step % 4 == 3 else kept)
                submit(engine, number, step + 1)

    llm.clear_kv_cache()
    computed = figures(llm, "tokens_computed")
    llm._scheduler.run(compute)
    assert computed()[0] <= 2.5 * count * (length + members * STEPS)


def test_a_population_that_its_caller_keeps_does_not_hold_up_others(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    llm.clear_kv_cache()
    [prompt] = prompts(190, seed=9)
    kept = llm.population(prompt, 12).extend(range(3, 15))
    kept.draw_sync(seed=0)  # 17 of the blocks
    members = np.arange(4)
    sequences = [TokenSequence.of(ids) for ids in prompts(2, 2, 2, 2)]
    generation = Generation(Lineage.of_sequences(sequences))
    waiting = group(200, 14, length=16)  # needs 14 blocks, 7 are free

    def steps_of_the_group(engine: Any) -> int:
        """Compute a population step by step until the waiting one is computed, too."""
        nonlocal generation
        engine.submit_group(waiting)
        for number in range(100):
            engine.submit_group(GroupQuery(number, generation, members, members, Rows()))
            computed = [completion.query_id for completion in engine.step()]
            if waiting.query_id in computed:
                return number
            assert computed == [number]
            generation, _ = generation.extended(members, members[:, None] + 3)
        raise AssertionError

    assert 10 < llm._scheduler.run(steps_of_the_group) < 20
    check(tiny, kept, kept.next_token_logprobs_sync())


def test_single_requests_that_wait_in_vllm_reserve_no_blocks(llm: genlm.AsyncLM) -> None:
    llm.clear_kv_cache()
    queries = [Query(-9 - i, ids) for i, ids in enumerate(prompts(200, 200, 200, 200, 200))]

    def room_beside_queries(engine: Any) -> list[int]:
        for query in queries:
            engine.submit(query)
        try:
            return engine._residents.idle.free_room.tolist()
        finally:
            for query in queries:
                engine.abort(query.query_id)

    assert llm._scheduler.run(room_beside_queries) == [64 - len(queries), BLOCKS]
