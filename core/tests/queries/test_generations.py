"""`Lineage` against lists of tuples, and which generation has a state."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.queries import generations
from genlm.core.queries.generations import (
    NO_TOKEN,
    Generation,
    Lineage,
)
from genlm.core.queries.joined_generations import joined_generation
from genlm.core.queries.sequence import TokenSequence

PROMPTS = [(5,), (), (7, 7, 2)]
STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 3)), min_size=1, max_size=6),
    max_size=6,
)


def lineage_of(prompts: list[tuple[int, ...]] = PROMPTS) -> Lineage:
    return Lineage.of_sequences([TokenSequence.of(ids) for ids in prompts])


def sequences(lineage: Lineage) -> list[tuple[int, ...]]:
    places = np.arange(len(lineage))[::-1].repeat(2)
    built = lineage.sequences(places)
    assert built[::2] == built[1::2]
    return [sequence.token_ids for sequence in reversed(built[::2])]


def extended(lineage: Lineage, places: list[int], tokens: list[int]) -> tuple[Lineage, list]:
    extended, indices = lineage.extended(np.array(places), np.array(tokens))
    return extended, indices.tolist()


def test_extensions_of_one_sequence_by_one_token_become_one_sequence():
    lineage, places = extended(lineage_of(), [0, 2, 0, 2, 0], [1, 1, 1, 3, NO_TOKEN])
    assert len(lineage) == 4
    assert len(set(places)) == 4
    assert places[0] == places[2]
    built = sequences(lineage)
    assert [built[place] for place in places] == [
        (5, 1),
        (7, 7, 2, 1),
        (5, 1),
        (7, 7, 2, 3),
        (5,),
    ]


def test_distinct_extensions_stay_in_the_order_of_the_members():
    lineage, places = extended(lineage_of(), [2, 0, 1], [0, 9, 4])
    assert places == [0, 1, 2]
    assert sequences(lineage) == [(7, 7, 2, 0), (5, 9), (4,)]
    assert lineage.lengths.tolist() == [4, 2, 1]


def test_the_end_of_one_sequence_is_not_taken_for_the_beginning_of_the_next():
    """The keys of (place, token) differ also for no token and for the largest token."""
    lineage, places = extended(lineage_of(), [0, 1, 1, 2], [3, NO_TOKEN, 3, NO_TOKEN])
    assert len(set(places)) == 4
    assert [sequences(lineage)[place] for place in places] == [(5, 3), (), (3,), (7, 7, 2)]


@given(STEPS)
def test_extensions_suffixes_and_origins_are_those_of_lists_of_tuples(steps):
    first = lineage = lineage_of()
    places = np.arange(len(PROMPTS))
    members = [(ids, ids) for ids in PROMPTS]  # what each begins with, and what it is
    middle, origins = lineage, places.tolist()  # of the members in a lineage of the middle
    for number, step in enumerate(steps):
        parents = [index % len(places) for index, _ in step]
        tokens = [token for _, token in step]
        lineage, places = lineage.extended(places[parents], np.array(tokens))
        members = [
            (members[i][0], members[i][1] + ((token,) if token >= 0 else ()))
            for i, token in zip(parents, tokens, strict=True)
        ]
        origins = [origins[i] for i in parents]
        if number == 2:
            middle, origins = lineage, places.tolist()
    assert [lineage.sequence(place).token_ids for place in places] == [
        ids for _, ids in members
    ]
    assert lineage.lengths[places].tolist() == [len(ids) for _, ids in members]
    assert lineage.first is first
    first_places, new_ids = lineage.suffixes(places)
    assert new_ids.shape == (len(members), len(steps))
    for place, suffix, (prompt, ids) in zip(first_places, new_ids, members, strict=True):
        assert PROMPTS[place] == prompt
        assert (*prompt, *suffix[suffix >= 0].tolist()) == ids
    assert lineage.origins(places, middle).tolist() == origins
    middle_places, later_ids = lineage.suffixes(places, middle)
    assert middle_places.tolist() == origins
    assert later_ids.tolist() == new_ids[:, middle.depth :].tolist()


@given(STEPS, st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_last_tokens_are_those_of_the_sequences(steps, counts):
    lineage = lineage_of([(5, 6), (4,), (7, 7, 2)])
    for step in steps:
        places = [place % len(lineage) for place, _ in step]
        lineage, _ = extended(lineage, places, [token for _, token in step])
    places = np.array([i % len(lineage) for i in range(len(counts))])
    counts = np.minimum(counts, lineage.lengths[places])
    rows = lineage.last_tokens(places, counts)
    for place, count, row in zip(places.tolist(), counts.tolist(), rows.tolist(), strict=True):
        ids = lineage.sequence(place).token_ids
        assert [i for i in row if i != NO_TOKEN] == list(ids[len(ids) - count :])


def test_a_lineage_is_extended_by_no_members():
    lineage, places = lineage_of().extended(np.empty(0, np.int64), np.empty(0, np.int64))
    assert len(lineage) == len(places) == 0
    first_places, new_ids = lineage.suffixes(places)
    assert first_places.shape == (0,)
    assert new_ids.shape == (0, 1)


def test_a_sequence_is_made_once_and_shares_that_of_its_ancestor():
    lineage, [place] = extended(lineage_of(), [2], [1])
    sequence = lineage.sequence(place)
    later, [end] = extended(lineage, [place], [NO_TOKEN])
    assert later.sequence(end) is sequence
    assert lineage.sequence(place) is sequence


@pytest.mark.parametrize("interval", [2, 64])
@given(steps=STEPS, order=st.lists(st.integers(0, 6), max_size=12))
def test_sequences_of_earlier_lineages_are_available_in_any_order(interval, steps, order):
    with mock.patch.object(generations, "_STORED_EVERY", interval):
        check_any_order(steps, order)


def check_any_order(steps, order):
    lineages = [(lineage_of(), list(PROMPTS))]
    for step in steps:
        lineage, members = lineages[-1]
        parents = [index % len(members) for index, _ in step]
        tokens = [token for _, token in step]
        later, places = extended(lineage, parents, tokens)
        ids_of = {
            place: members[parent] + ((token,) if token >= 0 else ())
            for place, parent, token in zip(places, parents, tokens, strict=True)
        }
        lineages.append((later, [ids_of[place] for place in range(len(later))]))
    for index in order:
        lineage, members = lineages[index % len(lineages)]
        assert sequences(lineage) == members


def test_only_the_last_of_many_lineages_store_sequences():
    """Otherwise a population of many steps has half a kilobyte for each token."""

    def count() -> int:
        return sum(type(item) is TokenSequence for item in gc.get_objects())

    lineage, before = lineage_of(), count()
    places = [0, 1, 2, 2]
    for step in range(50):
        lineage, places = extended(lineage, places, [step, 1, 2, 3])
        assert len(set(sequences(lineage))) == 4
    assert count() - before <= len(PROMPTS) + 3 * 4


def test_a_sequence_that_is_rarely_requested_is_not_made_from_its_first_token_again():
    lineage, places, requested = lineage_of([(1,), (2,)]), [0, 1], []
    for step in range(250):
        lineage, places = extended(lineage, places, [step % 7, step % 5])
        assert len(lineage.sequence(places[0])) == step + 2
        if step % 10 == 3:
            requested.append(lineage.sequence(places[1]))
            assert requested[-1].token_ids == (2, *(index % 5 for index in range(step + 1)))
    blocks = [sequence._parts[0] for sequence in requested if len(sequence) > 128]
    assert len(blocks) > 5
    assert {id(block) for block in blocks} == {id(blocks[0])}


class State:
    """Something that can be referred to weakly."""


def child(parent: Lineage, token_id: int) -> Lineage:
    """What `extended` returns for the only sequence of a lineage, in less time."""
    return Lineage(parent, np.zeros(1, np.int64), np.array([token_id]), parent.lengths + 1)


def test_a_sequence_of_100_000_generations_is_put_together():
    lineage = lineage_of([(9,)])
    for index in range(100_000):
        lineage = child(lineage, index % 7)
    assert lineage.lengths.tolist() == [100_001]
    assert lineage.sequence(0).token_ids == (9, *(index % 7 for index in range(100_000)))
    assert lineage.suffixes(np.zeros(1, np.int64)).token_ids.shape == (1, 100_000)


def test_a_chain_of_100_000_generations_is_dropped_without_an_error(capfd):
    first = generation = Generation(lineage_of([(9,)]))
    first.keep(State())
    for _ in range(100_000):
        generation = Generation(child(generation.lineage, 1), generation)
    assert generation.root is first
    state = weakref.ref(first.state)
    del first, generation
    gc.collect()
    assert state() is None
    assert capfd.readouterr().err == ""


def test_a_generation_serves_until_one_that_extends_it_has_a_state():
    lineage = lineage_of()
    first = Generation(lineage)
    assert first.root.state is None
    second = Generation(lineage.extended(np.arange(3), np.zeros(3, np.int64))[0], first)
    third = Generation(second.lineage.extended(np.arange(3), np.zeros(3, np.int64))[0], second)
    assert third.root.state is None
    first.keep("first")
    assert third.root is second.root is first.root is first
    third.keep("third")
    assert third.root is third
    assert third.base is None
    assert second.root is first


def test_a_generation_may_get_a_state_while_another_thread_looks_for_one():
    class Kept(Generation):
        """A generation that gets a state whenever its base has been read."""

        @property
        def base(self) -> Generation | None:
            base, self.earlier = self.earlier, None
            self.state = "second"
            return base

        @base.setter
        def base(self, base: Generation | None) -> None:
            self.earlier = base

    first = Generation(lineage_of())
    first.keep("first")
    second = Kept(first.lineage, first)
    assert second.root is first
    assert second.root is second


def test_a_state_is_dropped_with_the_last_generation_that_it_serves():
    lineage = lineage_of()
    first = Generation(lineage)
    first.keep(State())
    state = weakref.ref(first.state)
    second = Generation(lineage.extended(np.arange(3), np.zeros(3, np.int64))[0], first)
    del first
    gc.collect()
    assert state() is not None
    second.keep(State())
    gc.collect()
    assert state() is None


@pytest.mark.parametrize("kept", [1, 2])  # of two sequences, of which all generations have one
def test_generations_of_replaced_members_are_freed(kept):
    def computed(number: int) -> tuple[Generation, np.ndarray]:
        generation = Generation(lineage_of([(7,), (number, 2)]))
        generation.keep(State())
        states.append(weakref.ref(generation.state))
        return generation, np.arange(2)

    states: list[weakref.ref[State]] = []
    joined, members = computed(0)
    for number in range(1, 9):
        generation, places = computed(number)
        parts = [(joined, members[-kept:]), (generation, places[-kept:])]
        joined, members = joined_generation(parts)
        members = members[-2:]
        del generation, parts
    assert sum(state() is not None for state in states) == len(joined.joined) <= 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_joined_sequence_begins_as_the_longest_one_with_a_state(order):
    first, only = Generation(lineage_of([(7,)])), np.zeros(1, np.int64)
    first.keep("first")
    extensions = [first.extended(only, np.array([[3]]))[0] for _ in range(2)]
    extensions[1].keep("second")
    joined, places = joined_generation([(extensions[i], only) for i in order])
    assert places.tolist() == [0, 0]
    [source] = joined.sources()
    assert source.generation is extensions[1]
    assert source.lengths.tolist() == [2]


JOINS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=1, max_size=3),  # populations
        st.lists(st.integers(0, 9), min_size=1, max_size=4),  # members of each
        st.integers(0, 4),  # members are truncated to lengths up to this, 0 for none
        st.integers(-1, 2),  # token that extends them; 2 for none
        st.booleans(),  # whether the result has a state
    ),
    min_size=1,
    max_size=6,
)


@given(JOINS)
def test_joined_sequences_begin_as_sequences_with_a_state(joins):
    first, is_truncated = Generation(lineage_of([(5,), (6,), (7, 7, 2)])), False
    first.keep("first")
    populations = [(first, np.arange(3))]
    computed = [[(first, place) for place in range(3)]]  # generation and place of each
    for number, (chosen, members, limit, token, is_computed) in enumerate(joins):
        parts, before, lengths = [], [], None
        for which in chosen:
            generation, places = populations[which % len(populations)]
            indices = np.array(members) % len(places)
            parts.append((generation, places[indices]))
            before += [computed[which % len(populations)][index] for index in indices]
        if limit:
            is_truncated = True
            current = [generation.lineage.lengths[places] for generation, places in parts]
            lengths = np.minimum(np.concatenate(current), 1 + np.arange(len(before)) % limit)
        joined, places = joined_generation(parts, lengths)
        distinct = sequences(joined.lineage)
        assert len(set(distinct)) == len(distinct)
        if token < 2:
            joined, places = joined.extended(places, np.full((len(places), 1), token))
        found = {}
        for source, origins, ends, shared in joined.sources():
            assert source.state is not None
            columns = (origins.tolist(), ends.tolist(), shared.tolist())
            for origin, end, length in zip(*columns, strict=True):
                earlier = source.lineage.sequence(origin).token_ids
                assert length == len(earlier) or (is_truncated and 0 < length < len(earlier))
                assert joined.lineage.sequence(end).token_ids[:length] == earlier[:length]
                found[end] = max(length, found.get(end, 0))
        for place, (source, origin) in zip(places.tolist(), before, strict=True):
            assert place in found
            if not is_truncated:
                assert found[place] >= source.lineage.lengths[origin]
        if is_computed:
            joined.keep(number)
            assert not joined.joined
            before = [(joined, place) for place in places.tolist()]
        populations.append((joined, places))
        computed.append(before)
