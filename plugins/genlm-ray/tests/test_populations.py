"""Populations travel as columns, stay with a replica, and survive it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import deque

import numpy as np
import pytest
import torch

from genlm import Population, PopulationError, get_backend
from genlm.plugin import (
    Generation,
    GroupQuery,
    GroupReduction,
    Lineage,
    Query,
    Reduction,
    TokenSequence,
)
from genlm_ray.link import ReplicaLink
from genlm_ray.populations import Populations
from genlm_ray.router import Router
from genlm_ray.serving_loop import ServingLoop
from genlm_ray.wire import Sequences

TIMEOUT_S = 60


class LastColumn(GroupReduction):
    """The program's own code, with a column of its own."""

    def __init__(self, added: torch.Tensor) -> None:
        self.added = added

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (rows[row_of, -1] + self.added[members],)


class Largest(Reduction):
    """The program's own code for one row."""

    @classmethod
    def compute(cls, rows, requests):
        return rows.amax(1).tolist()


class Unpicklable(LastColumn):
    def __reduce__(self):
        raise TypeError("it has a lock")


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list]]:
    """How many queries and which groups each message to a replica had."""
    found: list[tuple[int, list]] = []
    send = ReplicaLink.send_queries

    def noted(self, routed, groups=()):
        if routed or groups:
            found.append((len(routed), list(groups)))
        send(self, routed, groups)

    monkeypatch.setattr(ReplicaLink, "send_queries", noted)
    return found


def _assert_rows(population: Population, reference) -> None:
    rows = population.next_token_logprobs_sync()
    expected = reference.batch_next_token_logprobs_sync([one.token_ids for one in population])
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)


def test_a_population_is_one_message_of_new_columns(load, reference, messages):
    llm = load(replicas=2)
    messages.clear()
    generator = np.random.default_rng(0)
    population = llm.population([72, 101], 30)
    for step in range(6):
        _assert_rows(population, reference)
        [(queries, [group])] = messages
        messages.clear()
        assert queries == 0
        assert len(group.first) == (step == 0)
        assert len(group.steps) == (0 if step == 0 else 1 + (step == 4))
        if step % 2:
            population = population[generator.integers(0, 30, 30)]
        width = (30, 2) if step == 3 else 30
        population = population.extend(generator.integers(0, 200, width))
    drawn = population.draw_sync(np.arange(257) < 100, seed=3)
    [(_, [group])] = messages
    assert group.number > group.known >= 0
    again = population.draw_sync(np.arange(257) < 100, seed=3)
    assert messages[-1][1][0].steps == []
    local = reference.population([one.token_ids for one in population])
    expected = local.log_mass_sync(np.arange(257) < 100)
    torch.testing.assert_close(drawn.log_mass, expected, rtol=0, atol=1e-5)
    assert torch.equal(drawn.token_ids, again.token_ids)


def test_populations_of_a_lost_replica_are_computed_on_another(load, pids, reference):
    llm = load(replicas=2, max_restarts=2)
    populations = [llm.population([72, 101], 5).extend(range(5)) for _ in range(4)]
    for each in populations:
        _assert_rows(each, reference)
    extended = [each[[0, 0, 1, 3]].extend([7, 8, 9, 10]) for each in populations]
    before = pids(llm)
    for pid in before:  # else all are answered before one of them is killed
        os.kill(pid, signal.SIGSTOP)

    async def main() -> list[torch.Tensor]:
        tasks = [asyncio.create_task(each.next_token_logprobs()) for each in extended]
        while llm.statistics().pending < len(tasks):
            await asyncio.sleep(0)
        os.kill(before[0], signal.SIGKILL)
        os.kill(before[1], signal.SIGCONT)
        return list(await asyncio.wait_for(asyncio.gather(*tasks), 120))

    found = asyncio.run(main())
    for rows, each in zip(found, extended, strict=True):
        expected = reference.batch_next_token_logprobs_sync([one.token_ids for one in each])
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)
    for each in (*populations, *extended):
        _assert_rows(each.extend(np.arange(len(each))), reference)


def test_a_reduction_of_the_program_is_computed_and_one_that_cannot_be_sent_fails(
    load, reference
):
    llm = load(replicas=1)
    population, local = (
        each.population([72], 3).extend([1, 2, 2]) for each in (llm, reference)
    )
    added = torch.tensor([0.0, 10.0, 20.0])
    expected = local.next_token_logprobs_sync()
    column = population.reduce_sync(LastColumn(added))
    torch.testing.assert_close(column, expected[:, -1] + added)
    largest = population.reduce_sync(Largest())
    torch.testing.assert_close(largest, expected.amax(1))
    with pytest.raises(PopulationError, match=r"Unpicklable cannot be sent.*it has a lock"):
        population.reduce_sync(Unpicklable(added))
    _assert_rows(population, reference)


def _group(query_id: int, generation: Generation, reduction: GroupReduction) -> GroupQuery:
    count = len(generation.lineage)
    return GroupQuery(query_id, generation, np.arange(count), np.arange(count), reduction)


def _generations() -> tuple[Generation, Generation]:
    lineage = Lineage.of_sequences([TokenSequence.of([1, 2]), TokenSequence.of([3])])
    first = Generation(lineage)
    later, _ = lineage.extended(np.array([0, 1, 1]), np.array([5, 6, -1]))
    return first, Generation(later, first)


def test_groups_are_packed_for_what_their_replica_knows():
    router = Router()
    router.add(0)
    populations, known = Populations(router), Sequences()
    dropped: deque[int] = deque()
    first, later = _generations()
    asked = [first, later, later]
    rows = LastColumn(torch.zeros(3))
    for query_id, generation in enumerate(asked):
        populations.submit(_group(query_id, generation, rows))
        [packed] = populations.take({0: dropped})[0]
        assert packed.size == [2, 3, 0][query_id]
        found = known.group(packed, None, lambda _: None)
        lineage, expected = found.generation.lineage, generation.lineage
        assert [lineage.sequence(i).token_ids for i in range(len(lineage))] == [
            expected.sequence(i).token_ids for i in range(len(expected))
        ]
        assert lineage.lengths.tolist() == expected.lengths.tolist()
        assert found.generation.with_state() is None
        assert populations.in_flight(0) == query_id + 1
    assert router.work[0] == 8
    assert len(known) == 5
    assert populations.finished(0, 0)
    del first, asked, generation
    assert list(dropped) == [0]
    known.drop(dropped.popleft())
    assert len(known) == 3
    assert not populations.finished(2, replica=1)
    assert populations.refused(2, 0)  # the replica did not take the message
    populations.submit(_group(3, later, rows))
    [packed] = populations.take({0: dropped})[0]
    assert (packed.known, packed.size) == (-1, 5)
    router.reassign_from(0)
    populations.reassign_from(0)
    assert populations.take({}) == {}
    router.add(1)
    taken = populations.take({1: deque()})[1]
    assert [each.query_id for each in taken] == [1, 3]
    assert [populations.finished(i, 1) for i in (0, 1, 2, 3)] == [False, True, False, True]
    assert router.work[1] == 0
    assert len(populations) == 0


@pytest.mark.parametrize("expanded", [False, True])
def test_groups_share_the_engine_and_own_reductions_run_on_another_thread(expanded):
    """An engine without populations gets queries for their sequences."""
    engine = get_backend("reference")("demo")
    if expanded:
        inner, engine = engine, type("Plain", (), {})()
        for name in ("vocabulary", "max_context", "capabilities", "submit", "step", "abort"):
            setattr(engine, name, getattr(inner, name))
        engine.close, engine.statistics = inner.close, inner.statistics
    loop = ServingLoop(lambda: engine, on_death=lambda _error: None)
    finished = threading.Event()
    loop.attach("poet", finished.set)
    _, later = _generations()
    threads: list[str] = []

    class Noted(LastColumn):
        def compute(self, rows, row_of, members):
            threads.append(threading.current_thread().name)
            return super().compute(rows, row_of, members)

    group = _group(7, later, Noted(torch.tensor([0.0, 1.0, 2.0])))
    loop.submit("poet", [group])
    assert finished.wait(TIMEOUT_S)
    [(query_id, result, error)], _ = loop.finished("poet")
    assert (query_id, error) == (7, None)
    sequences = [later.lineage.sequence(i).token_ids for i in range(3)]
    model = get_backend("reference")("demo")
    rows = model.evaluate([Query(i, ids) for i, ids in enumerate(sequences)])
    torch.testing.assert_close(result.columns[0], rows[:, -1] + torch.arange(3.0))
    assert set(threads) == {"genlm-reductions"}
    loop.close()
