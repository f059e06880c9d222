"""Every query is evaluated once, children are assigned with parents, and work is balanced."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genlm.plugin import Generation, GroupQuery, Lineage, Query, TokenSequence
from genlm_ray.router import MAX_RECOMPUTED, MIN_SHARED_QUERIES, TOKEN_COST, Router

PROMPT = TokenSequence.of(range(256))


class Client:
    """Creates queries and assigns them with a router."""

    def __init__(self, replicas: int, **options: int) -> None:
        self.router = Router(**options)
        self.ids = itertools.count()
        for replica in range(replicas):
            self.router.add(replica)

    def query(self, sequence: TokenSequence, adapter: str | None = None) -> Query:
        return Query(next(self.ids), sequence, adapter)

    def evaluate(self, sequences: list[TokenSequence]) -> list[int]:
        """Submit queries together, finish them, and return their replicas."""
        queries = [self.query(sequence) for sequence in sequences]
        self.router.submit(queries)
        replicas = {
            routed.query.query_id: replica
            for replica, taken in self.take_all().items()
            for routed in taken
        }
        for query_id, replica in replicas.items():
            assert self.router.finish(query_id, replica)
        return [replicas[query.query_id] for query in queries]

    def take_all(self):
        return self.router.take(dict.fromkeys(self.router.work, 10**6))


def extended(sequences: list[TokenSequence], token: int = 7) -> list[TokenSequence]:
    return [TokenSequence.of([token], sequence) for sequence in sequences]


def children(parent: TokenSequence, count: int) -> list[TokenSequence]:
    return [TokenSequence.of([1000 + i], parent) for i in range(count)]


def test_a_population_is_split_and_each_child_stays_with_its_parent():
    client = Client(2)
    [first] = client.evaluate([PROMPT])
    population = children(PROMPT, 64)
    where = client.evaluate(population)
    assert {where.count(0), where.count(1)} <= {31, 32, 33}
    assert client.router.tokens_recomputed == 256  # the prompt, once, on the other replica
    for _ in range(20):
        population = extended(population)
        assert client.evaluate(population) == where
    assert client.router.tokens_recomputed == 256
    assert first in (0, 1)


def test_a_shared_prompt_that_was_not_requested_is_found_by_its_blocks():
    client = Client(2)
    where = client.evaluate(children(PROMPT, 64))
    assert {where.count(0), where.count(1)} <= {31, 32, 33}
    assert client.router.tokens_recomputed <= 256


def test_a_few_queries_do_not_move_for_the_sake_of_a_long_prompt():
    client = Client(2)
    [holder] = client.evaluate([PROMPT])
    assert client.evaluate(children(PROMPT, 3)) == [holder] * 3


def test_prompts_with_nothing_in_common_go_to_the_idlest():
    client = Client(3)
    prompts = [TokenSequence.of([i, *range(100)]) for i in range(9)]
    where = client.evaluate(prompts)
    assert sorted(where) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_resampled_population_is_spread_again_within_the_share_of_recomputed_tokens():
    client = Client(2)
    population = children(PROMPT, 64)
    where = client.evaluate(population)
    for _ in range(10):
        population = extended(population)
        client.evaluate(population)
    heir = population[where.index(0)]
    after = client.evaluate(children(heir, 64))
    assert {after.count(0), after.count(1)} <= {30, 31, 32, 33, 34}
    router = client.router
    assert router.tokens_recomputed <= 256 + 11 + MAX_RECOMPUTED * router.tokens_requested


def test_small_families_move_only_within_the_share_of_recomputed_tokens():
    client = Client(2)
    population = children(PROMPT, 64)
    where = client.evaluate(population)
    router = client.router
    for step in range(200):
        population = extended(population, step)
        where = client.evaluate(population)
        if step % 4 == 3:  # those of replica 0 are doubled, a part of the others is lost
            pairs = list(zip(population, where, strict=True))
            first = [sequence for sequence, replica in pairs if replica == 0]
            second = [sequence for sequence, replica in pairs if replica == 1]
            doubled = first[: MIN_SHARED_QUERIES // 2]
            twins = [TokenSequence.of([900 + i], parent) for parent in doubled for i in (0, 1)]
            population = (first[MIN_SHARED_QUERIES // 2 :] + twins + second)[:64]
            before = router.tokens_recomputed
            client.evaluate(population)
            assert router.tokens_recomputed - before < 1000
    assert router.tokens_recomputed <= 256 + MAX_RECOMPUTED * router.tokens_requested


def test_an_idle_replica_takes_what_waits_for_another():
    client = Client(1)
    router = client.router
    router.submit([client.query(sequence) for sequence in children(PROMPT, 200)])
    assert len(router.take({0: 40})[0]) == 40
    assert router.take({0: 0}) == {}
    router.add(1)
    taken = router.take({0: 0, 1: 40})
    assert list(taken) == [1]
    assert len(taken[1]) == 40
    assert {routed.replica for routed in taken[1]} == {1}


def batch(client: Client, first: int, count: int) -> list[Query]:
    """Return the queries of one request, whose sequences have nothing in common."""
    return [
        Query(next(client.ids), TokenSequence.of([first + i]), turn=i) for i in range(count)
    ]


def test_a_query_does_not_wait_for_all_queries_of_an_earlier_request():
    client = Client(1)
    router = client.router
    queries = batch(client, 0, 30)
    router.submit(queries)
    assert [routed.turn for routed in router.take({0: 10})[0]] == list(range(10))
    later = batch(client, 100, 2)
    router.submit(later)
    sent = router.take({0: 4})[0]
    assert [routed.query for routed in sent] == [*later, *queries[10:12]]
    assert router.turn == 1  # the first query is unanswered
    assert [routed.turn for routed in sent] == [1, 2, 10, 11]
    for query in queries[:10]:  # the replica computes the turns of what it has
        assert router.finish(query.query_id, 0)
    [routed] = router.take({0: 1})[0]
    assert (routed.query, routed.turn, router.turn) == (queries[12], 12, 2)
    assert router.finish(later[0].query_id, 0)
    assert router.finish(later[1].query_id, 0)
    [routed] = router.take({0: 1})[0]
    assert (routed.query, routed.turn, router.turn) == (queries[13], 13, 11)


def test_the_work_of_an_exchange_does_not_depend_on_the_number_of_waiting_queries():
    def count_calls(waiting: int) -> int:
        client = Client(1)
        sequences = [TokenSequence.of([i], PROMPT) for i in range(waiting)]
        client.router.submit([client.query(sequence) for sequence in sequences])
        client.router.take({0: 5})
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        client.router.submit([client.query(TokenSequence.of([0, 0]))])
        assert client.router.finish(0, 0)
        assert len(client.router.take({0: 1})[0]) == 1
        sys.setprofile(None)
        return calls

    assert count_calls(500) == count_calls(50)


def test_aborted_queries_leave_the_queue():
    client = Client(1)
    router = client.router
    waiting = batch(client, 0, 4)
    router.submit(waiting)
    for first in range(100, 1000, 100):
        aborted = batch(client, first, 20)
        router.submit(aborted)
        assert all(router.finish(query.query_id) for query in aborted)
        assert len(router._queue) <= 2 * len(waiting)
    assert [routed.query for routed in router.take({0: 10})[0]] == waiting


def test_queries_are_sent_although_later_requests_fill_a_replica():
    client = Client(1)
    router = client.router
    queries = batch(client, 0, 10)
    router.submit(queries)
    places = np.arange(3)
    lineage = Lineage.of_sequences([TokenSequence.of([i]) for i in places.tolist()])
    router.submit([GroupQuery(10**6, Generation(lineage), places, places, None)])
    sent = []
    for step in range(80):
        router.submit(batch(client, 100 + step, 1))
        [routed] = router.take({0: 1})[0]
        if isinstance(routed.query, Query):  # the population is never finished
            assert router.finish(routed.query.query_id, 0)
        sent.append(routed.query)
    assert [query for query in sent if query in queries] == queries


def test_what_a_lost_replica_had_goes_to_the_others_in_the_same_order():
    client = Client(2)
    router = client.router
    queries = [client.query(TokenSequence.of([i, i])) for i in range(20)]
    router.submit(queries)
    sent = router.take({0: 4, 1: 4})
    sent_ids = [routed.query.query_id for routed in sent[0]]
    assert len(sent_ids) == len(sent[1]) == 4
    router.reassign_from(1)
    after = [routed.query.query_id for routed in router.take({0: 100})[0]]
    assert after == [query.query_id for query in queries if query.query_id not in sent_ids]
    router.reassign_from(0)
    assert [routed.replica for routed in router._unanswered.values()] == [-1] * 20
    assert router.take({}) == {}
    router.add(2)
    assert [routed.query.query_id for routed in router.take({2: 100})[2]] == sorted(
        query.query_id for query in queries
    )


def test_a_context_is_forgotten_when_it_is_released_or_the_least_recently_used():
    client = Client(1, max_contexts=4)
    router = client.router
    sequences = [TokenSequence.of([i]) for i in range(6)]
    client.evaluate(sequences)
    released = [router.release(None, sequence.key) for sequence in sequences]
    assert released[:2] == [None, None]
    assert [context.sequence for context in released[2:]] == sequences[2:]
    assert [list(context.replicas) for context in released[2:]] == [[0]] * 4
    assert router.release(None, sequences[5].key) is None


def test_adapters_keep_contexts_apart():
    client = Client(2)
    client.evaluate([PROMPT])
    query = client.query(TokenSequence.of([1], PROMPT), "poet")
    client.router.submit([query])
    [[routed]] = client.take_all().values()
    assert routed.parent is None


def test_populations_cost_their_sequences():
    client = Client(2)
    router = client.router
    places = np.arange(50)
    lineage = Lineage.of_sequences([TokenSequence.of([i]) for i in places.tolist()])
    router.submit([GroupQuery(100, Generation(lineage), places, places, None)])
    [[group]] = client.take_all().values()
    assert router.work[group.replica] == 50
    where = client.evaluate([TokenSequence.of([i, 3]) for i in range(20)])
    assert group.replica not in where
    assert router.finish(100, group.replica) is group
    assert router.work == {0: 0, 1: 0}


def test_a_text_costs_its_targets():
    client = Client(2)
    client.router.submit([Query(0, TokenSequence.of([5, 6, 7]), targets=(6, 7))])
    [[text]] = client.take_all().values()
    assert text.cost == client.router.work[text.replica] == 3 + 2 * TOKEN_COST


class RouterMachine(RuleBasedStateMachine):
    """Model test of the router: every query is in one place and is finished once."""

    def __init__(self) -> None:
        super().__init__()
        self.client = Client(1, max_contexts=30)  # so that queries use evicted ones
        self.router = self.client.router
        self.numbers = itertools.count(1)
        self.known = [TokenSequence.of([1, 2, 3])]
        self.unanswered: list[int] = []
        self.sent: dict[int, int] = {}

    @rule(picks=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=30))
    def submit(self, picks):
        sequences = [
            TokenSequence.of([token], self.known[which % len(self.known)])
            for which, token in picks
        ]
        queries = [self.client.query(sequence) for sequence in sequences]
        self.router.submit(queries)
        self.known += sequences
        self.unanswered += [query.query_id for query in queries]

    @precondition(lambda self: self.router.work)
    @rule(which=st.integers(0, 9), most=st.integers(0, 20))
    def take(self, which, most):
        room = {replica: (replica + which) % (most + 1) for replica in self.router.work}
        for replica, taken in self.router.take(room).items():
            assert 0 < len(taken) <= room[replica]
            for routed in taken:
                assert routed.query.query_id not in self.sent
                assert routed.replica == replica
                self.sent[routed.query.query_id] = replica

    @precondition(lambda self: self.unanswered)
    @rule(which=st.integers(0, 999), stale=st.booleans())
    def finish(self, which, stale):
        query_id = self.unanswered[which % len(self.unanswered)]
        replica = self.sent.get(query_id)
        if stale or replica is None:
            assert not self.router.finish(query_id, -2)
            return
        assert self.router.finish(query_id, replica)
        assert not self.router.finish(query_id, replica)
        self.unanswered.remove(query_id)
        del self.sent[query_id]

    @precondition(lambda self: self.unanswered)
    @rule(which=st.integers(0, 999))
    def abort(self, which):
        query_id = self.unanswered.pop(which % len(self.unanswered))
        assert self.router.finish(query_id)
        self.sent.pop(query_id, None)

    @rule()
    def add(self):
        self.router.add(next(self.numbers))

    @precondition(lambda self: self.router.work)
    @rule(which=st.integers(0, 9))
    def lose(self, which):
        replica = list(self.router.work)[which % len(self.router.work)]
        self.router.reassign_from(replica)
        self.sent = {query_id: at for query_id, at in self.sent.items() if at != replica}

    @invariant()
    def each_query_is_in_one_place(self):
        router = self.router
        unanswered = router._unanswered
        assert sorted(unanswered) == sorted(self.unanswered)
        assert {
            n: each.replica for n, each in unanswered.items() if each.replica >= 0
        } == self.sent
        for replica, work in router.work.items():
            sent = [routed for routed in unanswered.values() if routed.replica == replica]
            assert router.in_flight[replica] == len(sent)
            assert work == pytest.approx(sum(routed.cost for routed in sent), abs=1e-6)


RouterMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
test_every_query_is_in_one_place_and_answered_once = RouterMachine.TestCase
