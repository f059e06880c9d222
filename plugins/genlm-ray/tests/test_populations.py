"""Populations are sent as columns, stay on a replica, and survive its loss."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
import types
from collections import deque
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from genlm import Population, PopulationError, get_backend
from genlm.core.queries.joined_generations import joined_generation
from genlm.plugin import (
    Completion,
    Generation,
    GroupQuery,
    GroupReduction,
    Lineage,
    Query,
    Reduction,
    SampledGroup,
    TokenSequence,
)
from genlm_ray.driver import Driver
from genlm_ray.link import ReplicaLink
from genlm_ray.router import Router
from genlm_ray.session import Session, SharedEngine
from genlm_ray.spec import UNLIMITED
from genlm_ray.wire import Generations, PlacedGeneration, pack_group, place_sample

TIMEOUT_S = 60


class LastColumn(GroupReduction):
    """User-defined reduction with a column."""

    def __init__(self, added: torch.Tensor) -> None:
        self.added = added

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (rows[row_of, -1] + self.added[members],)


class Largest(Reduction):
    """User-defined reduction of one row."""

    @classmethod
    def compute(cls, rows, requests):
        return rows.amax(1).tolist()


class Unpicklable(LastColumn):
    def __reduce__(self):
        raise TypeError("it has a lock")


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list]]:
    """The number of queries and the groups of each message to a replica."""
    messages: list[tuple[int, list]] = []
    call = ReplicaLink.call

    def noted(self, method, *arguments):
        if method == "exchange":
            count, groups = len(arguments[1].queries.query_ids), arguments[1].groups
            if count or groups:
                messages.append((count, groups))
        return call(self, method, *arguments)

    monkeypatch.setattr(ReplicaLink, "call", noted)
    return messages


def _assert_rows(population: Population, reference) -> None:
    rows = population.next_token_logprobs_sync()
    expected = reference.batch_next_token_logprobs_sync(
        [context.token_ids for context in population]
    )
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)


def test_a_population_is_one_message_of_new_columns(pair, reference, messages):
    generator = np.random.default_rng(0)
    population = pair.population([72, 101], 30)
    for step in range(6):
        _assert_rows(population, reference)
        [(queries, [group])] = messages
        messages.clear()
        assert queries == 0
        assert len(group.first.tails) == (step == 0)
        assert len(group.steps) == (0 if step == 0 else 1 + (step == 4))
        if step % 2:
            population = population[generator.integers(0, 30, 30)]
        width = (30, 2) if step == 3 else 30
        population = population.extend(generator.integers(0, 200, width))
    drawn = population.draw_sync(np.arange(257) < 100, seed=3)
    [(_, [group])] = messages
    assert group.number == group.query.query_id != group.base is not None
    again = population.draw_sync(np.arange(257) < 100, seed=3)
    assert messages[-1][1][0].steps == []
    local = reference.population([context.token_ids for context in population])
    expected = local.log_mass_sync(np.arange(257) < 100)
    torch.testing.assert_close(drawn.log_mass, expected, rtol=0, atol=1e-5)
    assert torch.equal(drawn.token_ids, again.token_ids)


def test_populations_of_a_lost_replica_are_computed_on_another(pair, pids, reference):
    llm = pair
    populations = [llm.population([72, 101], 5).extend(range(5)) for _ in range(4)]
    for population in populations:
        _assert_rows(population, reference)
    extended = [members[[0, 0, 1, 3]].extend([7, 8, 9, 10]) for members in populations]
    before = pids(llm)
    for pid in before:  # otherwise all queries complete before a replica is killed
        os.kill(pid, signal.SIGSTOP)

    async def main() -> list[torch.Tensor]:
        tasks = [asyncio.create_task(members.next_token_logprobs()) for members in extended]
        while llm.statistics().pending < len(tasks):
            await asyncio.sleep(0)
        os.kill(before[0], signal.SIGKILL)
        os.kill(before[1], signal.SIGCONT)
        return list(await asyncio.wait_for(asyncio.gather(*tasks), 120))

    results = asyncio.run(main())
    for rows, members in zip(results, extended, strict=True):
        sequences = [context.token_ids for context in members]
        expected = reference.batch_next_token_logprobs_sync(sequences)
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)
    for members in (*populations, *extended):
        _assert_rows(members.extend(np.arange(len(members))), reference)


def test_a_reduction_of_the_program_is_computed_and_one_that_cannot_be_sent_fails(
    pair, reference
):
    population, local = (
        model.population([72], 3).extend([1, 2, 2]) for model in (pair, reference)
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


def test_a_replica_stores_the_generation_that_its_driver_computes_of_a_result():
    lineage = Lineage.of_sequences([TokenSequence.of([i]) for i in range(3)])
    group = GroupQuery(0, Generation(lineage), *[np.arange(3)] * 2, LastColumn(torch.zeros(3)))
    sampling = types.SimpleNamespace(places=np.array([2, 0, 1, 0]))
    group = dataclasses.replace(group, sampling=sampling)
    ids = torch.tensor([[7, 8], [5, -1], [6, 9], [5, -1]])
    generation, places = group.generation.extended(sampling.places, ids.numpy())
    sequences = [generation.lineage.sequence(int(place)) for place in places]
    nothing = torch.zeros(4, 2)
    sample = SampledGroup(ids, nothing, nothing, generation, places, np.ones(4, bool))
    generations = Generations()
    sent = generations.finish(group.query_id, sample)
    assert (sent.generation, sent.places) == (None, None)
    placed = place_sample(group, sent, PlacedGeneration(0, ~group.query_id, deque()))
    assert placed.places.tolist() == places.tolist()
    later = _group(1, placed.generation, LastColumn(torch.zeros(3)))
    message = pack_group(later, 0)
    stored = generations.group(message, None, lambda _: None).generation.lineage
    assert [stored.sequence(int(place)) for place in placed.places] == sequences


def _group(query_id: int, generation: Generation, reduction: GroupReduction) -> GroupQuery:
    count = len(generation.lineage)
    return GroupQuery(query_id, generation, np.arange(count), np.arange(count), reduction)


def _driver() -> Driver:
    """Return a driver of two replicas, without processes."""
    driver = Driver(
        [Mock(), Mock()], [], Router(), lambda _: None, ping_timeout_s=1.0,
        load_timeout_s=1.0, max_in_flight=9,
    )  # fmt: skip
    for number, link in enumerate(driver.links):
        link.session, link.dropped, link.released = number, deque(), []
        driver.router.add(number)
    return driver


def _generations() -> tuple[Generation, Generation]:
    lineage = Lineage.of_sequences([TokenSequence.of([1, 2]), TokenSequence.of([3])])
    first = Generation(lineage)
    later, _ = lineage.extended(np.array([0, 1, 1]), np.array([5, 6, -1]))
    return first, Generation(later, first)


def test_a_continuation_is_one_message_and_stays_with_its_replica(pair, reference, messages):
    sample, expected = (
        model.population([72, 101], 30).sample_sync(8, seed=3) for model in (pair, reference)
    )
    [(_, [group])] = messages
    for part in ("token_ids", "logprobs", "draw_logprob"):
        torch.testing.assert_close(getattr(sample, part), getattr(expected, part))
    masks = np.random.default_rng(0).random((2, reference.vocab_size)) < 0.5
    options = {"mask_index": [0, 1, 1] * 5, "bias": np.linspace(-1, 1, reference.vocab_size)}
    longer, also = (
        result.population[::2].sample_sync(
            4, masks, temperature=0.5, top_k=5, seed=4, **options
        )
        for result in (sample, expected)
    )
    [packed] = messages[-1][1]
    assert packed.base == ~group.query.query_id
    assert packed.steps == []
    assert torch.equal(longer.token_ids, also.token_ids)
    _assert_rows(longer.population, reference)
    assert len(messages) == 3  # one for each call


def test_groups_are_packed_for_what_their_replica_knows():
    driver = _driver()
    [link, other] = driver.links
    first, later = _generations()
    generations = Generations()
    rows = LastColumn(torch.zeros(3))

    def packed(query_id, generation, link):
        driver.router.submit([_group(query_id, generation, rows)])
        [[routed]] = driver.router.take({link.session: 9}).values()
        return pack_group(routed.query, link.session)

    def arrived(message):
        return generations.group(message, None, lambda _: None).generation.lineage

    def finish(query_id, link=link, error=None):
        return driver._complete(Completion(query_id, (), error), link)

    for query_id, generation, size in ((0, first, 2), (1, later, 3), (2, later, 0)):
        message = packed(query_id, generation, link)
        assert message.size == size
        lineage, expected = arrived(message), generation.lineage
        assert [lineage.sequence(i).token_ids for i in range(len(lineage))] == [
            expected.sequence(i).token_ids for i in range(len(expected))
        ]
        assert lineage.lengths.tolist() == expected.lengths.tolist()
        assert finish(query_id).query_id == query_id
    assert generations.sequences == 5
    del first, generation
    assert list(link.dropped) == [2, 0]  # the second generation was not sent again
    while link.dropped:
        generations.drop(link.dropped.popleft())
    assert generations.sequences == 3
    _, unanswered = _generations()
    messages = [packed(query_id, unanswered, link) for query_id in (3, 4)]
    assert [message.size for message in messages] == [3, 3]  # the second may arrive first
    assert messages[0].number != messages[1].number
    assert finish(3, error=RuntimeError()).error is not None
    assert list(link.dropped) == [3]
    assert finish(4).query_id == 4
    assert packed(5, unanswered, link).size == 0
    driver.router.reassign_from(0)  # it was lost with its generations
    [[routed]] = driver.router.take({1: 9}).values()
    assert (routed.query.query_id, pack_group(routed.query, other.session).size) == (5, 3)
    assert finish(5) is None
    assert list(link.dropped) == [3, 5, ~5]
    assert finish(5, other).query_id == 5
    assert not driver.router.in_flight.total()
    driver.close()


def test_generations_to_which_a_message_refers_are_not_dropped_before_its_queries_end():
    """Ray may start a later message, with the dropped numbers, before it."""
    driver = _driver()
    [link, _] = driver.links
    first, later = _generations()
    [earlier, _] = _generations()
    rows = LastColumn(torch.zeros(3))

    def send(query_id, generation):
        driver.router.submit([_group(query_id, generation, rows)])
        [group] = link.pack_request(driver.router.take({0: 9})[0], 0).groups
        return group

    def finish(query_id):
        driver._complete(Completion(query_id, ()), link)

    for query_id, generation in enumerate((first, earlier)):
        send(query_id, generation)
        finish(query_id)
    joined, _ = joined_generation([(earlier, np.arange(2))])
    assert [send(query_id, later).base for query_id in (2, 3)] == [0, 0]
    joins = [source.generation for n in (4, 5) for source in send(n, joined).joined]
    assert joins == [1, 1]
    del first, earlier, generation
    finish(2)  # the program then refers to the state of the later generation only
    finish(4)
    assert not link.dropped
    finish(3)
    finish(5)
    assert sorted(link.dropped) == [0, 1, 3, 5]
    driver.close()


def test_a_concatenation_continues_generations_of_its_replica():
    driver = _driver()
    first, second, third = (
        Generation(Lineage.of_sequences([TokenSequence.of(ids) for ids in ([i, 1, 2], [i, 3])]))
        for i in range(3)
    )
    replicas = {0: Generations(), 1: Generations()}
    rows = LastColumn(torch.zeros(3))
    for query_id, (generation, number) in enumerate([(first, 1), (second, 0), (third, 1)]):
        driver.router.submit([_group(query_id, generation, rows)])
        [[routed]] = driver.router.take({number: 9}).values()
        message = pack_group(routed.query, number)
        replicas[number].group(message, None, lambda _: None).generation.keep(query_id)
        driver._complete(Completion(query_id, (), None), driver.links[number])
    parts = [(second, np.array([1])), (first, np.array([0, 1])), (third, np.array([0]))]
    joined, _ = joined_generation(parts)
    longer, _ = joined.extended(np.arange(len(joined.lineage)), np.array([[8], [9], [7], [6]]))
    driver.router.submit([_group(3, longer, rows)])
    [(number, [routed])] = driver.router.take({0: 9, 1: 9}).items()
    assert number == 1  # it has most of the sequences
    message = pack_group(routed.query, number)
    found = replicas[number].group(message, None, lambda _: None).generation
    assert [source.generation.state for source in found.sources()] == [0, 2]
    for source, expected in zip(found.sources(), longer.sources()[1:], strict=True):
        for column, values in zip(source[1:], expected[1:], strict=True):
            assert column.tolist() == values.tolist()
    driver.close()


@pytest.mark.parametrize("expanded", [False, True])
def test_groups_share_the_engine_and_user_defined_reductions_run_on_another_thread(expanded):
    """For an engine without populations, their sequences are separate queries."""
    engine = get_backend("reference")("demo")
    if expanded:
        inner, engine = engine, type("Plain", (), {})()
        for name in ("vocabulary", "max_context", "capabilities", "submit", "step", "abort"):
            setattr(engine, name, getattr(inner, name))
        engine.close, engine.statistics = inner.close, inner.statistics
    _, later = _generations()
    threads: list[str] = []

    class Noted(LastColumn):
        def compute(self, rows, row_of, members):
            threads.append(threading.current_thread().name)
            return super().compute(rows, row_of, members)

    async def main():
        shared = SharedEngine(lambda: engine, 3600.0)
        session = Session("poet", shared, UNLIMITED)
        session.submit([_group(7, later, Noted(torch.tensor([0.0, 1.0, 2.0])))])
        await session.changed.wait()
        await asyncio.to_thread(shared.close)
        return session.finished

    [(query_id, result, error, _)] = asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert (query_id, error) == (7, None)
    sequences = [later.lineage.sequence(i).token_ids for i in range(3)]
    model = get_backend("reference")("demo")
    rows = model.evaluate([Query(i, ids) for i, ids in enumerate(sequences)])
    torch.testing.assert_close(result.columns[0], rows[:, -1] + torch.arange(3.0))
    assert set(threads) == {"genlm-reductions"}
