"""Contexts longer than a pass: one pass in each step, in turns with other requests."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm import Completion, Query, TokenScores
from genlm.core.engine.halving import UnfinishedError
from genlm.core.queries.query import GroupQuery
from genlm.core.queries.sequence import TokenSequence
from genlm.prefix import ForwardResult, TokenBatch

from .test_populations import Engine, Members, check
from .test_rows import expected, text
from .test_scoring import right_scores, scored

Ids = tuple[int, ...]
AnyQuery = Query | GroupQuery


def serve(capacity: int = 500, *, makes_room: bool = False, **limits: int) -> Engine:
    return Engine(capacity, makes_room=makes_room, **{"max_tokens": 4, "max_rows": 4} | limits)


def long(seed: int, length: int = 14) -> Ids:
    return tuple(i % 3 for i in text(length, seed))


KINDS = ("row", "text", "population")


class Traffic:
    """Submits queries of all kinds, and compares their results with those of no cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pending: dict[int, tuple[AnyQuery, Any]] = {}
        self.failed: set[int] = set()
        self.count = 0

    def submit(self, query: AnyQuery, about: Any = None) -> int:
        group = isinstance(query, GroupQuery)
        self.engine.submit_group(query) if group else self.engine.submit(query)
        self.pending[query.query_id] = query, about
        self.count += 1
        return query.query_id

    def row(self, ids: Ids, adapter: str | None = None) -> int:
        return self.submit(Query(self.count, ids, adapter))

    def text(self, ids: Ids, adapter: str | None = None) -> int:
        query = scored(ids, 1 + len(ids) // 4)
        return self.submit(query.replace(query_id=self.count, adapter=adapter))

    def population(self, prompts: list[Ids], adapter: str | None = None) -> int:
        members = Members(prompts, adapter)
        places = list(range(len(prompts)))
        return self.submit(members.query(places, self.count), (members, places))

    def submit_kind(self, kind: str, ids: Ids, adapter: str | None = None) -> int:
        if kind == "population":
            return self.population([ids, ids], adapter)
        return self.row(ids, adapter) if kind == "row" else self.text(ids, adapter)

    def abort(self, query_id: int) -> None:
        self.engine.abort(query_id)
        del self.pending[query_id]

    def step(self) -> list[int]:
        completions = self.engine.step()
        for completion in completions:
            self.check(completion, *self.pending.pop(completion.query_id))
        return sorted(completion.query_id for completion in completions)

    def check(self, completion: Completion, query: AnyQuery, about: Any) -> None:
        result: Any = completion.result
        if completion.error is not None:
            assert str(completion.error) == "no memory"
            self.failed.add(query.query_id)
        elif isinstance(query, GroupQuery):
            members, places = about
            if members.check(result, places).errors:
                self.failed.add(query.query_id)
        elif query.targets:
            wanted = right_scores(query.adapter, query)
            assert isinstance(result, TokenScores), result
            torch.testing.assert_close(result.logprobs, wanted.logprobs, rtol=0, atol=1e-6)
        else:
            row = expected(query.adapter, query.token_ids)
            torch.testing.assert_close(result, row, rtol=0, atol=1e-6)

    def finish(self) -> list[list[int]]:
        """Step until all queries are complete; then nothing may be pinned."""
        steps = []
        while self.pending:
            steps.append(self.step())
        assert self.engine.step() == []
        assert not self.engine._unfinished
        check(self.engine)
        return steps

    @property
    def passes(self) -> int:
        return int(self.engine.statistics()["forwards"])


@pytest.fixture
def traffic() -> Traffic:
    return Traffic(serve())


def test_a_step_computes_one_pass_and_others_take_turns_with_it(traffic: Traffic) -> None:
    first = traffic.row(long(0))
    assert traffic.step() == []
    others = [traffic.row((1, 2)), traffic.row((2, 2), "red"), traffic.text((1, 2, 1))]
    steps = [traffic.step() for _ in range(3)]
    assert steps == [[query_id] for query_id in others]
    assert [traffic.step() for _ in range(3)] == [[], [], [first]]
    assert traffic.passes == 7


def test_requests_that_arrive_before_every_step_take_two_steps_of_three(
    traffic: Traffic,
) -> None:
    first = traffic.row(long(0))
    steps: list[list[int]] = []
    while not steps or first not in steps[-1]:
        traffic.row((traffic.count % 3, 1))
        steps.append(traffic.step())
    assert [len(step) for step in steps] == [0, *[2, 1, 0] * 2, 2, 1, 1]
    traffic.finish()


def test_requests_do_not_hold_up_a_long_context_if_another_one_waits(traffic: Traffic) -> None:
    first = traffic.row(long(0))
    traffic.row(long(1))
    steps: list[list[int]] = []
    while not steps or first not in steps[-1]:
        assert len(steps) < 12
        traffic.row((traffic.count % 3, 1))
        steps.append(traffic.step())
    traffic.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_long_contexts_are_computed_one_after_the_other(traffic: Traffic, kind: str) -> None:
    query_ids = [traffic.submit_kind(kind, (seed, *long(seed, 13))) for seed in range(3)]
    steps = traffic.finish()
    assert steps == [step for i in query_ids for step in ([], [], [], [i])]
    assert traffic.passes == len(steps)


def test_populations_take_turns_with_a_population_of_long_prompts(traffic: Traffic) -> None:
    first = traffic.population([long(0), long(1), long(0)])
    assert traffic.step() == []
    second = traffic.population([(1,), (2,)])
    third = traffic.population([long(2)])
    steps = traffic.finish()
    assert steps.index([second]) == 1
    assert steps.index([third]) < steps.index([first])  # which has two long contexts
    assert traffic.passes == len(steps) + 1


def test_a_long_sequence_of_a_population_is_computed_alone() -> None:
    traffic = Traffic(serve(max_tokens=12, max_rows=8))
    traffic.population([(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (1, 0), (2, 0), long(0)])
    steps = traffic.finish()
    assert traffic.passes == len(steps)


def test_passes_of_one_sequence_of_a_population_are_not_those_of_another() -> None:
    engine = serve()
    population = Members([(0, *long(0)), (1, *long(1))])
    query, logits = population.query([0, 1]), []
    with pytest.raises(UnfinishedError):
        engine.evaluate_groups([(query, np.array([0]))])
    while not logits:
        with contextlib.suppress(UnfinishedError):
            logits.append(engine.evaluate_groups([(query, np.array([1]))]).values[0])
    row = logits[0].log_softmax(0)
    torch.testing.assert_close(row, expected(None, population.ids[1]), rtol=0, atol=1e-6)
    check(engine)


def test_a_population_and_a_query_of_long_contexts_take_turns(traffic: Traffic) -> None:
    traffic.population([long(0)] * 3)
    traffic.row(long(1))
    traffic.text(long(2))
    short = traffic.row((1, 2))
    steps = traffic.finish()
    assert steps.index([short]) == 3
    assert traffic.passes == len(steps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_an_aborted_query_can_be_evicted(traffic: Traffic, kind: str) -> None:
    aborted = traffic.submit_kind(kind, long(0))
    traffic.step()
    traffic.step()
    tree = traffic.engine.path._tree
    assert tree.available == tree.capacity - 8
    traffic.abort(aborted)
    assert tree.available == tree.capacity
    traffic.row(long(1))
    traffic.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_a_later_pass_fails_only_its_query(traffic: Traffic, kind: str) -> None:
    failing = traffic.submit_kind(kind, long(0))
    traffic.step()
    traffic.engine.model.fail = True
    assert traffic.step() == [failing]
    traffic.engine.model.fail = False
    assert traffic.failed == {failing}
    gc.collect()  # tracebacks of failures refer to populations
    tree = traffic.engine.path._tree
    assert tree.available == tree.capacity
    traffic.submit_kind(kind, long(0))
    traffic.finish()
    assert traffic.failed == {failing}


@pytest.mark.parametrize("by_path", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cleared_cache_restarts_a_long_context(
    traffic: Traffic, kind: str, by_path: bool
) -> None:
    traffic.submit_kind(kind, long(0))
    traffic.step()
    traffic.engine.path.clear() if by_path else traffic.engine.clear_prefix_cache()
    traffic.row(long(0)[:3])
    assert len(traffic.finish()) == 1 + 3  # three tokens are cached


def test_scores_from_before_the_cache_was_cleared_are_not_used() -> None:
    engine = serve()
    query, forward = scored(long(0), 1), engine.path.forward
    engine.submit(query)
    assert engine.step() == []

    def changed(batch: TokenBatch) -> ForwardResult:
        result = forward(batch)
        return dataclasses.replace(result, logits=-result.logits)

    engine.path.forward = changed  # new weights
    engine.clear_prefix_cache()
    while not (completions := engine.step()):
        pass
    [completion] = completions
    ids = query.sequence.token_ids
    rows = [(-expected(None, ids[:end])).log_softmax(0) for end in range(1, len(ids) + 1)]
    right = [row[target] for row, target in zip(rows, query.targets, strict=True)]
    assert isinstance(completion.result, TokenScores)
    torch.testing.assert_close(
        completion.result.logprobs, torch.stack(right), rtol=0, atol=1e-6
    )


def test_requests_do_not_evict_the_computed_part_of_a_long_context() -> None:
    traffic = Traffic(serve(20))
    first = traffic.row(long(0))
    steps: list[list[int]] = []
    while not steps or first not in steps[-1]:
        steps.append(traffic.step())
        traffic.row((1 + traffic.count % 2, *long(traffic.count, 3)))
    assert steps.count([]) == 3
    assert traffic.engine.statistics()["tokens_evicted"] > 0
    assert traffic.engine.statistics()["contexts_without_cache"] == 0
    traffic.finish()


def test_a_context_for_which_slots_are_pinned_meanwhile_is_computed_without_cache() -> None:
    traffic = Traffic(serve(18))
    traffic.row((0, *long(0, 13)))
    traffic.step()
    traffic.engine.cache_prefix((2,) * 10, None)
    assert [traffic.step() for _ in range(2)] == [[], [0]]
    assert traffic.engine.statistics()["contexts_without_cache"] == 1
    traffic.engine.clear_prefix_cache()
    traffic.finish()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["row", "text"])
def test_contexts_that_do_not_fit_together_are_computed_one_after_the_other(
    kind: str, other: str
) -> None:
    traffic = Traffic(serve(18, makes_room=True))
    traffic.population([long(0)])
    traffic.submit_kind(other, (2, *long(1, 13)), "red")
    for _ in range(4):
        traffic.step()
    traffic.submit_kind(kind, (1, *long(2, 13)))
    traffic.finish()
    assert not traffic.failed
    assert traffic.engine.statistics()["contexts_without_cache"] == 0


def test_an_error_of_a_context_that_makes_room_is_its_own() -> None:
    traffic = Traffic(serve(18, makes_room=True))
    first, second = traffic.population([long(0)]), traffic.row((2, *long(1, 13)))
    while len(traffic.engine._unfinished) < 2:
        traffic.step()
    [unfinished] = [each for i, each in traffic.engine._unfinished.items() if i == first]
    unfinished.passes.close()

    def failing() -> Any:
        raise RuntimeError("no memory")
        yield

    traffic.engine._unfinished[first] = unfinished._replace(passes=failing())
    assert traffic.engine.compute_unfinished()
    assert not traffic.engine.compute_unfinished()
    traffic.finish()
    assert traffic.failed == {first}
    assert second not in traffic.failed


IDS = st.lists(st.integers(0, 2), min_size=2, max_size=14).map(tuple)
ADAPTER = st.sampled_from([None, None, "red"])
PROGRAM = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(KINDS), st.lists(IDS, min_size=1, max_size=3), ADAPTER),
        st.tuples(st.sampled_from(KINDS), st.lists(IDS, min_size=1, max_size=3), ADAPTER),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(1, 2)),
        st.tuples(st.just("release"), IDS),
        st.tuples(st.just("clear")),
    ),
    min_size=5,
    max_size=30,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0, 6, 14, 25, 500]), st.sampled_from([2, 4, 5]), st.booleans(), PROGRAM)
def test_results_do_not_depend_on_the_order_of_events(
    capacity: int, max_tokens: int, makes_room: bool, program: list[Any]
) -> None:
    traffic = Traffic(serve(capacity, max_tokens=max_tokens, makes_room=makes_room))
    engine = traffic.engine
    may_fail = False
    for name, *arguments in program:
        if name == "step":
            for _ in range(arguments[0]):
                before = traffic.passes
                traffic.step()
                if capacity == 500 and not may_fail:
                    assert traffic.passes <= before + 1
                assert engine.model.largest[0] <= max_tokens
        elif name == "abort":
            if traffic.pending:
                ids = list(traffic.pending)
                traffic.abort(ids[arguments[0] % len(ids)])
        elif name == "fail":
            may_fail = engine.model.fail = True
            for _ in range(arguments[0]):
                traffic.step()
            engine.model.fail = False
        elif name == "clear":
            engine.clear_prefix_cache()
        elif name == "release":
            engine.release_context(None, TokenSequence.of(arguments[0]).key)
        elif name == "population":
            traffic.population(*arguments)
        else:
            for ids in arguments[0]:
                traffic.submit_kind(name, ids, arguments[1])
    traffic.finish()
    assert may_fail or not traffic.failed
    if makes_room and capacity >= 14 and not may_fail:  # every context fits alone
        assert engine.statistics()["contexts_without_cache"] == 0
