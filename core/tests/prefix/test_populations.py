"""Populations over block tables: rows of every member, and the reference counts of slots."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from genlm import (
    AsyncLM,
    OutputCache,
    Population,
    PopulationError,
    Query,
    Token,
    TokenIdError,
    Vocabulary,
)
from genlm.core.engine.halving import UnfinishedError
from genlm.core.queries.generations import Generation, Lineage
from genlm.core.queries.query import GroupQuery, GroupReduction, GroupResult, GroupValues
from genlm.core.queries.scored_rows import scored_rows
from genlm.core.queries.sequence import TokenSequence
from genlm.prefix import (
    ForwardResult,
    PathChoice,
    PrefixEngine,
    PrefixRows,
    TokenBatch,
)
from genlm.prefix.block_table import BlockTable, joined_rows
from genlm.prefix.tree import PrefixTree

from .test_engine import Adapters
from .test_engine import Engine as Uncached
from .test_rows import SIZE, TOKEN_BYTES, Alone, expected, packed
from .test_tree import check as check_tree
from .test_tree import prefixes

Ids = tuple[int, ...]


class Rows(GroupReduction):
    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (rows[row_of],)


class Model:
    """Keeps in each slot the adapter and the sequence that ends there."""

    def __init__(self, capacity: int) -> None:
        self.slots: list[tuple[str | None, Ids] | None] = [None] * (capacity + 1)
        self.largest = (0, 0)
        self.fail = self.by_stages = False
        self.tokens = self.table_tokens = 0
        self.logits = torch.empty(0)

    def __call__(self, batch: TokenBatch) -> ForwardResult:
        order, ends = np.arange(len(batch.tokens)), {}
        is_same_row = np.diff(batch.rows) == 0  # the tokens of a row are one after another
        assert len(order) - is_same_row.sum() == len(np.unique(batch.rows))
        assert (np.diff(batch.positions)[is_same_row] > 0).all()
        assert (batch.positions >= len(batch.trunk)).all()
        if self.by_stages:
            order = np.concatenate([stage.tokens for stage in batch.stages()])
        for index in order.tolist():
            *past, slot = batch.path(batch.rows[index], batch.positions[index] + 1)
            known = (*self._sequence(batch.adapter, past), int(batch.tokens[index]))
            if write := batch.writes[index]:
                assert write == slot
                self.slots[write] = (batch.adapter, known)
            assert self.slots[slot] == (batch.adapter, known)
            ends[index] = known
        return self._result(
            batch.adapter, len(ends), [ends[index] for index in batch.results.tolist()]
        )

    def _sequence(self, adapter: str | None, slots: Sequence[int]) -> Ids:
        ids: Ids = ()
        for slot in slots:
            known = self.slots[slot]
            assert known is not None
            assert known == (adapter, (*ids, known[1][-1]))
            ids = known[1]
        return ids

    def _result(self, adapter: str | None, tokens: int, ends: list[Ids]) -> ForwardResult:
        if self.fail:
            raise RuntimeError("no memory")
        self.tokens += tokens
        self.largest = max(self.largest[0], tokens), max(self.largest[1], len(ends))
        self.logits.fill_(torch.nan)  # a pass may overwrite the logits of the last one
        self.logits = torch.stack([expected(adapter, ids) for ids in ends])
        return ForwardResult(self.logits, tokens, 1)


class Engine(PrefixEngine):
    """An engine of `Model`; `faults` are the errors that halving a batch would hide."""

    backend = "toy"

    def __init__(
        self, capacity: int, *, embedded: int = SIZE, makes_room: bool = False, **limits: int
    ) -> None:
        tokens = [Token(i, bytes([65 + i])) for i in range(SIZE)]
        self.vocabulary = Vocabulary(None, tokens, [str(token) for token in tokens])
        self.model = Model(capacity)
        self.faults: list[Exception] = []
        self.loaded = Adapters()
        self.loaded.load("red", "folder")
        self.path = PrefixRows(
            self.model,
            uncached=Alone(),
            vocabulary=self.vocabulary,
            budget_bytes=(capacity + 1) * TOKEN_BYTES,
            bytes_per_token=TOKEN_BYTES,
            make_room=self.compute_unfinished if makes_room else lambda: False,
            **{"max_tokens": 20, "max_rows": 8} | limits,
        )
        self.serve(PathChoice("tree", self.path, ""), self.loaded, embedding_rows=embedded)
        compute = self.path.group_logits

        def counted(parts: Any) -> torch.Tensor | None:
            before = self.model.tokens
            logits = compute(parts)
            self.model.table_tokens += self.model.tokens - before
            return logits

        self.path.group_logits = counted  # type: ignore[method-assign]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record errors that are neither of the model's memory nor of the number of slots."""
        try:
            yield
        except (RuntimeError, UnfinishedError):
            raise
        except Exception as error:
            self.faults.append(error)
            raise

    def evaluate_groups(self, parts: Any) -> GroupValues:
        with self.recorded():
            return super().evaluate_groups(parts)

    def evaluate(self, queries: Sequence[Query]) -> GroupValues:
        with self.recorded():
            return super().evaluate(queries)

    def answer(self, query: Query | GroupQuery) -> Any:
        """The result of the only query."""
        self.submit_group(query) if isinstance(query, GroupQuery) else self.submit(query)
        while not (completions := self.step()):
            pass
        [completion] = completions
        if completion.error is not None:
            raise completion.error
        return completion.result

    def answer_all(self, queries: Sequence[GroupQuery]) -> dict[int, GroupResult]:
        """The results of several populations, which are pending together."""
        for query in queries:
            self.submit_group(query)
        results: dict[int, Any] = {}
        while len(results) < len(queries):
            for completion in self.step():
                assert completion.error is None
                results[completion.query_id] = completion.result
        return results

    @property
    def tables(self) -> Any:
        return self.path.populations.tables


class Members:
    """A population: a generation, the place of each member, and what each should be."""

    def __init__(self, prompts: list[Ids], adapter: str | None = None) -> None:
        distinct = list(dict.fromkeys(prompts))
        lineage = Lineage.of_sequences([TokenSequence.of(ids) for ids in distinct])
        self.generation = Generation(lineage)
        self.places = np.array([distinct.index(ids) for ids in prompts])
        self.ids = list(prompts)
        self.adapter = adapter

    def extend(self, tokens: list[Ids]) -> None:
        lineage = self.generation.lineage
        for column in np.array(tokens).T:
            lineage, self.places = lineage.extended(self.places, column)
        self.generation = Generation(lineage, self.generation)
        self.ids = [
            (*ids, *(i for i in new if i >= 0))
            for ids, new in zip(self.ids, tokens, strict=True)
        ]

    def resample(self, members: list[int]) -> None:
        self.places = self.places[members]
        self.ids = [self.ids[i] for i in members]

    def query(self, members: list[int], query_id: int = 0) -> GroupQuery:
        wanted, row_of = np.unique(self.places[members], return_inverse=True)
        return GroupQuery(query_id, self.generation, wanted, row_of, Rows(), self.adapter)

    def ask(self, engine: Engine, members: list[int] | None = None) -> GroupResult:
        places = list(range(len(self.ids))) if members is None else members
        return self.check(engine.answer(self.query(places)), places)

    def check(self, result: GroupResult, places: list[int]) -> GroupResult:
        if not result.errors:
            wanted = torch.stack([expected(self.adapter, self.ids[i]) for i in places])
            torch.testing.assert_close(result.columns[0], wanted, rtol=0, atol=1e-6)
        return result


def ask_together(engine: Engine, populations: Sequence[Members]) -> list[GroupResult]:
    """Request all members of several populations at once."""
    members = [list(range(len(population.ids))) for population in populations]
    queries = [
        population.query(places, number)
        for number, (population, places) in enumerate(zip(populations, members, strict=True))
    ]
    results = engine.answer_all(queries)
    return [
        population.check(results[number], places)
        for number, (population, places) in enumerate(zip(populations, members, strict=True))
    ]


def check(engine: Engine) -> None:
    """Reference counts, free slots and pins against what the tables say, row by row."""
    assert not engine.faults
    tables, tree = engine.tables, engine.path._tree
    tables.collect()
    in_tree = prefixes(tree)
    counts: Counter[int] = Counter()
    parents: dict[int, int] = {}
    extended = [entry.nbytes for entry in tables._entries.values() if entry.is_extended]
    assert tables._extended_bytes == sum(extended)
    for adapter, table, *_ in tables._entries.values():
        for row in range(len(table)):
            path = [*table.trunk, *table.slots[row, : table.lengths[row]]]
            path = [int(slot) for slot in path]
            assert len(path) == table.tokens[row]
            if path:
                counts[path[-1]] += 1
            engine.model._sequence(adapter, path)
            shared = [i for i, slot in enumerate(path) if slot in tables._pinned]
            begin = shared[-1] + 1 if shared else 0
            assert set(path[:begin]) <= set(in_tree.values())
            for i in range(begin, len(path)):
                parents[path[i]] = path[i - 1] if i else 0
    assert not parents.keys() & set(in_tree.values())
    counts.update(parents.values())
    free = tree._free.numbers()
    everything = set(range(1, tree.capacity + 1))
    assert len(tree._free) == len(free)
    assert free | set(in_tree.values()) | parents.keys() == everything
    assert not free & (set(in_tree.values()) | parents.keys())
    reference_counts = tables.references.counts
    assert {slot: reference_counts[slot] for slot in everything if reference_counts[slot]} == {
        slot: count for slot, count in counts.items() if slot
    }
    for slot, parent in parents.items():
        assert tables.references.parents[slot] == parent
    assert tables._pinned.keys() == counts.keys() & set(in_tree.values())
    pins: Counter[Any] = Counter()
    nodes = [node for root in tree._roots.values() for node in root.descendants()]
    for slot, (adapter, sequence) in tables._pinned.items():
        assert in_tree[adapter, sequence.token_ids] == slot
        [node] = [node for node in nodes if node.slots[-1] == slot]
        while node.parent is not None:
            pins[node] += 1
            node = node.parent
    assert {node: node.pinned for node in nodes if node.pinned} == pins


TOKEN = st.integers(-1, 2)
ASK = st.tuples(st.just("ask"), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=6))
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=9)
PROGRAM = st.lists(
    st.one_of(
        ASK,
        ASK,
        st.tuples(
            st.just("extend"),
            st.integers(0, 3),
            st.integers(1, 3),
            st.lists(TOKEN, max_size=30),
        ),
        st.tuples(
            st.just("new"),
            st.lists(IDS, min_size=1, max_size=5),
            st.sampled_from([None, "red"]),
        ),
        st.tuples(
            st.just("resample"), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=8)
        ),
        st.tuples(st.just("copy"), st.integers(0, 3)),
        st.tuples(st.just("keep"), st.integers(0, 3)),
        st.tuples(st.just("drop"), st.integers(0, 3)),
        st.tuples(st.just("fail"), st.integers(0, 3)),
        st.tuples(st.just("together"), st.booleans()),
        st.tuples(st.just("together"), st.just(False)),
        st.tuples(st.just("list"), IDS),
        st.tuples(st.just("pin"), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
        st.tuples(st.sampled_from(["clear", "drop adapter"])),
    ),
    min_size=8,
    max_size=25,
)  # fmt: skip
SEEN: Counter[str] = Counter()


def run(engine: Engine, program: list[Any]) -> None:
    populations = [Members([(1, 2, 0)] * 4)]
    for name, *arguments in program:
        if name == "new":
            prompts, adapter = arguments
            populations = [*populations, Members([tuple(ids) for ids in prompts], adapter)][-4:]
        elif name == "list":
            ids = tuple(arguments[0])
            row = engine.answer(Query(0, ids))
            torch.testing.assert_close(row, expected(None, ids), rtol=0, atol=1e-6)
        elif name == "pin":
            if len(arguments[0]) * 4 < engine.path._tree.capacity:
                engine.cache_prefix(arguments[0], None)
                engine.clear_prefix_cache()
        elif name == "together":
            [engine.model.fail] = arguments
            results = ask_together(engine, [item for item in populations if item.ids])
            failed = [bool(result.errors) for result in results]
            assert not any(failed) or engine.model.fail
            SEEN["together"] += len(results) > 1 and not engine.model.fail
            engine.model.fail = False
            del results
        elif name == "clear":
            engine.clear_prefix_cache()
        elif name == "drop adapter":
            engine.path.drop("red")
        elif populations:
            which = arguments[0] % len(populations)
            population = populations[which]
            members = list(range(len(population.ids)))
            if name == "extend":
                k, tokens = arguments[1:]
                padded = (tokens + [0] * 1000)[: k * len(members)]
                if members:
                    population.extend([tuple(padded[i * k : i * k + k]) for i in members])
            elif name == "resample" and members:
                population.resample([i % len(members) for i in arguments[1]])
            elif name == "drop":
                del populations[which], population
            elif name == "keep":
                before = len(prefixes(engine.path._tree))
                engine.keep_sequences(population.generation)
                SEEN["kept"] += len(prefixes(engine.path._tree)) > before
            elif name == "copy":
                copied = Members.__new__(Members)
                copied.__dict__.update(population.__dict__)
                populations = [*populations, copied][-4:]
            elif name == "ask" and members:
                places = [i % len(members) for i in arguments[1]] or members
                assert not population.ask(engine, places).errors
                SEEN["asked"] += 1
            elif name == "fail" and members:
                engine.model.fail = True
                SEEN["failed"] += bool(population.ask(engine).errors)
                engine.model.fail = False
        check(engine)
    populations.clear()
    population = copied = None  # type: ignore[assignment]
    gc.collect()  # tracebacks of failures refer to populations
    check(engine)
    assert not engine.tables._entries
    assert not engine.tables._pinned
    check_tree(engine.path._tree)
    assert engine.model.largest[0] <= engine.path._max_tokens
    assert engine.model.largest[1] <= engine.path._max_rows
    SEEN["by tables"] += engine.model.table_tokens
    SEEN["tokens"] += int(engine.statistics()["tokens_computed"])


LONGER = ("extend", 0, 1, [0, 1, 2, 1])
EXAMPLE = [("ask", 0, []), LONGER, ("fail", 0), *[("ask", 0, []), LONGER] * 12]


KEPT = [
    *[("ask", 0, []), LONGER] * 3,
    *[("keep", 0), ("list", [1, 2, 0, 0, 0, 1]), ("ask", 0, []), LONGER] * 3,
    *[("copy", 0), ("extend", 1, 1, [2, 1]), ("ask", 1, []), ("keep", 0), ("ask", 0, [])],
]


CLEARED = [("ask", 0, []), LONGER, ("ask", 0, []), ("clear",), ("ask", 0, [])]


TOGETHER = [
    ("new", [[1, 2]], None),
    ("new", [[2, 0], [1]], None),
    *[("together", False), LONGER, ("extend", 1, 1, [0]), ("extend", 2, 2, [1, 2, 2, 0])] * 4,
    *[("together", True), ("together", False)] * 2,
]


@settings(max_examples=25, deadline=None)
@example(500, 20, EXAMPLE)
@example(14, 5, EXAMPLE)
@example(500, 20, KEPT)
@example(14, 5, KEPT)
@example(500, 20, CLEARED)
@example(500, 20, TOGETHER)
@example(14, 20, TOGETHER)
@given(st.sampled_from([0, 2, 6, 14, 40, 500]), st.sampled_from([2, 5, 20]), PROGRAM)
def test_members_have_the_rows_of_their_sequences_and_slots_are_counted_exactly(
    capacity: int, max_tokens: int, program: list[Any]
) -> None:
    run(Engine(capacity, max_tokens=max_tokens, max_rows=4), program)


def test_the_random_programs_used_tables_and_failed_at_times() -> None:
    assert SEEN["asked"] > 20
    assert SEEN["failed"] > 0
    assert SEEN["by tables"] > 20
    assert SEEN["together"] > 10
    assert SEEN["kept"] > 1


def test_tokens_that_were_added_to_the_tree_are_found_by_other_requests() -> None:
    engine = Engine(500)
    population = Members([(1, 2, 0), (1, 2, 0), (0, 1)])
    for tokens in ([(0,), (1,), (2,)], [(1,), (-1,), (0,)], [(0,), (2,), (-1,)]):
        assert not population.ask(engine).errors
        population.extend(tokens)
    computed = engine.statistics()["tokens_computed"]
    assert computed == (3 + 2) + 3 + 3
    engine.keep_sequences(population.generation)
    check(engine)
    for ids in population.ids:
        row = engine.answer(Query(0, ids))
        torch.testing.assert_close(row, expected(None, ids), rtol=0, atol=1e-6)
    assert engine.statistics()["tokens_computed"] == computed + 3
    check(engine)
    table_tokens = engine.model.table_tokens
    assert not population.ask(engine).errors
    assert engine.model.table_tokens == table_tokens + 3  # the population keeps its table
    check(engine)


def test_concatenations_compute_only_the_tokens_that_no_population_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "smallest_group", 2, raising=False)
    engine = Engine(500, max_tokens=100, max_rows=16)  # one pass
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:

        def grown(ids: list[int], tokens: list[int]) -> Population:
            population = llm.population(ids, len(tokens))
            for _ in range(4):
                population = population.extend(tokens)
                population.draw_sync()
            return population

        def cost(population: Population) -> int:
            before = int(engine.statistics()["tokens_computed"])
            rows = population.next_token_logprobs_sync()
            for row, member in zip(rows, population, strict=True):
                correct = expected(None, member.token_ids)
                torch.testing.assert_close(row, correct, rtol=0, atol=1e-6)
            return int(engine.statistics()["tokens_computed"]) - before

        first, second = grown([1, 2, 0], [0, 1, 2]), grown([0, 1], [2, 0])
        joined = Population.cat([first[:2], second, llm.population([2, 2], 1)])
        assert cost(joined.extend([1] * 5)) == 2 + 5
        assert cost(first) == 3  # the last tokens again, because rows are not stored
        shorter = first.truncate([5, 6, 7])
        assert cost(shorter.extend([0, 0, 0])) == 3
        joined = Population.cat([joined.extend([0] * 5), second])  # not computed before
        assert cost(Population.cat([joined, first]).extend([2] * 10)) == 5 * 2 + 5


PAIRS = torch.tensor([[0, 1], [2, 2], [1, 0]])


@pytest.mark.parametrize(
    ("request_again", "new_tokens"),
    [
        (lambda _, sampled: sampled.population.draw_sync(), 3),
        (lambda _, sampled: sampled.population.score_sync(PAIRS), 6),
        (lambda llm, sampled: llm.population([*sampled.population]).draw_sync(), 3),
        (lambda llm, sampled: llm.population(sampled.population.tokens).draw_sync(), 3),
        (lambda llm, sampled: llm.batch_next_token_logprobs_sync([*sampled.population]), 3),
    ],
)
def test_other_requests_for_the_members_of_a_population_compute_only_new_tokens(
    monkeypatch: pytest.MonkeyPatch, request_again: Any, new_tokens: int
) -> None:
    monkeypatch.setattr(Engine, "smallest_group", 2, raising=False)
    engine = Engine(500, max_tokens=100, max_rows=60)  # one pass
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:

        def cost(request: Any, *arguments: Any) -> int:
            before = int(engine.statistics()["tokens_computed"])
            request(*arguments)
            check(engine)
            return int(engine.statistics()["tokens_computed"]) - before

        start = llm.population([[1, 2, 0], [2, 1], [0, 0]])
        sampled = start.sample_sync(8, stop=(), seed=1)
        population = sampled.population
        assert cost(request_again, llm, sampled) == new_tokens
        rows = population.next_token_logprobs_sync()
        for row, member in zip(rows, population, strict=True):
            correct = expected(None, member.token_ids)
            torch.testing.assert_close(row, correct, rtol=0, atol=1e-6)
        # Extensions of an earlier population by the same tokens, and by scored ones.
        assert cost(start.extend(sampled.token_ids).draw_sync) == 3
        assert cost(start[[2, 0]].extend(sampled.token_ids[[2, 0]]).draw_sync) == 2
        population.score_sync(PAIRS)
        assert cost(population.extend(PAIRS).draw_sync) == 3


def test_several_new_tokens_are_searched_only_where_the_tree_may_contain_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(500, max_tokens=100, max_rows=60)
    engine.smallest_group = 1
    matched = []
    match = PrefixTree.match
    monkeypatch.setattr(
        PrefixTree, "match", lambda self, *args: matched.append(args) or match(self, *args)
    )
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:

        def cost(population: Population) -> tuple[int, int]:
            before = int(engine.statistics()["tokens_computed"])
            matched.clear()
            rows = population.next_token_logprobs_sync()
            searched = len(matched)
            for row, member in zip(rows, population, strict=True):
                correct = expected(None, member.token_ids)
                torch.testing.assert_close(row, correct, rtol=0, atol=1e-6)
            check(engine)
            return int(engine.statistics()["tokens_computed"]) - before, searched

        start = llm.population([1, 2, 0], 4)
        start.draw_sync()
        endings = [[1, 1, 1], [1, 2, 1], [2, 2, 1], [0, 0, 1]]
        assert cost(start.extend(endings)) == (11, 1)
        llm.batch_next_token_logprobs_sync([[1, 2, 0, 1, 1, 1, 2], [1, 2, 0, 0, 1]])
        later = start.extend([[2, 2, 0], [1, 2, 2], [1, 1, 0], [0, 2, 0]])
        tokens, searched = cost(later)  # 1, 11 and 0 are in the tree
        assert tokens == 12 - 4
        assert searched == 1 + 3 * 3  # not for the first member
        llm.batch_next_token_logprobs_sync([[*later[2].token_ids, 1, 1]])
        assert cost(later.extend([[1, 0], [1, 0], [1, 2], [1, 0]]))[0] == 7
        other = llm.population([2, 2, 0], 4).extend([[1] * 8] * 4)
        other.draw_sync()  # longer, with other first tokens
        assert cost(later.extend([[1, 1]] * 4))[0] == 7  # one member has both
        alone = llm.population([0, 2, 0], 4)
        alone.draw_sync()
        assert cost(alone.extend([[1, 1], [2, 1], [0, 1], [0, 0]])) == (7, 1)
        unequal = llm.population([[1, 0, 2], [1, 0, 2, 2], [0]])
        unequal.draw_sync()
        assert cost(unequal.extend([[1, 1]] * 3))[0] == 6
        sampled = unequal.sample_sync(8, stop=(), seed=1)
        assert cost(unequal[:2].extend(sampled.token_ids[:2]))[0] == 2


def test_tokens_of_shorter_members_are_not_searched_for_the_longer_ones_of_their_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(500, max_tokens=100, max_rows=60)
    population = Members([(1, 2, 0)] * 3)
    assert not population.ask(engine).errors
    population.extend([(0, 1, 2), (1, -1, -1), (2, -1, -1)])
    assert not population.ask(engine).errors
    population.extend([(-1, -1), (0, 1), (1, 1)])
    matched = []
    match = PrefixTree.match
    monkeypatch.setattr(
        PrefixTree, "match", lambda self, *args: matched.append(args) or match(self, *args)
    )
    assert not population.ask(engine).errors
    assert len(matched) == 1  # that of the common tokens
    check(engine)


def test_tokens_of_other_tables_are_also_added_to_the_tree() -> None:
    engine = Engine(500)
    population = Members([(1, 2, 0), (0, 1)])
    for tokens in ([(0,), (1,)], [(1,), (2,)]):
        assert not population.ask(engine).errors
        population.extend(tokens)
    assert not population.ask(engine).errors
    other = Members.__new__(Members)
    other.__dict__.update(population.__dict__)
    other.extend([(2,), (2,)])
    assert not other.ask(engine).errors
    cached = len(prefixes(engine.path._tree))
    computed = engine.statistics()["tokens_computed"]
    engine.keep_sequences(other.generation)
    check(engine)
    assert len(prefixes(engine.path._tree)) == cached + 6
    assert not population.ask(engine).errors
    assert not other.ask(engine).errors
    repeated = 2  # for the logits
    assert engine.statistics()["tokens_computed"] == computed + 2 * repeated
    del other
    assert not population.ask(engine).errors
    check(engine)


def test_tokens_that_were_added_to_the_tree_are_evicted_ends_first() -> None:
    engine = Engine(12)
    population = Members([(1, 2, 0), (1, 2, 0)])
    for tokens in ([(0,), (1,)], [(1,), (2,)]):
        assert not population.ask(engine).errors
        population.extend(tokens)
    assert not population.ask(engine).errors
    engine.keep_sequences(population.generation)
    del population
    check(engine)
    for ids in [(0,) * 5, (1, 2, 0, 0), (2,) * 7]:
        row = engine.answer(Query(0, ids))
        torch.testing.assert_close(row, expected(None, ids), rtol=0, atol=1e-6)
        check(engine)
        check_tree(engine.path._tree)
    assert engine.statistics()["tokens_evicted"] > 0


@pytest.mark.parametrize("shared", [0, 1, 6, 700, 998])
def test_the_common_slots_of_a_table_are_found_in_few_operations(shared: int) -> None:
    class Counted(np.ndarray[Any, Any]):
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(key)

    slots = np.arange(1000, dtype=np.int32)[None].repeat(3, 0)
    slots[1, shared:] += 1000
    table = BlockTable(np.array([7]), slots.view(Counted), np.full(3, 1000))
    selected = table.select(np.arange(3))
    assert selected.trunk.tolist() == [7, *range(shared)]
    assert np.array_equal(selected.slots, slots[:, shared:])
    assert selected.tokens.tolist() == [1001] * 3
    assert Counted.reads < 50


def test_rows_of_several_tables_have_the_common_slots_as_their_trunk() -> None:
    first = BlockTable(
        np.array([7, 8, 9]), np.array([[1, 0], [2, 3]], np.int32), np.array([1, 2])
    )
    second = BlockTable(
        np.array([7, 8, 4, 5]), np.array([[6], [6]], np.int32), np.array([1, 0])
    )
    joined = joined_rows([(first, np.array([1])), (second, np.arange(2))])
    assert joined.trunk.tolist() == [7, 8]
    rows = [row[:n].tolist() for row, n in zip(joined.slots, joined.lengths, strict=True)]
    assert rows == [[9, 2, 3], [4, 5, 6], [4, 5]]
    assert joined.last.tolist() == [3, 6, 5]
    empty = joined_rows([(first, np.arange(2)), (BlockTable.empty(1), np.array([0]))])
    assert len(empty.trunk) == 0
    assert empty.lengths.tolist() == [4, 5, 0]
    assert empty.last.tolist() == [1, 3, 0]


def test_tokens_of_a_population_are_computed_once() -> None:
    engine = Engine(500)
    population = Members([(1, 2, 0, 1)] * 7)
    assert not population.ask(engine).errors
    population.extend([(0,), (1,), (0,), (-1,), (2,), (2,), (1,)])
    assert not population.ask(engine).errors
    population.resample([0, 0, 3, 5])
    population.extend([(1, 2), (1, 3), (-1, -1), (0, -1)])
    assert not population.ask(engine).errors
    assert engine.statistics()["tokens_computed"] == 4 + (3 + 1) + (3 + 1 + 1)
    # Asked again, only the last tokens are computed.
    assert not population.ask(engine).errors
    assert engine.statistics()["tokens_computed"] == 13 + 4
    population.resample([0, 0])
    population.extend([(0, 1), (0, 2)])  # the first tokens of all rows are equal
    assert not population.ask(engine).errors
    assert engine.statistics()["tokens_computed"] == 17 + 3
    check(engine)


def grown(prompts: list[Ids], engine: Engine) -> list[Members]:
    """Populations of three members each, with a table and one new token."""
    populations = [Members([prompt] * 3) for prompt in prompts]
    for population in populations:
        assert not population.ask(engine).errors
        population.extend([(0,), (1,), (1,)])
    return populations


def test_populations_that_are_pending_together_are_computed_in_one_pass() -> None:
    engine = Engine(500, max_rows=100, max_tokens=100)
    first = [Members([(1, 2, 0, token)] * 3) for token in (1, 2, 1)]
    first += [Members([(1, 2)] * 2, "red")]

    def forwards() -> int:
        return int(engine.statistics()["forwards"])

    ask_together(engine, first)
    assert forwards() == 2  # one for each adapter
    assert len(engine.tables._entries) == 4
    for step in range(3):
        for population in first:
            population.extend([(step,)] * len(population.ids))
        before = forwards()
        ask_together(engine, first)
        assert forwards() == before + 2
    check(engine)


def test_equal_tokens_after_a_common_prompt_are_computed_once_for_several_populations() -> None:
    engine = Engine(500, max_rows=100, max_tokens=100)
    first, second, third = [Members([ids] * 3) for ids in [(1, 2, 0), (1, 2, 0), (1, 2)]]

    def cost() -> int:
        before = engine.model.table_tokens
        ask_together(engine, [third, second, first])
        check(engine)
        return engine.model.table_tokens - before

    cost()
    first.extend([(0,), (1,), (1,)])
    second.extend([(1,), (-1,), (2,)])
    third.extend([(0,), (1,), (1,)])
    assert cost() == 3 + 1 + 2  # 0 to 2 after the prompt of two, and its last token again
    first.extend([(0, 0), (1, -1), (-1, 2)])
    third.extend([(2, 2, 2), (-1, -1, 1), (-1, -1, 0)])
    assert cost() == 4 + 3 + 5


@pytest.mark.parametrize(
    "limits",
    [{"max_rows": 4}, {"max_rows": 5}, *({"max_rows": 100, "max_tokens": n} for n in (4, 5))],
)
def test_a_pass_of_several_populations_has_its_limits(limits: dict[str, int]) -> None:
    engine = Engine(500, **limits)
    populations = grown([(1, 2), (2, 1), (0, 0), (3,)], engine)
    before = int(engine.statistics()["forwards"])
    ask_together(engine, populations)  # two distinct rows each, so two populations in a pass
    assert engine.statistics()["forwards"] == before + 2
    ask_together(engine, populations)  # the last tokens again
    assert engine.statistics()["forwards"] == before + 4
    assert max(engine.model.largest) <= min(limits.values())


def test_populations_with_and_without_a_table_are_computed_one_after_the_other() -> None:
    engine = Engine(500)
    [population] = grown([(1, 2)], engine)
    ask_together(engine, [Members([(2, 1)] * 3), population])
    assert engine.model.table_tokens == 2
    check(engine)


def test_requests_for_different_members_of_a_generation_share_its_table() -> None:
    engine = Engine(500)
    population = Members([(1, 2)] * 3)
    population.ask(engine)
    population.extend([(0, 1), (1, 0), (2, 2)])
    before = int(engine.statistics()["tokens_computed"])
    results = engine.answer_all([population.query([0, 1], 0), population.query([2], 1)])
    population.check(results[0], [0, 1])
    population.check(results[1], [2])
    population.ask(engine)  # repeats the last token of each member: all others have slots
    assert engine.statistics()["tokens_computed"] == before + 4 + 2 + 3
    check(engine)


def test_populations_that_fail_together_are_computed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(500, max_rows=100)
    populations = grown([(1, 2), (2, 1), (0, 0)], engine)
    compute = engine.path.forward

    def only_alone(batch: TokenBatch) -> ForwardResult:
        result = compute(batch)
        if len(batch.results) > 2:
            raise RuntimeError("no memory")
        return result

    monkeypatch.setattr(engine.path, "forward", only_alone)
    assert not any(result.errors for result in ask_together(engine, populations))
    check(engine)

    class Raises(Rows):
        def compute(self, *_: Any) -> tuple[torch.Tensor, ...]:
            raise ValueError("mine")

    monkeypatch.undo()
    for population in populations:
        population.extend([(2,)] * 3)
    queries = [
        population.query([0, 1, 2], number) for number, population in enumerate(populations)
    ]
    queries[1] = dataclasses.replace(queries[1], reduction=Raises())
    results = engine.answer_all(queries)
    assert [sorted(results[number].errors) for number in range(3)] == [[], [0, 1], []]
    assert "ValueError: mine" in str(results[1].errors[0])
    check(engine)


def test_members_that_were_not_asked_for_catch_up_without_their_beginnings() -> None:
    engine = Engine(500)
    population = Members([(1, 2, 0, 1)] * 3)
    assert not population.ask(engine).errors
    for step in range(3):
        population.extend([(0,), (1,), (step + 2,)])
        assert not population.ask(engine, [0, 1]).errors
    before = engine.statistics()["tokens_computed"]
    assert not population.ask(engine, [2]).errors
    assert engine.statistics()["tokens_computed"] == before + 3


def test_first_sequences_that_are_as_long_as_a_pass_are_computed() -> None:
    engine = Engine(500, max_tokens=4)
    assert not Members([(0, 1, 2, 0), (1, 1, 2, 0), (2, 1, 2, 0)]).ask(engine).errors
    assert engine.model.largest[0] == 4
    check(engine)


def test_members_with_several_new_tokens_share_a_pass_up_to_its_limit() -> None:
    engine = Engine(500, max_tokens=10)
    population = Members([(1, 2, 0)] * 6)
    population.ask(engine)
    population.extend([(token,) for token in range(6)])
    population.ask(engine, [0, 1, 2, 3, 4])
    population.extend([(token,) for token in range(6)])
    before = engine.statistics()["forwards"]
    population.ask(engine)  # five members lack a token, the last one two
    assert engine.statistics()["forwards"] == before + 1
    population.extend([(0, 1, 2)] * 6)
    before = engine.statistics()["forwards"]
    population.ask(engine)
    assert engine.statistics()["forwards"] == before + 2
    assert engine.model.largest[0] <= 10


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_slots_of_a_dropped_population_are_freed_at_the_next_step(in_a_thread: bool) -> None:
    engine = Engine(500)
    populations = [Members([(1, 2, 0)] * 4), Members([(1, 2, 0)] * 4)]
    for population in populations:
        population.ask(engine)
        population.extend([(0,), (1,), (2,), (3,)])
        population.ask(engine)
    assert engine.statistics()["kv_tokens"] == 3 + 4 + 4
    if in_a_thread:
        thread = threading.Thread(target=populations.clear)
        thread.start()
        thread.join()
    else:
        populations.clear()
    del population
    engine.answer(Query(0, (1, 2)))
    assert engine.statistics()["kv_tokens"] == 3
    check(engine)


def test_tables_of_populations_that_were_extended_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("genlm.prefix.tables._MAX_EXTENDED_BYTES", 0)
    engine = Engine(500)
    population = Members([(1, 2, 0)] * 4)
    earlier = []
    for step in range(12):
        population.ask(engine)
        earlier.append(copy.copy(population))
        population.extend([(0,), (1,), (2,), (step % 3,)])
    assert len(engine.tables._entries) <= 5
    assert engine.statistics()["tokens_computed"] == 3 + 3 + 4 * 10
    check(engine)
    for population in earlier:
        population.ask(engine)
        check(engine)


def test_tables_in_use_and_of_newest_generations_are_not_removed_to_limit_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(500)
    earlier, newest = [], []
    for number in range(6):
        population = Members([(1, 2, number % 3, number // 3)] * 2)
        population.ask(engine)
        earlier.append(copy.copy(population))
        population.extend([(0,), (1,)])
        population.ask(engine)
        newest.append(population)
    monkeypatch.setattr("genlm.prefix.tables._MAX_EXTENDED_BYTES", 0)
    assert not any(result.errors for result in ask_together(engine, earlier))
    check(engine)
    assert all(engine.tables.find(population.query([0])) for population in newest)


def test_a_prompt_is_not_evicted_while_a_population_begins_with_it() -> None:
    engine = Engine(12)
    population = Members([(1, 2, 0)] * 2)
    population.ask(engine)
    population.extend([(0,), (1,)])
    population.ask(engine)
    for token in range(6):
        engine.answer(Query(0, (token, token, 0, 1)))
    before = engine.statistics()["tokens_computed"]
    population.ask(engine)
    assert engine.statistics()["tokens_computed"] == before + 2


def test_populations_are_evicted_for_single_requests_the_oldest_first() -> None:
    engine = Engine(12)
    old, recent = Members([(1, 2)] * 4), Members([(1, 2)] * 4)
    for population in (old, recent):
        population.ask(engine)
        population.extend([(0,), (1,), (2,), (3,)])
        population.ask(engine)
    engine.answer(Query(0, (3, 3, 3, 3)))
    assert engine.statistics()["contexts_without_cache"] == 0
    before = engine.statistics()["tokens_computed"]
    recent.ask(engine)
    assert engine.statistics()["tokens_computed"] == before + 4
    old.ask(engine)  # through the tree, which has the prompt
    check(engine)


def test_slots_of_a_population_that_is_dropped_during_a_step_are_used() -> None:
    engine = Engine(24)
    population = Members([(1, 2, 0), (1, 2, 1)])
    population.ask(engine)
    del population
    gc.collect()
    slots = engine.path._tree.allocate(24)  # the table is not yet removed
    engine.path._tree.free(slots)
    check(engine)


def test_tables_of_pending_populations_are_removed_last() -> None:
    engine = Engine(500)
    populations = [Members([prompt] * 2) for prompt in ((1, 2), (2, 0), (0, 1))]
    queries = []
    for population in populations:
        population.ask(engine)
        queries.append(population.query([0]))
    tables = engine.tables
    tables.expect(queries[:1])
    for kept in ([True, False, True], [True, False, False], [False] * 3):
        assert tables.evict(1)
        assert [tables.find(query) is not None for query in queries] == kept
        check(engine)
    assert not tables.evict(1)


def test_an_adapter_that_is_removed_takes_its_tables_with_it() -> None:
    engine = Engine(100)
    base, red = Members([(1, 2)] * 2), Members([(1, 2)] * 2, "red")
    for population in (base, red):
        population.ask(engine)
        population.extend([(0,), (1,)])
        population.ask(engine)
    engine.path.drop("red")
    assert engine.statistics()["kv_tokens"] == 4
    check(engine)
    before = engine.statistics()["tokens_computed"]
    base.ask(engine)
    assert engine.statistics()["tokens_computed"] == before + 2


def test_a_generation_may_be_requested_with_several_adapters() -> None:
    engine = Engine(500)
    population = Members([(1, 2, 0), (2, 1)])
    for adapter in (None, "red", None):
        population.adapter = adapter
        assert not population.ask(engine).errors
        check(engine)


def test_tokens_that_the_model_cannot_embed_are_refused() -> None:
    engine = Engine(100, embedded=SIZE - 1)
    population = Members([(1, 2), (2, 3)])
    population.ask(engine)
    population.extend([(1,), (SIZE - 1,)])
    with pytest.raises(TokenIdError):
        engine.submit_group(population.query([0, 1]))
    with pytest.raises(TokenIdError):
        engine.submit_group(Members([(1, 2), (SIZE - 1, 1)]).query([0, 1]))
    assert not population.ask(engine, [0]).errors
    with pytest.raises(TokenIdError):  # this member was not wanted before
        engine.submit_group(population.query([1]))
    copies = Members([(1, 2)] * 3)
    copies.extend([(1,), (SIZE - 1,), (2,)])
    with pytest.raises(TokenIdError, match=str(SIZE - 1)):
        engine.submit_group(copies.query([0, 1, 2]))
    assert not copies.ask(engine, [0, 2]).errors


def test_an_engine_without_a_cache_computes_populations_that_are_pending_together() -> None:
    engine: Any = Uncached(execution_path="alone")
    populations = [Members([(1, 2), (2, 1)]), Members([(3,)] * 2)]
    for number, population in enumerate(populations):
        engine.submit_group(population.query([0, 1], number))
    completions = engine.step()
    assert sorted(completion.query_id for completion in completions) == [0, 1]
    for completion in completions:
        assert not populations[completion.query_id].check(completion.result, [0, 1]).errors
    assert not engine.defers([population.query([0]) for population in populations])
    engine.keep_sequences(populations[0].generation)


def test_tokens_of_each_sequence_of_a_population_are_counted() -> None:
    engine, evaluated = Engine(500), 0
    population = Members([(1, 2, 0)] * 3)
    for tokens in ([(0,), (1,), (1,)], [(1, 2), (-1, -1), (2, -1)], [(0,)] * 3):
        assert not population.ask(engine).errors
        evaluated += sum(map(len, set(population.ids)))
        assert engine.statistics()["tokens_evaluated"] == evaluated
        population.extend(tokens)


def test_lists_that_fit_one_after_the_other_leave_populations_alone() -> None:
    engine = Engine(12)
    population = Members([(1, 2)] * 4)
    population.ask(engine)
    population.extend([(0,), (1,), (2,), (3,)])
    population.ask(engine)
    engine.path.rows(None, packed([(3, 3, 3, 3), (4, 4, 4, 4)]))
    before = engine.statistics()["tokens_computed"]
    population.ask(engine)
    assert engine.statistics()["tokens_computed"] == before + 4


def test_a_population_that_exceeds_the_cache_loses_the_last_tokens_of_some_rows_only() -> None:
    engine = Engine(48, max_rows=20)
    population = Members([(1, 2, 0)] * 8)
    population.ask(engine)
    population.extend([(i % SIZE,) for i in range(8)])
    steps = 10
    for step in range(steps):
        assert not population.ask(engine).errors
        check(engine)
        population.extend([((i + step) % 3,) for i in range(8)])
    statistics = engine.statistics()
    assert statistics["contexts_without_cache"] == 0
    lengths = sum(3 + step for step in range(1, steps + 1))
    least = 3 + 8 * steps  # with a cache of 83 tokens
    computed = statistics["tokens_computed"]
    assert least < computed < least + 8 * lengths // 3
    assert computed == statistics["tokens_evicted"] + statistics["kv_tokens"]


def test_rows_that_lack_many_tokens_are_continued_from_what_is_left_of_them() -> None:
    engine = Engine(120, max_tokens=20, max_rows=20)
    population = Members([(1, 2, 0)] * 2)
    population.ask(engine)
    for step in range(60):
        population.extend([(step % 3,), ((step + 1) % 3 if step % 4 else -1,)])
        population.ask(engine)
    assert engine.tables.evict(200)
    check(engine)
    before = int(engine.statistics()["tokens_computed"])
    assert not population.ask(engine).errors
    assert int(engine.statistics()["tokens_computed"]) - before == 60 + 45
    assert engine.model.largest[0] <= 20
    check(engine)


def test_common_tokens_of_all_rows_are_evicted_with_the_last_row() -> None:
    engine = Engine(60, max_rows=20)
    population = Members([(1, 2, 0)] * 4)
    for step in range(6):
        population.ask(engine)
        population.extend([(0 if step < 4 else i,) for i in range(4)])
    population.ask(engine)
    assert engine.statistics()["kv_tokens"] == 3 + 4 + 2 * 4
    assert engine.tables.evict(6)
    check(engine)
    assert engine.statistics()["kv_tokens"] == 3 + 4 + 2
    assert engine.tables.evict(60)
    check(engine)
    assert engine.statistics()["kv_tokens"] == 3
    assert not population.ask(engine).errors
    check(engine)


def take_turns(engine: Engine, populations: list[Members], steps: int) -> list[int]:
    """Extend every population `steps` times; callers act between two steps of the engine.

    Returns:
        The number of the population of each step, in the order of their completion.
    """
    order: list[int] = []
    left = [steps] * len(populations)
    for number, population in enumerate(populations):
        engine.submit_group(population.query(list(range(len(population.ids))), number))
    while any(left):
        for completion in engine.step():
            number = completion.query_id
            population = populations[number]
            members = list(range(len(population.ids)))
            assert isinstance(completion.result, GroupResult)
            assert not population.check(completion.result, members).errors
            order.append(number)
            left[number] -= 1
            population.extend([((i + left[number]) % SIZE,) for i in members])
            if left[number]:
                engine.submit_group(population.query(members, number))
        check(engine)
    return order


def test_populations_that_exceed_the_cache_together_are_computed_in_turn() -> None:
    engine = Engine(70, max_rows=40)
    populations = [Members([(i, 2)] * 4) for i in range(4)]
    order = take_turns(engine, populations, 12)
    least = 4 * (2 + 4 * 11)
    assert engine.statistics()["tokens_computed"] < 2 * least
    assert engine.statistics()["tokens_evicted"] > 0
    assert sorted(order) == sorted([0, 1, 2, 3] * 12)
    assert engine.statistics()["forwards"] < 48


def test_a_young_population_is_not_passed_over_for_ever() -> None:
    engine = Engine(26, max_rows=40)
    old = Members([(0, 2)] * 4)
    take_turns(engine, [old], 5)
    young = Members([(1, 2)] * 4)
    young.ask(engine)
    young.extend([(i,) for i in range(4)])
    members = list(range(4))
    engine.submit_group(young.query(members, 1))
    query = old.query(members, 0)
    completed: list[int] = []
    while 1 not in completed:
        engine.submit_group(query)
        completed += [completion.query_id for completion in engine.step()]
    assert 60 < completed.index(1) < 70


@pytest.mark.parametrize(("capacity", "defers"), [(100, False), (26, True)])
def test_groups_are_deferred_if_none_of_them_fits(capacity: int, defers: bool) -> None:
    engine = Engine(capacity, max_rows=4)
    old, young = Members([(0, 2)] * 4), Members([(1, 2)] * 4)
    take_turns(engine, [old], 5)
    take_turns(engine, [young], 2)
    for number, population in enumerate((old, young)):
        engine.submit_group(population.query([0, 1, 2, 3], number))
    assert not engine.is_deferring
    [completion] = engine.step()
    assert completion.query_id == 0
    assert engine.is_deferring == defers
    engine.submit(Query(2, (0, 2)))
    assert [completion.query_id for completion in engine.step()] == [2]
    [completion] = engine.step()
    assert completion.query_id == 1
    assert not engine.is_deferring


@pytest.mark.parametrize(("capacity", "defers"), [(31, True), (32, False)])
def test_groups_are_not_deferred_if_one_of_them_fits(capacity: int, defers: bool) -> None:
    engine = Engine(capacity, max_rows=4)
    populations = [Members([(i, 2)] * count) for i, count in enumerate((4, 4, 1))]
    for population, steps in zip(populations, (5, 2, 2), strict=True):
        take_turns(engine, [population], steps)
    assert engine.statistics()["kv_tokens"] == (2 + 4 * 4) + (2 + 4) + (2 + 1)
    for number, population in enumerate(populations):
        engine.submit_group(population.query([*range(len(population.ids))], number))
    [completion] = engine.step()  # needs four more slots
    assert completion.query_id == 0
    assert engine.is_deferring == defers


@given(data=st.data())
@settings(deadline=None)
def test_scores_equal_those_of_texts_in_a_small_cache(data: st.DataObject) -> None:
    draw = data.draw
    engine = Engine(
        draw(st.integers(8, 200)),
        max_tokens=draw(st.sampled_from([4, 20, 400])),
        max_rows=draw(st.sampled_from([1, 3, 400])),
    )
    engine.smallest_group = draw(st.sampled_from([1, 4]))
    tokens = st.integers(0, SIZE - 1)
    prompt = st.lists(tokens, min_size=1, max_size=4)
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:
        engine.model.by_stages = draw(st.booleans())
        population = llm.population(draw(st.lists(prompt, min_size=1, max_size=6)))
        for _ in range(draw(st.integers(1, 4))):
            count, width = len(population), draw(st.integers(1, 6))
            ids = np.full((count, width), -1)
            for row in range(count):
                added = draw(st.lists(tokens, max_size=width))
                ids[row, : len(added)] = added
            scores = population.score_sync(ids)
            check(engine)
            for member, row, logprobs in zip(population, ids, scores, strict=True):
                known = list(member.token_ids)
                for token, logprob in zip(row, logprobs, strict=True):
                    correct = 0 if token < 0 else expected(None, known)[token]
                    torch.testing.assert_close(
                        logprob, torch.as_tensor(correct).float(), rtol=0, atol=1e-6
                    )
                    known.append(int(token))
            if draw(st.booleans()):
                population = population.extend(ids)
            members = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8))
            population = population[members]
            if draw(st.booleans()):
                population = population.extend([[1] * draw(st.integers(1, 3))] * len(members))
                for member, row in zip(
                    population, population.next_token_logprobs_sync(), strict=True
                ):
                    correct = expected(None, member.token_ids)
                    torch.testing.assert_close(row, correct, rtol=0, atol=1e-6)
        assert not engine._has_logged  # no pass failed


def test_scores_of_tokens_that_the_tree_contains() -> None:
    engine = Engine(500)
    engine.answer(Query(1, (1, 2, 0, 0, 1, 2)))
    population = Members([(1, 2, 0)])
    scored = scored_rows(population.generation, population.places, np.array([[0, 1, 2]]))
    query = GroupQuery(
        *(2, scored.generation, scored.wanted, scored.row_of, Rows()), dropped=scored.dropped
    )
    engine.path.populations.adopt(query, np.arange(3))
    assert len(engine.tables.find(query).trunk) == 4
    [rows] = engine.answer(query).columns
    correct = [expected(None, ids) for ids in [(1, 2, 0), (1, 2, 0, 0), (1, 2, 0, 0, 1)]]
    torch.testing.assert_close(rows, torch.stack(correct), rtol=0, atol=1e-6)
    assert not engine._has_logged
    check(engine)


def test_scores_are_computed_in_one_pass_with_the_tokens_that_sequences_lack() -> None:
    engine = Engine(500, max_tokens=100, max_rows=100)
    engine.smallest_group = 1
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:

        def cost(request: Any, *arguments: Any) -> tuple[int, int]:
            before = engine.statistics()
            request(*arguments)
            check(engine)
            after = engine.statistics()
            names = "tokens_computed", "forwards"
            tokens, forwards = (int(after[name]) - int(before[name]) for name in names)
            return tokens, forwards

        start = llm.population([1, 2, 0], 4)
        start.draw_sync()
        ids = np.array([[0, 1, 2], [0, 1, 0], [2, 2, -1], [-1, -1, -1]])
        assert cost(start.score_sync, ids) == (4, 1)  # 0, 01, 2, and the prompt's last
        scored = start.extend(ids)
        assert cost(scored.next_token_logprobs_sync) == (4, 1)
        assert cost(scored.extend([0, 0, 0, 1]).score_sync, ids) == (3 + 5, 1)
        same = llm.population([1, 2, 0], 4).extend(ids)
        drawn = [population.draw_sync(seed=3).token_ids for population in (scored, same)]
        assert torch.equal(*drawn)

        async def change_while_scored() -> torch.Tensor:
            scoring = asyncio.create_task(start.score(ids))
            await asyncio.sleep(0)
            ids[0] = 1
            return await scoring

        assert torch.equal(start.score_sync(ids), asyncio.run(change_while_scored()))
        changed = start.extend(ids)
        assert changed[0].token_ids == (1, 2, 0, 1, 1, 1)
        assert scored[0].token_ids == (1, 2, 0, 0, 1, 2)


def test_scores_of_many_tokens_are_as_few_passes_as_these_tokens() -> None:
    engine = Engine(500, max_tokens=20, max_rows=20)
    engine.smallest_group = 1
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:
        population = llm.population([[1], [2], [0]]).extend([[0] * 30] * 3)
        population.draw_sync()
        before = int(engine.statistics()["forwards"])
        population.score_sync([[i % 2, i // 2, 1, 0, 1, 2] for i in range(3)])
        assert int(engine.statistics()["forwards"]) == before + 1  # 15 tokens and 3 again
        population = population.extend([[0] * 30] * 3)
        scores = population.score_sync([[2, 1], [0], [1, 0]])
        assert engine.path._tree.match(None, population[0].sequence)[1] == 31
        for member, ids, logprobs in zip(
            population, [[2, 1], [0], [1, 0]], scores, strict=True
        ):
            for place, token in enumerate(ids):
                correct = expected(None, [*member.token_ids, *ids[:place]])[token]
                torch.testing.assert_close(logprobs[place], correct, rtol=0, atol=1e-6)
        check(engine)


def test_scores_of_full_members_and_failed_passes_name_the_members() -> None:
    engine = Engine(500, max_tokens=100, max_rows=100)
    engine.smallest_group, engine.max_context = 1, 4
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:
        population = llm.population([1, 2, 0], 3).extend([[1, 2], [0], []])
        ids = [[], [1], [2, 0]]
        assert population.score_sync(ids)[0].tolist() == [0, 0]  # one token too many for a row
        with pytest.raises(PopulationError, match="at most 5 tokens can be scored") as raised:
            population.score_sync([[], [1, 0], [2, 0, 1]])
        assert raised.value.members == (1, 2)
        engine.model.fail = True
        with pytest.raises(PopulationError) as raised:
            population.score_sync([[], [0], [2, 1]])
        assert raised.value.members == (1, 2)
        engine.model.fail = False
        population.score_sync([[], [0], [2, 1]])
        check(engine)


def test_tokens_of_a_row_with_gaps_are_separate_segments() -> None:
    batch = TokenBatch(
        adapter=None,
        tokens=np.array([1, 3, 4, 9]),
        positions=np.array([1, 3, 4, 5]),
        writes=np.array([0, 0, 5, 6]),
        trunk=np.array([1]),
        slots=np.array([[2, 3, 4, 5, 0], [2, 3, 4, 5, 6]], np.int32),
        rows=np.array([0, 0, 0, 1]),
        results=np.array([2, 0, 1]),
    )
    stages = [(stage.firsts.tolist(), stage.counts.tolist()) for stage in batch.stages()]
    assert stages == [([0, 1], [1, 2]), ([3], [1])]  # the last token follows that of slot 5
    assert batch.path(1, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.path(0, 1).tolist() == [1]
    longer = dataclasses.replace(batch, trunk=np.array([7, 8, 1]))
    assert [longer.path(0, end).tolist() for end in (1, 4)] == [[7], [7, 8, 1, 2]]
    assert batch.result_slots.tolist() == [5, 2, 4]


def test_scores_are_computed_again_after_a_pass_whose_logits_were_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(500, max_tokens=100, max_rows=100)
    engine.smallest_group = 1
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as llm:
        for prompt in ([1], [1, 2, 0]):
            population = llm.population(prompt, 2)
            population.draw_sync()
            run = engine.path._run
            losses = iter([1, 0, 0, 0, 0, 0])

            def lossy(*arguments: Any, run: Any = run, losses: Any = losses) -> torch.Tensor:
                logits = run(*arguments)
                return logits[next(losses) :]

            monkeypatch.setattr(engine.path, "_run", lossy)
            ids = np.array([[0, 1, 2, 1], [0, 2, 2, 0]])
            scores = population.score_sync(ids)
            monkeypatch.undo()
            check(engine)
            for row, logprobs in zip(ids.tolist(), scores, strict=True):
                for place, logprob in enumerate(logprobs):
                    correct = expected(None, [*prompt, *row[:place]])[row[place]]
                    torch.testing.assert_close(logprob, correct, rtol=0, atol=1e-6)
