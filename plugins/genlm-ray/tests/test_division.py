"""Populations are divided among replicas, stay where they are, and are balanced again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from genlm import Population, PopulationError
from genlm.core.queries.joined_generations import joined_generation
from genlm.core.rows.row_weights import RowWeights
from genlm.plugin import (
    Completion,
    Generation,
    GroupQuery,
    GroupReduction,
    GroupResult,
    GroupSampling,
    Lineage,
    Query,
    SampledGroup,
    TokenSequence,
)
from genlm_ray import division
from genlm_ray.divider import Divider
from genlm_ray.division import Division, division_of
from genlm_ray.wire import PlacedGeneration, place_sample

SESSIONS = (5, 6, 7)


class MemberAndRow(GroupReduction):
    """Returns the index of each member, and the first entry of its row."""

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return members, rows[row_of, 0]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide populations of two members and more."""
    monkeypatch.setattr(division, "MIN_ROWS", 1)


def _prompts(*lengths: int) -> Generation:
    sequences = [TokenSequence.of([i, *range(n - 1)]) for i, n in enumerate(lengths)]
    return Generation(Lineage.of_sequences(sequences))


def _divide(
    generation: Generation,
    replicas: int = 2,
    wanted: list[int] | None = None,
    *,
    is_computed: bool = True,
) -> Division:
    """Divide a generation, whose parts are then in a replica each, unless not computed."""
    count = len(generation.lineage)
    requested = np.arange(count) if wanted is None else np.array(wanted)
    divided = division_of(generation, requested, SESSIONS, replicas)
    sequences = generation.lineage.sequences(np.arange(count))
    for sequence, part, place in zip(sequences, divided.part_of, divided.places, strict=True):
        assert divided.parts[part].lineage.sequence(int(place)) == sequence
    if not is_computed:
        return divided
    used = [division.holder_of(part, SESSIONS) for part in divided.parts]
    free = iter([session for session in SESSIONS if session not in used])
    for part, session in zip(divided.parts, used, strict=True):
        if part.state is None:
            part.keep(PlacedGeneration(session or next(free), 0, deque()))
    if generation.state is None:
        generation.keep(divided)
    return divided


def _extend(generation: Generation, ancestors: Sequence[int]) -> Generation:
    tokens = np.arange(len(ancestors)) % 50
    extended, _ = generation.extended(np.array(ancestors), tokens[:, None])
    return extended


def test_new_populations_are_divided_evenly_if_their_parts_are_large_enough(monkeypatch):
    monkeypatch.setattr(division, "MIN_ROWS", 3)
    assert _divide(_prompts(*[4] * 7)).part_of.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert _divide(_prompts(*[4] * 10), 3).part_of.tolist() == [0] * 4 + [1] * 3 + [2] * 3
    assert _divide(_prompts(*[4] * 8), 3).part_of.tolist() == [0] * 4 + [1] * 4
    assert len(_divide(_prompts(*[4] * 5)).parts) == 1
    assert len(_divide(_prompts(*[4] * 50), 1).parts) == 1  # other populations use the others
    # Sequences that are not requested do not count.
    assert _divide(_prompts(*[4] * 8), 2, [0, 1, 2, 5, 6, 7]).part_of.tolist()[5:] == [1, 1, 1]


@pytest.mark.usefixtures("small_parts")
def test_extensions_stay_with_their_parts_until_the_excess_has_reached_the_cost():
    generation = _prompts(100, 100, 100, 100)
    assert _divide(generation).part_of.tolist() == [0, 0, 1, 1]
    # 7 of 8 rows are in a part, 3 more than an equal share. To move 3 of them, the other part
    # computes their prompt of 100 tokens and their new tokens, which cost 0.25 rows each.
    generation = _extend(generation, [0, 0, 0, 0, 1, 1, 1, 3])
    for request in range(1, 12):
        divided = _divide(generation)
        assert divided.part_of.tolist() == [0] * 7 + [1]
        assert divided.excess == 3 * request
        assert 3 * request < 0.25 * (100 + 3 * request)
        generation = _extend(generation, list(range(8)))
    assert 3 * 12 >= 0.25 * (100 + 3 * 12)
    before = generation.root.state.parts
    divided = _divide(generation, is_computed=False)
    assert divided.part_of.tolist() == [0] * 4 + [1] * 4
    assert divided.excess == 0
    # Each part continues the generation of its replica, and only this one.
    for part, earlier, places in zip(divided.parts, before, ([0, 1, 2, 3], [3]), strict=True):
        [source] = part.joined
        assert source.generation is earlier
        assert source.places.tolist() == places
        assert set(source.lengths.tolist()) == {111}


@pytest.mark.usefixtures("small_parts")
def test_an_excess_is_small_in_relation_to_an_equal_share():
    generation = _prompts(*[1] * 48)
    _divide(generation, 3)
    generation = _extend(generation, [*range(16), *range(17, 32), *range(32, 47), 0, 1])
    # 18 of 48 rows are in a part, 2 more than an equal share, an eighth of which is 2, too.
    divided = _divide(generation, 3)
    assert np.bincount(divided.part_of).tolist() == [16, 16, 16]


@pytest.mark.usefixtures("small_parts")
def test_rows_of_finished_members_and_of_other_populations_do_not_count():
    generation = _prompts(19, 19, 19, 19)
    _divide(generation)
    generation = _extend(generation, [0, 0, 1, 2, 2, 2, 3, 3])
    assert _divide(generation, wanted=[0, 1, 2, 7]).excess == 1
    # It stays on two replicas if others have requests, and is not balanced for these.
    generation = _extend(generation, [0, 0, 1, 1, 2, 2, 3, 3])
    assert _divide(generation, 1).excess == 1 + 2


@pytest.mark.usefixtures("small_parts")
def test_the_cost_is_that_of_distinct_tokens_in_the_part_with_most_of_them():
    generation, _ = _prompts(50).extended(np.zeros(6, np.int64), np.arange(6)[:, None])
    assert _divide(generation, 3).part_of.tolist() == [0, 0, 1, 1, 2, 2]
    generation, _ = generation.extended(np.arange(6), np.arange(240).reshape(6, 40) % 50)
    _divide(generation, 3)
    generation = _extend(generation, [0, 0, 0, 0, 0, 0, 2, 4])
    # Two siblings are moved to a part and one to another. All parts have the prompt, so the
    # first of these parts computes 41 tokens that the siblings share, and their new tokens.
    for request in range(1, 5):
        assert _divide(generation, 3).excess == 3 * request
        generation = _extend(generation, range(8))
        assert 3 * request < 0.25 * (41 + 2 * request)
    assert 3 * 5 >= 0.25 * (41 + 2 * 5)
    assert _divide(generation, 3).excess == 0


@pytest.mark.usefixtures("small_parts")
def test_parts_without_sequences_are_dropped_and_lost_ones_are_divided_again(monkeypatch):
    generation = _prompts(*[5] * 6)
    assert len(_divide(generation, 3).parts) == 3
    generation = _extend(generation, [0, 1, 4, 5])  # no sequence continues part 1
    divided = _divide(generation, 1)
    assert divided.part_of.tolist() == [0, 0, 1, 1]
    [lost, held] = [part.state.session for part in divided.parts]
    # The replica that computes the lost part is the other one, as the third is not up.
    monkeypatch.setattr(f"{__name__}.SESSIONS", (held,))
    generation = _extend(generation, [0, 1, 2, 3])
    divided = division_of(generation, np.arange(4), (held,), 1)
    assert len(divided.parts) == 2
    for part in divided.parts:
        part.keep(PlacedGeneration(held, 0, deque()))
    generation.keep(divided)
    monkeypatch.setattr(f"{__name__}.SESSIONS", ())
    longer = _extend(generation, [0, 1, 2, 3])
    assert division_of(longer, np.arange(4), (), 2).excess == 0
    monkeypatch.setattr(f"{__name__}.SESSIONS", (held, lost + 10))  # it was started again
    excess = []
    for _ in range(9):
        generation = _extend(generation, [0, 1, 2, 3])
        divided = _divide(generation)
        excess.append(divided.excess)
    assert 2 in excess
    assert excess[-1] == 0
    assert {part.state.session for part in divided.parts} == {held, lost + 10}


@pytest.mark.usefixtures("small_parts")
def test_concatenations_continue_what_each_replica_has():
    first, second = _prompts(7, 7), _prompts(8, 8)
    _divide(first)
    _divide(second, 1)
    [alone] = second.state.parts
    joined, _ = joined_generation([(first, np.arange(2)), (second, np.arange(2))])
    held = [division.holder_of(part, SESSIONS) for part in [*first.state.parts, alone]]
    assert held == [5, 6, 5]
    divided = _divide(joined, is_computed=False)
    assert divided.part_of.tolist() == [0, 1, 0, 1]  # the last is computed again
    found = [
        (source.generation, source.places.tolist())
        for part in divided.parts
        for source in part.joined
    ]
    assert found == [(first.state.parts[0], [0]), (alone, [1]), (first.state.parts[1], [0])]
    extended = _extend(joined, [3, 2, 2])
    [part] = _divide(extended, 1, is_computed=False).parts
    assert [source.generation for source in part.root.joined] == [*first.state.parts, alone]
    shorter, _ = joined_generation([(first, np.arange(2))], np.array([3, 7]))
    [part] = _divide(shorter, 1, is_computed=False).parts
    assert [source.lengths.tolist() for source in part.joined] == [[3], [7]]


def _group(query_id: int, generation: Generation, count: int) -> GroupQuery:
    """Return a query with two members for each sequence, the last sequence first."""
    row_of = np.arange(2 * count)[::-1] // 2
    return GroupQuery(query_id, generation, np.arange(count), row_of, MemberAndRow())


def _computed(query: GroupQuery, failing: int | None = None) -> GroupResult:
    """Compute a query of which the sequence with this first token fails."""
    firsts = [sequence.token_ids[0] for sequence in query.sequences(slice(None))]
    rows = torch.tensor(firsts, dtype=torch.float32)[:, None]
    row_of = torch.from_numpy(query.row_of)
    columns = query.reduction.compute(rows, row_of, torch.arange(len(row_of)))
    errors: dict[int, Exception] = {
        place: ValueError(first) for place, first in enumerate(firsts) if first == failing
    }
    return GroupResult(columns, errors)


@pytest.mark.usefixtures("small_parts")
def test_results_of_parts_are_joined_by_member_and_errors_by_sequence():
    aborted: list[int] = []
    divider = Divider(lambda: SESSIONS, aborted.append)
    generation = _prompts(4, 4, 4, 4, 4)
    single = Query(3, [1, 2])
    [same, *parts] = divider.divide([single, _group(4, generation, 5)])
    assert same is single
    assert [len(part.wanted) for part in parts] == [2, 2, 1]
    results = [Completion(part.query_id, _computed(part, 3)) for part in parts[::-1]]
    assert divider.join(results[:2]) == []
    assert generation.state is None
    other = Completion(3, None)
    [completion, passed] = divider.join([results[2], other])
    assert passed is other
    assert completion.query_id == 4
    members, rows = completion.result.columns
    assert members.tolist() == list(range(10))
    assert rows.tolist() == [4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
    assert {place: error.args for place, error in completion.result.errors.items()} == {3: (3,)}
    assert isinstance(generation.state, Division)
    longer, _ = generation.extended(
        np.array([4, 1, 0, 1, 3]), np.array([[9], [8], [7], [6], [5]])
    )
    parts = divider.divide([_group(8, longer, 5)])
    [completion] = divider.join([Completion(part.query_id, _computed(part)) for part in parts])
    assert completion.result.columns[1].tolist() == [3, 3, 1, 1, 0, 0, 1, 1, 4, 4]
    # Populations that are computed at the same time share the replicas.
    others = divider.divide([_group(9, _prompts(3, 3, 3), 3), _group(10, _prompts(2, 2), 2)])
    assert [len(part.wanted) for part in others] == [3, 2]
    divider.abort(10)
    assert len(divider.divide([_group(11, _prompts(3, 3, 3), 3)])) == 1
    divider.abort(9)
    divider.abort(11)
    aborted.clear()
    # An error of a part is that of the population; its other parts are dropped.
    parts = divider.divide([_group(5, generation, 5)])
    error = RuntimeError("full")
    assert divider.join([Completion(parts[1].query_id, error=error)]) == [
        Completion(5, error=error)
    ]
    assert aborted == [parts[0].query_id, parts[2].query_id]
    late = Completion(parts[0].query_id, _computed(parts[0]))
    assert divider.join([late]) == [late]  # as the driver does not return it
    parts = divider.divide([_group(6, generation, 5)])
    divider.abort(6)
    divider.abort(7)  # a query for one sequence
    assert aborted[2:] == [*(part.query_id for part in parts), 7]
    assert (divider._queries, divider._owners) == ({}, {})


@pytest.mark.usefixtures("small_parts")
def test_continuations_are_joined_and_queries_for_parts_are_in_the_order_of_their_sequences():
    divider = Divider(lambda: (5, 6), lambda _: None)
    generation = _prompts(4, 4, 4, 4)
    sampling = GroupSampling(
        np.array([1, 0, 3, 3]), np.zeros(4, bool), np.ones(4, np.int64), RowWeights((4, 60)),
        np.arange(4), 0, frozenset(), (),
    )  # fmt: skip
    wanted, row_of = np.array([0, 1, 3]), np.array([1, 0, 2, 2])
    query = GroupQuery(1, generation, wanted, row_of, MemberAndRow(), sampling=sampling)
    tokens, completions = torch.tensor([[7], [8], [5], [5]]), []
    for part, members in zip(divider.divide([query]), ([0, 1], [2, 3]), strict=True):
        nothing, unset = torch.zeros(2, 1), np.zeros(2, bool)
        sample = SampledGroup(tokens[members], nothing, nothing, None, None, unset)
        state = PlacedGeneration(5, ~part.query_id, deque())
        completions.append(Completion(part.query_id, place_sample(part, sample, state)))
    [completion] = divider.join(completions)
    sampled = completion.result
    assert torch.equal(sampled.token_ids, tokens)
    found = [each.token_ids for each in sampled.generation.lineage.sequences(sampled.places)]
    assert [(ids[0], ids[-1]) for ids in found] == [(1, 7), (0, 8), (3, 5), (3, 5)]
    parts = divider.divide([_group(2, sampled.generation, 3)])
    assert [part.wanted.tolist() for part in parts] == [[0, 1], [0]]
    [completion] = divider.join([Completion(part.query_id, _computed(part)) for part in parts])
    assert completion.result.columns[1].tolist() == [3, 3, 1, 1, 0, 0]


# -- with replicas --------------------------------------------------------------------


def _parts(population: Population) -> list[int]:
    """Return the number of sequences in each part."""
    return np.bincount(population._generation.state.part_of).tolist()


def _assert_equal(results, expected) -> None:
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("small_parts")
def test_a_divided_population_has_the_results_of_an_undivided_one(pair, reference):
    generator = np.random.default_rng(0)
    members, local = (
        model.population([[72, 101, i] for i in range(12)]) for model in (pair, reference)
    )
    size, parts = reference.vocab_size, []
    masks, bias = generator.random((3, size)) < 0.6, generator.normal(size=size)
    for step in range(12):
        count = len(members)
        options = {"mask_index": np.arange(count) % 3, "bias": bias, "seed": 4}
        options["temperature"] = np.linspace(0.5, 2, count)
        drawn, expected = (each.draw_sync(masks, **options) for each in (members, local))
        _assert_equal(drawn, expected)
        ids = generator.integers(0, 200, (count, 2))
        _assert_equal(
            [members.token_logprobs_sync(ids), members.next_token_logprobs_sync()],
            [local.token_logprobs_sync(ids), local.next_token_logprobs_sync()],
        )
        drawn, expected = (
            each.draw_without_replacement_sync(3, seed=1) for each in (members, local)
        )
        _assert_equal(drawn, expected)
        parts.append(_parts(members))
        chosen = np.sort(generator.integers(0, count // 2, 12 + step % 3))
        members, local = members[chosen], local[chosen]
        ids = generator.integers(0, 200, len(chosen))
        members, local = members.extend(ids), local.extend(ids)
    assert parts[0] == [6, 6]
    assert max(map(max, parts)) > 7  # as the first half of the members is chosen
    assert [len(members) // 2] * 2 in parts[1:]
    members, local = (each[np.arange(12) // 2] for each in (members, local))
    samples, expected = (
        each.finish(np.arange(len(local)) == 0).sample_sync(
            np.arange(len(local)) % 5, stop=int(ids[0]), top_k=9, seed=8
        )
        for each in (members, local)
    )
    assert torch.equal(samples.token_ids, expected.token_ids)
    _assert_equal(samples[1:3], expected[1:3])
    assert torch.equal(samples.population.finished, expected.population.finished)
    assert torch.equal(samples.population.tokens, expected.population.tokens)
    _assert_equal(
        [samples.population.resume().next_token_logprobs_sync()],
        [expected.population.resume().next_token_logprobs_sync()],
    )


@pytest.mark.usefixtures("small_parts")
def test_a_sample_that_fails_lists_members_of_the_population(pair):
    members = pair.population([[72, i] for i in range(6)])
    bias = np.zeros((6, pair.vocab_size))
    bias[4] = np.nan
    with pytest.raises(PopulationError) as caught:
        members.sample_sync(2, bias=bias)
    assert (caught.value.members, caught.value.size) == ((4,), 6)
    assert members.sample_sync(2).token_ids.shape[0] == 6
    assert members.reduce_sync(MemberAndRow())[0].tolist() == list(range(6))


@pytest.mark.usefixtures("small_parts")
def test_divided_populations_survive_replicas_and_cancellations(pair, reference, pids):
    async def main() -> None:
        members = pair.population([[72, i] for i in range(8)])
        local = reference.population([[72, i] for i in range(8)])
        for step in range(6):
            task = asyncio.create_task(members.draw())
            await asyncio.sleep(0.001 * step)
            task.cancel()
            if step == 3:
                os.kill(pids(pair)[0], signal.SIGKILL)
            rows = await asyncio.wait_for(members.next_token_logprobs(), 120)
            _assert_equal([rows], [await local.next_token_logprobs()])
            members, local = (each[::-1].extend(range(8)) for each in (members, local))

    asyncio.run(main())
    divider = pair.engine._divider
    assert (divider._queries, divider._owners) == ({}, {})
