"""Every query is evaluated once, children beside their parents, and work is evened out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genlm.plugin import Generation, GroupQuery, Lineage, Query, TokenSequence
from genlm_ray.router import MAX_RECOMPUTED, SHARED, Router

PROMPT = TokenSequence.of(range(256))


class Asker:
    """Makes queries and asks a router where they go."""

    def __init__(self, replicas: int, **options: int) -> None:
        self.router = Router(**options)
        self.ids = itertools.count()
        for replica in range(replicas):
            self.router.add(replica)

    def query(self, sequence: TokenSequence, adapter: str | None = None) -> Query:
        return Query(next(self.ids), sequence, adapter)

    def evaluate(self, sequences: list[TokenSequence]) -> list[int]:
        """Ask all at once, answer all, and return the replica of each."""
        queries = [self.query(sequence) for sequence in sequences]
        self.router.submit(queries)
        where = {
            routed.query.query_id: replica
            for replica, taken in self.take_all().items()
            for routed in taken
        }
        for query_id, replica in where.items():
            assert self.router.finished(query_id, replica)
        return [where[query.query_id] for query in queries]

    def take_all(self):
        return self.router.take(dict.fromkeys(self.router.replicas, 10**6))


def extended(sequences: list[TokenSequence], token: int = 7) -> list[TokenSequence]:
    return [TokenSequence.of([token], sequence) for sequence in sequences]


def children(parent: TokenSequence, count: int) -> list[TokenSequence]:
    return [TokenSequence.of([1000 + i], parent) for i in range(count)]


def test_a_population_is_split_and_each_child_stays_with_its_parent():
    asker = Asker(2)
    [first] = asker.evaluate([PROMPT])
    population = children(PROMPT, 64)
    where = asker.evaluate(population)
    assert {where.count(0), where.count(1)} <= {31, 32, 33}
    assert asker.router.tokens_recomputed == 256  # the prompt, once, on the other replica
    for _ in range(20):
        population = extended(population)
        assert asker.evaluate(population) == where
    assert asker.router.tokens_recomputed == 256
    assert first in (0, 1)


def test_a_shared_prompt_that_nobody_asked_is_found_by_its_blocks():
    asker = Asker(2)
    where = asker.evaluate(children(PROMPT, 64))
    assert {where.count(0), where.count(1)} <= {31, 32, 33}
    assert asker.router.tokens_recomputed <= 256


def test_a_few_queries_do_not_move_for_the_sake_of_a_long_prompt():
    asker = Asker(2)
    [home] = asker.evaluate([PROMPT])
    assert asker.evaluate(children(PROMPT, 3)) == [home] * 3


def test_prompts_with_nothing_in_common_go_to_the_idlest():
    asker = Asker(3)
    prompts = [TokenSequence.of([i, *range(100)]) for i in range(9)]
    where = asker.evaluate(prompts)
    assert sorted(where) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_resampled_population_is_spread_again_within_the_share_of_recomputed_tokens():
    asker = Asker(2)
    population = children(PROMPT, 64)
    where = asker.evaluate(population)
    for _ in range(10):
        population = extended(population)
        asker.evaluate(population)
    heir = population[where.index(0)]
    after = asker.evaluate(children(heir, 64))
    assert {after.count(0), after.count(1)} <= {30, 31, 32, 33, 34}
    router = asker.router
    assert router.tokens_recomputed <= 256 + 11 + MAX_RECOMPUTED * router.tokens_asked


def test_small_families_move_only_within_the_share_of_recomputed_tokens():
    asker = Asker(2)
    population = children(PROMPT, 64)
    where = asker.evaluate(population)
    router = asker.router
    for step in range(200):
        population = extended(population, step)
        where = asker.evaluate(population)
        if step % 4 == 3:  # those of replica 0 are doubled, a part of the others is lost
            mine = [one for one, at in zip(population, where, strict=True) if at == 0]
            others = [one for one, at in zip(population, where, strict=True) if at == 1]
            doubled = mine[: SHARED // 2]
            twins = [TokenSequence.of([900 + i % 2], one) for one in doubled for i in range(2)]
            population = (mine[SHARED // 2 :] + twins + others)[:64]
            router_before = router.tokens_recomputed
            asker.evaluate(population)
            assert router.tokens_recomputed - router_before < 1000
    assert router.tokens_recomputed <= 256 + MAX_RECOMPUTED * router.tokens_asked


def test_an_idle_replica_takes_what_waits_for_another():
    asker = Asker(1)
    router = asker.router
    router.submit([asker.query(each) for each in children(PROMPT, 200)])
    assert len(router.take({0: 40})[0]) == 40
    assert router.take({0: 0}) == {}
    router.add(1)
    taken = router.take({0: 0, 1: 40})
    assert list(taken) == [1]
    assert len(taken[1]) == 40
    assert {each.replica for each in taken[1]} == {1}


def test_what_a_lost_replica_had_goes_to_the_others_in_the_same_order():
    asker = Asker(2)
    router = asker.router
    queries = [asker.query(TokenSequence.of([i, i])) for i in range(20)]
    router.submit(queries)
    sent = router.take({0: 4, 1: 4})
    kept = [each.query.query_id for each in sent[0]]
    assert len(kept) == len(sent[1]) == 4
    router.reassign_from(1)
    after = [each.query.query_id for each in router.take({0: 100})[0]]
    assert after == [one.query_id for one in queries if one.query_id not in kept]
    router.reassign_from(0)
    assert len(router) == 20
    assert router.take({}) == {}
    router.add(2)
    assert [each.query.query_id for each in router.take({2: 100})[2]] == sorted(
        query.query_id for query in queries
    )


def test_a_context_is_forgotten_when_it_is_released_or_the_least_recently_used():
    asker = Asker(1, max_contexts=4)
    router = asker.router
    sequences = [TokenSequence.of([i]) for i in range(6)]
    asker.evaluate(sequences)
    released = [router.release(None, each.key) for each in sequences]
    assert released[:2] == [None, None]
    assert [each.sequence for each in released[2:]] == sequences[2:]
    assert [list(each.replicas) for each in released[2:]] == [[0]] * 4
    assert router.release(None, sequences[5].key) is None


def test_adapters_keep_contexts_apart():
    asker = Asker(2)
    asker.evaluate([PROMPT])
    query = asker.query(TokenSequence.of([1], PROMPT), "poet")
    asker.router.submit([query])
    [[routed]] = asker.take_all().values()
    assert routed.parent is None


def test_populations_cost_their_sequences():
    asker = Asker(2)
    router = asker.router
    places = np.arange(50)
    lineage = Lineage.of_sequences([TokenSequence.of([i]) for i in places.tolist()])
    router.submit([GroupQuery(100, Generation(lineage), places, places, None)])
    [[group]] = asker.take_all().values()
    assert router.work[group.replica] == 50
    where = asker.evaluate([TokenSequence.of([i, 3]) for i in range(20)])
    assert group.replica not in where
    assert router.finished(100, group.replica) is group
    assert router.work == {0: 0, 1: 0}


class RouterMachine(RuleBasedStateMachine):
    """The router against sets: every query is in one place, and is answered once."""

    def __init__(self) -> None:
        super().__init__()
        self.asker = Asker(1)
        self.router = self.asker.router
        self.numbers = itertools.count(1)
        self.known = [TokenSequence.of([1, 2, 3])]
        self.unanswered: list[int] = []
        self.sent: dict[int, int] = {}

    @rule(picks=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=30))
    def ask(self, picks):
        sequences = [
            TokenSequence.of([token], self.known[which % len(self.known)])
            for which, token in picks
        ]
        queries = [self.asker.query(each) for each in sequences]
        self.router.submit(queries)
        self.known += sequences
        self.unanswered += [query.query_id for query in queries]

    @precondition(lambda self: self.router.replicas)
    @rule(which=st.integers(0, 9), most=st.integers(0, 20))
    def take(self, which, most):
        room = {one: (one + which) % (most + 1) for one in self.router.replicas}
        for replica, taken in self.router.take(room).items():
            assert 0 < len(taken) <= room[replica]
            for each in taken:
                assert each.query.query_id not in self.sent
                assert each.replica == replica
                self.sent[each.query.query_id] = replica

    @precondition(lambda self: self.unanswered)
    @rule(which=st.integers(0, 999), stale=st.booleans())
    def finish(self, which, stale):
        query_id = self.unanswered[which % len(self.unanswered)]
        replica = self.sent.get(query_id)
        if stale or replica is None:
            assert not self.router.finished(query_id, -2)
            return
        assert self.router.finished(query_id, replica)
        assert not self.router.finished(query_id, replica)
        self.unanswered.remove(query_id)
        del self.sent[query_id]

    @precondition(lambda self: self.unanswered)
    @rule(which=st.integers(0, 999))
    def abort(self, which):
        query_id = self.unanswered.pop(which % len(self.unanswered))
        assert self.router.finished(query_id)
        self.sent.pop(query_id, None)

    @rule()
    def add(self):
        self.router.add(next(self.numbers))

    @precondition(lambda self: self.router.replicas)
    @rule(which=st.integers(0, 9))
    def lose(self, which):
        replica = self.router.replicas[which % len(self.router.replicas)]
        self.router.reassign_from(replica)
        self.sent = {query: at for query, at in self.sent.items() if at != replica}

    @invariant()
    def each_query_is_in_one_place(self):
        router = self.router
        assert sorted([*router._waiting, *router._sent]) == sorted(self.unanswered)
        assert len(router) == len(self.unanswered)
        assert {one: each.replica for one, each in router._sent.items()} == self.sent
        for replica, work in router.work.items():
            sent = [each for each in router._sent.values() if each.replica == replica]
            assert router.in_flight(replica) == len(sent)
            assert work == pytest.approx(sum(each.cost for each in sent), abs=1e-6)


RouterMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
test_every_query_is_in_one_place_and_answered_once = RouterMachine.TestCase
