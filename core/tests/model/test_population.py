"""Populations against float64 oracles and against requests one by one."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from allocations import Allocations

import genlm
from genlm.core.base.errors import TokenTypeError
from genlm.core.engine.group_engine import GroupEngine
from genlm.core.queries.generations import Generation, Lineage
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.row_masks import RowMasks
from genlm.core.rows.sampling import uniforms

SIZE = 7
POISON = 6
MASKS = np.array([[1, 1, 0, 1, 0, 1, 0], [0, 1, 1, 0, 1, 0, 0], [0] * 7], bool)


def logits(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng((3, *token_ids)).normal(scale=2, size=SIZE))


def row(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.log_softmax(logits(token_ids), 0)


class TinyEngine(genlm.BatchEngine):
    """Fixed random rows; sequences that contain `POISON` raise while `is_strict`."""

    is_strict = False
    nan_after: int | None = None
    part = 1000

    def __init__(self, max_context: int | None = None) -> None:
        tokens = [genlm.Token(i, bytes([97 + i])) for i in range(SIZE)]
        self.vocabulary = genlm.Vocabulary(None, tokens, [str(token) for token in tokens])
        self.max_context = max_context
        self.evaluated: list[list[tuple[int, ...]]] = []

    def group_limit(self, group: Any) -> int:
        return self.part

    def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
        self.evaluated.append([query.token_ids for query in queries])
        if self.is_strict and any(POISON in query.token_ids for query in queries):
            raise ArithmeticError("poison")
        rows = torch.stack([row(query.token_ids) for query in queries]).float()
        for place, query in enumerate(queries):
            if query.token_ids[-1] == self.nan_after:
                rows[place] = float("nan")
        return rows


class ServingEngine:
    """An engine with a loop of its own, which answers single sequences in any order."""

    def __init__(self) -> None:
        self.inner = TinyEngine()
        self.vocabulary, self.max_context = self.inner.vocabulary, None
        self.capabilities: frozenset[genlm.Capability] = frozenset()
        self.aborted: list[int] = []
        self.released: list[tuple[str | None, bytes]] = []

    def submit(self, query: genlm.Query) -> None:
        if POISON in query.token_ids and self.inner.is_strict:
            raise ArithmeticError("refused")
        self.inner.submit(query)

    def step(self) -> list[genlm.Completion]:
        return self.inner.step()[::-1]

    def abort(self, query_id: int) -> None:
        self.aborted.append(query_id)
        self.inner.abort(query_id)

    def release_context(self, adapter: str | None, key: bytes) -> None:
        self.released.append((adapter, key))

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(params=[TinyEngine, ServingEngine])
def llm(request: pytest.FixtureRequest) -> Iterator[genlm.AsyncLM]:
    with genlm.AsyncLM(request.param, output_cache=genlm.OutputCache(0)) as model:
        yield model


@pytest.fixture
def tiny() -> Iterator[genlm.AsyncLM]:
    with genlm.AsyncLM(TinyEngine, output_cache=genlm.OutputCache(0)) as model:
        yield model


def strict(llm: genlm.AsyncLM) -> TinyEngine:
    engine: Any = llm.engine
    inner: TinyEngine = getattr(engine, "inner", engine)
    inner.is_strict = True
    return inner


def members(population: genlm.Population) -> list[tuple[int, ...]]:
    return [context.token_ids for context in population]


def expected_rows(population: genlm.Population) -> torch.Tensor:
    return torch.stack([row(member) for member in members(population)])


# -- sequences ------------------------------------------------------------------------


def test_equal_extensions_are_one_sequence_and_others_are_apart() -> None:
    first = Lineage.of_sequences([TokenSequence.of([1]), TokenSequence.of([2])])
    lineage, places = first.extended(np.array([0, 1, 0, 0, 1]), np.array([5, 5, 5, 6, -1]))
    assert len(lineage) == 4
    assert places[0] == places[2]
    sequences = [lineage.sequence(place).token_ids for place in places.tolist()]
    assert sequences == [(1, 5), (2, 5), (1, 5), (1, 6), (2,)]
    assert lineage.lengths[places].tolist() == [2, 2, 2, 2, 1]
    suffixes = lineage.suffixes(places)
    assert suffixes.places.tolist() == [0, 1, 0, 0, 1]
    assert suffixes.token_ids.tolist() == [[5], [5], [5], [6], [-1]]


def test_a_generation_refers_to_the_state_of_an_earlier_one_until_it_has_its_own() -> None:
    lineage = Lineage.of_sequences([TokenSequence.of([1])])
    first, state = Generation(lineage), object()
    assert first.root.state is None
    first.keep(state)
    third = Generation(lineage, Generation(lineage, first))
    assert third.root is first
    third.keep(object())
    assert third.root is third
    assert third.base is None


def test_thousands_of_extensions_are_dropped_without_recursion() -> None:
    lineage, places = Lineage.of_sequences([TokenSequence.of([1])]), np.zeros(2, np.int64)
    generation = Generation(lineage)
    for _ in range(10_000):
        lineage, places = lineage.extended(places, np.array([1, 2]))
        generation = Generation(lineage, generation)
    assert len(lineage.sequence(int(places[1]))) == 10_001
    del lineage, generation


def test_members_are_extended_copied_and_joined_as_numpy_does(tiny: genlm.AsyncLM) -> None:
    population = tiny.population([1, 2], 3).extend([[3, 4], [-1, 5], [-1, -1]])
    assert members(population) == [(1, 2, 3, 4), (1, 2, 5), (1, 2)]
    assert population.lengths.tolist() == [4, 3, 2]
    assert population.tokens.tolist() == [[1, 2, 3, 4], [1, 2, 5, -1], [1, 2, -1, -1]]
    assert members(population[[2, 0, 0]]) == [(1, 2), (1, 2, 3, 4), (1, 2, 3, 4)]
    assert members(population[1:]) == [(1, 2, 5), (1, 2)]
    assert members(population[np.array([True, False, True])]) == [(1, 2, 3, 4), (1, 2)]
    assert members(population[torch.tensor([1])]) == [(1, 2, 5)]
    assert population[-1].token_ids == (1, 2)
    joined = genlm.Population.cat([population[:1], population.extend([6, 6, 6])[1:]])
    assert members(joined) == [(1, 2, 3, 4), (1, 2, 5, 6), (1, 2, 6)]
    parts = (population[index : index + 1] for index in (2, 0))
    assert members(genlm.Population.cat(parts)) == [(1, 2), (1, 2, 3, 4)]
    mixed = tiny.population([[1], tiny.context([2, 3])])
    assert members(mixed) == [(1,), (2, 3)]
    for index in (3, [0, 3], [0.5], [[0]], (0, 1), (slice(2), 0), ()):
        with pytest.raises(IndexError):
            population[index]


def test_members_are_truncated(tiny: genlm.AsyncLM) -> None:
    population = tiny.population([1, 2], 3).extend([[3, 4], [-1, 5], [-1, -1]])
    population = population.finish([True, True, True])
    shorter = population.truncate(3)
    assert members(shorter) == [(1, 2, 3), (1, 2, 5), (1, 2)]
    assert shorter.finished.tolist() == [False, True, True]
    assert members(shorter.truncate([1, 9, 1])) == [(1,), (1, 2, 5), (1,)]
    assert members(shorter.truncate(torch.tensor([2, 2, 2]))) == [(1, 2)] * 3
    assert population.truncate(4) is population
    assert population.truncate(10**30) is population
    assert members(population[:0].truncate([])) == []
    with pytest.raises(ValueError, match="lengths=0; it must be 1 or more"):
        population.truncate(0)
    with pytest.raises(ValueError, match=r"lengths has shape \(2,\)"):
        population.truncate([1, 2])
    with pytest.raises(TypeError):
        population.truncate([1.5, 2, 3])


def test_lists_of_different_lengths_are_continuations(tiny: genlm.AsyncLM) -> None:
    population = tiny.population([1], 3)
    lists = [[2, 3], [], torch.tensor([4])]
    padded = np.array([[2, 3], [-1, -1], [4, -1]])
    assert members(population.extend(lists)) == [(1, 2, 3), (1,), (1, 4)]
    scores = population.score_sync(lists)
    assert torch.equal(scores, population.score_sync(padded))
    for ids, score in zip(lists, scores, strict=True):
        alone = tiny.score_sync([1, *map(int, ids)], start=1)
        torch.testing.assert_close(score[: len(ids)], alone)
    assert torch.equal(
        population.token_logprobs_sync(lists), population.token_logprobs_sync(padded)
    )


def test_a_population_does_not_change_with_the_arrays_of_its_callers(
    tiny: genlm.AsyncLM,
) -> None:
    ids = np.array([2, 3, 4])
    population = tiny.population([1], 3).extend(ids)
    ids[:] = 5
    assert members(population) == [(1, 2), (1, 3), (1, 4)]
    for result in (population.tokens, population.lengths, population.last_tokens):
        result.fill_(5)
    population.finished[:] = True
    assert members(population) == [(1, 2), (1, 3), (1, 4)]
    assert population.lengths.tolist() == [2, 2, 2]
    assert not population.finished.any()


def test_members_have_their_last_tokens(tiny: genlm.AsyncLM) -> None:
    population = tiny.population([[0], [1, 2], [3], [1, 2]])
    for tokens in (None, [[-1, 4], [5, -1], [-1, -1], [0, 6]], [[-1], [-1], [2], [-1]]):
        if tokens is not None:
            population = population.extend(tokens)
        ids = [list(population[i].token_ids) for i in range(4)]
        assert population.last_tokens.tolist() == [each[-1] for each in ids]
        some = population[[3, 0, 0]]
        assert some.last_tokens.tolist() == [ids[i][-1] for i in (3, 0, 0)]
    assert torch.equal(population[[]].last_tokens, torch.empty(0, dtype=torch.int64))


def test_a_population_of_a_padded_array_has_its_sequences(tiny: genlm.AsyncLM) -> None:
    population = tiny.population([[1], [1, 2, 3], [1, 2], [1, 2, 3]])
    padded = population.tokens
    for array in (padded, padded.numpy(), padded.to(torch.int32)):
        again = tiny.population(array)
        assert [member.token_ids for member in again] == [(1,), (1, 2, 3), (1, 2), (1, 2, 3)]
    cut = tiny.population(torch.where(torch.arange(3) < 2, padded, -1))  # two tokens at most
    assert cut.lengths.tolist() == [1, 2, 2, 2]
    with pytest.raises(genlm.EmptySequenceError) as caught:
        tiny.population(np.array([[1, -1], [-1, -1], [2, 3], [-1, -1]]))
    assert caught.value.places == (1, 3)
    with pytest.raises(genlm.TokenIdError, match="token id -2"):
        tiny.population(np.array([[1, -2]]))


def test_a_copy_of_a_population_is_the_population(tiny: genlm.AsyncLM) -> None:
    population = tiny.population([1], 3)
    particle = {"population": population, "texts": ["a"]}
    assert copy.copy(population) is population
    assert copy.deepcopy(particle)["population"] is population


def test_wrong_extensions_name_the_members_and_change_nothing(tiny: genlm.AsyncLM) -> None:
    population = tiny.population([1], 3)
    with pytest.raises(genlm.PopulationError, match=r"2 of 3 members.*member 0, 2") as raised:
        population.extend([SIZE, 0, -2])
    assert raised.value.members == (0, 2)
    assert isinstance(raised.value.__cause__, genlm.TokenIdError)
    with pytest.raises(genlm.PopulationError) as raised:
        population.extend([[0, SIZE], [1, -1], [-2, 3]])
    assert raised.value.members == (0, 2)
    assert f"token id {SIZE}" in str(raised.value)
    with pytest.raises(genlm.TokenTypeError, match="DrawnTokens; pass its token_ids"):
        population.extend(population.draw_sync())
    for wrong in ([1, 2], [[[1]]] * 3):
        with pytest.raises(ValueError, match="3 members"):
            population.extend(wrong)
    with pytest.raises(genlm.TokenTypeError):
        population.extend([0.5, 1, 2])
    with pytest.raises(genlm.PopulationError, match="3 of 3 members"):
        population.extend(np.full(3, -1).astype(np.uint64))
    with pytest.raises(ValueError, match="boolean for each of 3 members"):
        population.finish([1, 0, 1])
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(population)
    with pytest.raises(ValueError, match="no populations"):
        genlm.Population.cat([])
    assert members(population) == [(1,)] * 3
    assert len(population[:0].finish([])) == 0


# -- rows and reductions --------------------------------------------------------------


@pytest.mark.parametrize("members", [1, 12])
def test_an_engine_that_has_ended_is_not_an_error_of_members(members: int) -> None:
    class Ended(TinyEngine):
        def submit(self, query: genlm.Query) -> None:
            raise genlm.EngineDiedError("load the model again")

        def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
            raise genlm.EngineDiedError("load the model again")

    with genlm.AsyncLM(Ended) as llm:
        population = llm.population([1], members).extend(np.arange(members) % SIZE)
        for request in (population.draw_sync, lambda: population.sample_sync(3)):
            with pytest.raises(genlm.EngineDiedError, match="load the model again"):
                request()


def test_rows_and_their_reductions_are_those_of_the_members(llm: genlm.AsyncLM) -> None:
    population = llm.population([1, 2], 5).extend([3, 4, 3, -1, 5])[[0, 0, 1, 2, 3, 4]]
    rows = expected_rows(population)
    torch.testing.assert_close(
        population.next_token_logprobs_sync().double(), rows, atol=1e-6, rtol=0
    )
    ids = torch.tensor([[0, 1], [2, -1], [3, 3], [4, 0], [5, 6], [6, 0]])
    logprobs = population.token_logprobs_sync(ids)
    expected = rows.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=0)
    top = population.top_tokens_sync(3)
    assert torch.equal(top.token_ids, rows.sort(descending=True).indices[:, :3])
    index = [0, 1, 2, 0, 1, 0]
    mass = population.log_mass_sync(MASKS, mask_index=index)
    expected = rows.masked_fill(~torch.from_numpy(MASKS[index]), -torch.inf).logsumexp(1)
    torch.testing.assert_close(mass.double(), expected, atol=1e-6, rtol=0)
    scores = population.score_sync([[1, 2], [3, -1], [-1, -1], [0, 0], [1, 1], [2, 2]])
    first = rows[0, 1] + 0, row((*members(population)[0], 1))[2]
    torch.testing.assert_close(scores[0].double(), torch.stack(first), atol=1e-6, rtol=0)
    assert scores[2].tolist() == [0, 0]
    assert population[[]].score_sync([]).shape == (0, 0)


class Entropy(genlm.Reduction):
    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Any]) -> Any:
        return torch.special.entr(rows.exp()).sum(-1).tolist()


class OfToken(genlm.GroupReduction):
    def __init__(self, token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids

    def compute(self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor) -> Any:
        return (rows[row_of, self.token_ids[members]], members)


def test_reductions_of_ones_own_get_columns_and_return_columns(llm: genlm.AsyncLM) -> None:
    population = llm.population([1], 4).extend([1, 2, 2, 3])
    rows = expected_rows(population)
    entropy = population.reduce_sync(Entropy())
    torch.testing.assert_close(
        entropy.double(), torch.special.entr(rows.exp()).sum(1), atol=1e-5, rtol=0
    )
    logprobs, order = population.reduce_sync(OfToken(torch.tensor([3, 2, 1, 0])))
    assert order.tolist() == [0, 1, 2, 3]
    expected = rows[torch.arange(4), torch.tensor([3, 2, 1, 0])]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=0)
    with pytest.raises(TypeError, match="GroupReduction"):
        population.reduce_sync("entropy")


class Returned(genlm.Reduction):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Any]) -> Any:
        return [requests[0].function(row) for row in rows]


class ReturnedColumns(genlm.GroupReduction):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def compute(self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor) -> Any:
        return self.function(rows[row_of])


@pytest.mark.parametrize("size", [1, 20])  # a group of one is computed as a single query
@pytest.mark.parametrize(
    ("kind", "function", "message"),
    [
        (Returned, lambda _: 1 / 0, "Returned.compute raised ZeroDivisionError"),
        (Returned, lambda _: KeyError(1), "Returned.compute raised KeyError"),
        (Returned, lambda _: {}, "Returned.compute returned dict for a row"),
        (ReturnedColumns, lambda _: 1 / 0, "ReturnedColumns.compute raised ZeroDivision"),
        (ReturnedColumns, lambda rows: rows, "ReturnedColumns.compute returned Tensor"),
        (ReturnedColumns, lambda _: None, "ReturnedColumns.compute returned NoneType"),
        (ReturnedColumns, lambda rows: (rows.numpy(),), "a tuple with ndarray"),
        (ReturnedColumns, lambda rows: (rows[:0],), "shape (0, 7) for"),
    ],
)
def test_errors_of_reductions_of_ones_own_name_their_classes(
    llm: genlm.AsyncLM,
    size: int,
    kind: type[Returned] | type[ReturnedColumns],
    function: Callable[[Any], Any],
    message: str,
) -> None:
    population = llm.population([[1, 1, number % 4] for number in range(size)])
    with pytest.raises(genlm.PopulationError, match=re.escape(message)) as raised:
        population.reduce_sync(kind(function))
    assert isinstance(raised.value.error, genlm.EvaluationError)


def raise_error(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()]
)
@pytest.mark.parametrize("size", [1, 20])
@pytest.mark.parametrize("kind", [Returned, ReturnedColumns])
def test_the_engine_survives_reductions_that_exit(
    llm: genlm.AsyncLM,
    kind: type[Returned] | type[ReturnedColumns],
    size: int,
    error: BaseException,
) -> None:
    population = llm.population([[1, 1, number % 4] for number in range(size)])
    with pytest.raises(genlm.PopulationError, match=f"compute raised {type(error).__name__}"):
        population.reduce_sync(kind(lambda _: raise_error(error)))
    with pytest.raises(genlm.EvaluationError, match=f"compute raised {type(error).__name__}"):
        llm.reduce_text_sync([1, 1, 2], kind(lambda _: raise_error(error)))
    assert population.next_token_logprobs_sync().shape == (size, SIZE)


def test_reductions_of_ones_own_may_return_arrays(llm: genlm.AsyncLM) -> None:
    population = llm.population([[1, 2], [3, 1]])
    first = population.reduce_sync(Returned(lambda row: row.numpy()[:2]))
    assert torch.equal(first, population.next_token_logprobs_sync()[:, :2])


def test_tuples_of_reductions_of_ones_own_are_columns_of_their_types(
    llm: genlm.AsyncLM,
) -> None:
    def values(row: torch.Tensor) -> tuple[Any, ...]:
        likeliest, first = int(row.argmax()), float(row[0])
        return likeliest, likeliest > 2, first, row[:2].bfloat16(), row.double().numpy()[:2]

    population = llm.population([1], 4).extend([1, 2, 2, 3])
    rows = population.next_token_logprobs_sync()
    columns = population.reduce_sync(Returned(values))
    likeliest = rows.argmax(1)
    first = rows[:, :2]
    expected = likeliest, likeliest > 2, first[:, 0], first.bfloat16(), first.double()
    for column, right in zip(columns, expected, strict=True):
        assert column.dtype == right.dtype
        assert torch.equal(column, right)


# -- draws ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["booleans", "list", "packed", "torch", "one"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("bias", ["none", "members", "tokens", "both"])
def test_draws_invert_the_distribution_of_each_member(
    llm: genlm.AsyncLM, form: str, temperature: float, bias: str
) -> None:
    population = llm.population([1], 6).extend([1, 2, 2, 3, 4, 5])
    index = np.array([0, 1, 0, 0, 1, 0]) * (form != "one")
    masks: Any = {
        "booleans": MASKS[index],
        "list": [np.flatnonzero(MASKS[i]).tolist() for i in index],
        "packed": np.packbits(
            np.pad(MASKS[index], ((0, 0), (0, 25))), axis=1, bitorder="little"
        ).view(np.int32),
        "torch": torch.from_numpy(MASKS[index]),
        "one": MASKS[0],
    }[form]
    generator = np.random.default_rng(0)
    shape = {"none": (), "members": (6,), "tokens": (SIZE,), "both": (6, SIZE)}[bias]
    added: Any = torch.from_numpy(generator.normal(size=shape)) if shape else 0.0
    drawn = population.draw_sync(masks, temperature=temperature, bias=added, seed=11)
    numbers = uniforms(11, np.arange(6), 1)
    member_bias = added[:, None] if bias == "members" else added
    rows = expected_rows(population)
    scores = (rows + member_bias).masked_fill(~torch.from_numpy(MASKS[index]), -torch.inf)
    mass = scores.logsumexp(1)
    for member in range(6):
        if temperature:
            chances = (scores[member] / temperature).softmax(0)
            token = int(torch.searchsorted(chances.cumsum(0), numbers[member], right=True))
            draw_logprob = float(chances[token].log())
        else:
            token, draw_logprob = int(scores[member].argmax()), 0.0
        assert int(drawn.token_ids[member]) == token
        values = [float(column[member]) for column in drawn[1:]]
        expected = [float(rows[member, token]), float(mass[member]), draw_logprob]
        assert values == pytest.approx(expected, abs=2e-5)


def test_members_that_are_all_finished_get_no_tokens(tiny: genlm.AsyncLM) -> None:
    population = tiny.population([1, 2], 3).finish([True] * 3)
    for each, limit in ((population, 4), (population.resume(), 0), (population[:0], 4)):
        sampled = each.sample_sync(limit)
        assert torch.equal(sampled.token_ids, torch.empty(len(each), 0, dtype=torch.int64))
        for column in (sampled.logprobs, sampled.draw_logprob):
            assert torch.equal(column, torch.empty(len(each), 0))
            assert column.dtype == torch.float32
        assert sampled.population is each
    assert not strict(tiny).evaluated


def test_samples_end_at_their_limits_or_with_a_full_context(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with genlm.AsyncLM(partial(TinyEngine, 4)) as llm:
        population = llm.population([[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]])
        sampled = population.sample_sync([1, 9, 9, 0], stop=(), seed=1)
        assert (sampled.token_ids >= 0).sum(1).tolist() == [1, 3, 2, 0]
        assert sampled.population.lengths.tolist() == [2, 5, 5, 4]
        assert "2 of 4 continuations ended before max_tokens=9" in caplog.text
        caplog.clear()
        stopped = population.sample_sync(9, stop=range(SIZE), seed=1)
        assert (stopped.token_ids >= 0).sum(1).tolist() == [1] * 4
        assert not caplog.text


@pytest.mark.parametrize("limits", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_draws_and_samples_are_limited_to_the_likeliest_tokens(
    tiny: genlm.AsyncLM, limits: dict[str, Any]
) -> None:
    population = tiny.population([1, 2], 200)
    probabilities, ids = row([1, 2]).exp().sort(descending=True)
    remains = {
        "top_k": torch.arange(SIZE) < 2,
        "top_p": probabilities.cumsum(0) - probabilities < 0.6,
        "min_p": probabilities >= 0.3 * probabilities[0],
    }[next(iter(limits))]
    expected = torch.full((SIZE,), -torch.inf).double()
    expected[ids[remains]] = probabilities[remains].log() - probabilities[remains].sum().log()
    drawn = population.draw_sync(seed=1, **limits)
    sampled = population.sample_sync(1, stop=(), seed=1, **limits)
    assert set(drawn.token_ids.tolist()) == set(ids[remains].tolist())
    assert sampled.token_ids[:, 0].tolist() == drawn.token_ids.tolist()
    for found in (drawn.draw_logprob, sampled.draw_logprob[:, 0]):
        torch.testing.assert_close(found.double(), expected[drawn.token_ids], atol=1e-5, rtol=0)


def test_draws_from_given_rows_are_those_of_the_model_and_compute_nothing(
    tiny: genlm.AsyncLM,
) -> None:
    population = tiny.population([[1], [2, 3], [1], [4, 4]]).extend([3, -1, 0, 2])
    population = population.finish([False, False, True, False])
    rows = population.next_token_logprobs_sync()
    bias = torch.linspace(-1, 1, SIZE)
    settings: list[dict[str, Any]] = [
        {},
        {"masks": MASKS, "mask_index": [0, 1, 0, 2], "bias": bias},
        {"temperature": [0.5, 0.0, 1.0, 2.0], "top_k": 3},
        {"masks": [[1, 2]], "temperature": 0.7, "top_p": 0.9},
    ]
    several = partial(population.draw_without_replacement_sync, 3)
    draws = [partial(population.draw_sync, **options) for options in settings]
    draws += [several, partial(several, **settings[1])]
    drawn = [draw(seed=5) for draw in draws]
    before = tiny.statistics()
    for draw, expected in zip(draws, drawn, strict=True):
        again = draw(rows=rows, seed=5)
        assert again.token_ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(tuple(again[1:]), tuple(expected[1:]))
    product = torch.log_softmax(rows + bias, 1)
    asynchronous = asyncio.run(population.draw(rows=product, seed=5))
    biased = population.draw_sync(bias=bias, rows=rows, seed=5)
    assert asynchronous.token_ids.tolist() == biased.token_ids.tolist()
    assert (tiny.statistics() - before).requests == 0


def test_draws_from_given_rows_need_no_copy_of_all_rows(
    tiny: genlm.AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.core.rows.logits._VALUES_ON_CPU", SIZE)
    population = tiny.population([[1], [2, 3], [1, 2], [4]] * 10)
    population = population.finish(np.arange(40) % 4 == 2)
    rows, bias = population.next_token_logprobs_sync(), torch.randn(40, SIZE)
    whole = population.draw_sync(rows=rows, seed=5)
    with Allocations() as made:
        drawn = population.draw_sync(rows=rows, seed=5)
    assert torch.equal(drawn.token_ids, whole.token_ids)
    assert made.largest < rows.nbytes // 2
    with Allocations() as made:
        population.draw_sync(rows=rows, bias=bias)
    assert made.largest < rows.nbytes // 2
    unfinished = tiny.population([*population])
    with Allocations() as made:
        unfinished.draw_sync(rows=rows, bias=bias)
    assert made.largest < rows.nbytes // 2


def test_rows_that_are_not_log_probabilities_are_refused(tiny: genlm.AsyncLM) -> None:
    population = tiny.population([[1], [2, 3], [4]]).finish([True, False, False])
    rows = population.next_token_logprobs_sync()
    with pytest.raises(ValueError, match=r"rows of shape \(2, 7\); expected \(3, 7\)"):
        population.draw_sync(rows=rows[:2])
    for wrong in ("a", [[0.0], [0.0, 1.0]], [None]):
        with pytest.raises(TypeError, match=r"rows is .*; expected log-probabilities, shape"):
            population.draw_sync(rows=wrong)
    rows[0] = rows[2] = 0.0  # a finished member draws nothing
    with pytest.raises(ValueError, match=r"of members \[2\] do not sum to 1; pass log-prob"):
        population.draw_sync(rows=rows)


def test_one_seed_serves_all_steps_and_copies_differ(llm: genlm.AsyncLM) -> None:
    population = llm.population([1], 200)
    first = population.draw_sync(seed=5)
    assert torch.equal(first.token_ids, population.draw_sync(seed=5).token_ids)
    assert len(set(first.token_ids.tolist())) == SIZE
    extended = population.extend(first.token_ids)
    copies = extended[np.zeros(200, np.int64)].draw_sync(seed=5)
    assert len(set(copies.token_ids.tolist())) > 3
    fresh = [population.draw_sync().token_ids for _ in range(2)]
    assert not torch.equal(*fresh)


SEEDED = {
    "draw": lambda population, seed: population.draw_sync(MASKS[0], seed=seed),
    "rows": lambda population, seed: population.draw_sync(
        rows=population.next_token_logprobs_sync(), seed=seed
    ),
    "without replacement": lambda population, seed: population.draw_without_replacement_sync(
        3, seed=seed
    ),
    "sample": lambda population, seed: population.sample_sync(3, stop=[2], seed=seed)[:3],
}


@pytest.mark.parametrize("form", SEEDED)
def test_a_member_with_its_seed_draws_as_the_only_member_of_a_population(
    llm: genlm.AsyncLM, form: str
) -> None:
    method, population = SEEDED[form], llm.population([1], 9).extend([1, 2, 3] * 3)
    population = population.finish([True, False, True] + [False] * 6)
    seeds = np.array([3, 8, 3, 8, 2**63 - 1, 0, 5, 5, 3])
    drawn = method(population, seeds)
    for seed in (seeds.tolist(), torch.from_numpy(seeds), seeds.astype(np.uint64)):
        for column, other in zip(method(population, seed), drawn, strict=True):
            assert torch.equal(column, other)
    for member, seed in enumerate(seeds.tolist()):
        single = method(population[[member]], seed)
        for column, other in zip(drawn, single, strict=True):
            found = column[member : member + 1]
            assert torch.equal(found if found.ndim == 1 else found[:, : other.shape[1]], other)


def test_samples_with_seeds_are_those_of_batch_sample(llm: genlm.AsyncLM) -> None:
    prompts, seeds = [[1], [2, 3], [1]], [5, 6, 2**63 - 1]
    expected = llm.batch_sample_sync(prompts, 6, stop=(), seed=seeds)
    sampled = llm.population(prompts).sample_sync(6, stop=(), seed=seeds)
    assert sampled.token_ids.tolist() == expected
    alone = llm.sample_sync(prompts[1], 6, stop=(), seed=6)
    assert alone == expected[1]


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        ([1, 2], ValueError, r"seeds of shape \(2,\) for 3 members; pass one seed, or one"),
        ([[1], [2], [3]], ValueError, r"seeds of shape \(3, 1\)"),
        ([1, 2, -1], ValueError, "a seed is -1; it must be 0 or more"),
        ([1, 2, 2**70], TypeError, "seed has values of type object; expected integers"),
        ([0.5] * 3, TypeError, "seed has values of type float64; expected integers"),
        ("123", TypeError, "seed has values of type"),
        (1.5, TypeError, "seed=1.5; expected an integer"),
    ],
)
def test_seeds_that_are_not_one_for_each_member_are_refused(
    tiny: genlm.AsyncLM, seed: Any, error: type[Exception], message: str
) -> None:
    for method in SEEDED.values():
        with pytest.raises(error, match=message):
            method(tiny.population([1], 3), seed)


def test_resumed_members_continue_with_the_next_random_numbers(llm: genlm.AsyncLM) -> None:
    population = llm.population([1], 50)
    sampled = population.sample_sync(3, stop=[0, 1], seed=4)
    unfinished = population.extend(sampled.token_ids)
    resumed = sampled.population.resume()
    assert sampled.population.finished.any()
    assert not resumed.finished.any()
    assert torch.equal(resumed.tokens, unfinished.tokens)
    for one, other in zip(resumed.draw_sync(seed=4), unfinished.draw_sync(seed=4), strict=True):
        assert torch.equal(one, other)


def test_draws_without_replacement_are_of_the_vocabulary(llm: genlm.AsyncLM) -> None:
    population = llm.population([1], 2)
    drawn = population.draw_without_replacement_sync(SIZE, seed=1)
    assert drawn.token_ids.sort(1).values.tolist() == [list(range(SIZE))] * 2
    for count in (SIZE + 1, 2**40):  # would need memory for `count` results
        with pytest.raises(ValueError, match=f"k={count} of a vocabulary of {SIZE} ids"):
            population.draw_without_replacement_sync(count, seed=1)


def test_draws_without_replacement_are_ordered_and_different(llm: genlm.AsyncLM) -> None:
    population = llm.population([1], 50)
    drawn = population.draw_without_replacement_sync(4, MASKS[0], seed=3)
    assert drawn.token_ids.shape == (50, 4)
    chances = row([1]).masked_fill(~torch.from_numpy(MASKS[0]), -torch.inf).exp()
    for ids, logprobs in zip(
        drawn.token_ids.tolist(), drawn.draw_logprob.tolist(), strict=True
    ):
        assert sorted(ids) == np.flatnonzero(MASKS[0]).tolist()
        remaining = chances.clone()
        for token, logprob in zip(ids, logprobs, strict=True):
            assert logprob == pytest.approx(
                float((remaining[token] / remaining.sum()).log()), abs=1e-4
            )
            remaining[token] = 0
    single = population.draw_sync(MASKS[0], seed=3)
    assert torch.equal(single.token_ids, drawn.token_ids[:, 0])


def test_draws_without_replacement_end_with_the_last_possible_token(llm: genlm.AsyncLM) -> None:
    population = llm.population([1], 4).finish([False, False, False, True])
    drawn = population.draw_without_replacement_sync(4, MASKS, mask_index=[0, 1, 2, 0], seed=3)
    remaining = (drawn.logprobs - drawn.draw_logprob).exp()
    counts = [4, 3, 0, 0]
    for member, count in enumerate(counts):
        ids = drawn.token_ids[member].tolist()
        assert ids[count:] == [-1] * (4 - count)
        chances = row([1])[ids[:count]].exp()
        expected = [float(chances[k:].sum()) for k in range(count)] + [0] * (4 - count)
        if population.finished[member]:
            expected[0] = 1
        assert remaining[member].tolist() == pytest.approx(expected, abs=1e-5)
    assert (drawn.draw_logprob[drawn.token_ids < 0] == 0).all()


def test_a_function_of_rows_is_called_with_each_distinct_row(llm: genlm.AsyncLM) -> None:
    counts: list[int] = []

    def largest(rows: torch.Tensor) -> torch.Tensor:
        counts.append(len(rows))
        return rows.amax(1)

    found = llm.population([[1], [2], [1], [1, 2]])[[3, 0, 1, 2, 0]].reduce_sync(largest)
    expected = [float(row(ids).max()) for ids in ([1, 2], [1], [2], [1], [1])]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert sum(counts) == 3


@pytest.mark.parametrize("bias", [0.0, np.linspace(-9, 9, SIZE)])
def test_draws_without_replacement_close_to_temperature_0_are_the_most_likely_tokens(
    llm: genlm.AsyncLM, bias: Any
) -> None:
    population = llm.population([[1], [2], [3]])
    drawn = population.draw_without_replacement_sync(4, MASKS, temperature=1e-30, bias=bias)
    for member, (ids, logprobs) in enumerate(zip(drawn.token_ids, drawn.logprobs, strict=True)):
        allowed, logs = np.flatnonzero(MASKS[member]).tolist(), row([member + 1])
        values = logs + torch.as_tensor(bias)
        expected = sorted(allowed, key=lambda token: -float(values[token]))[:4]
        assert ids.tolist() == expected + [-1] * (4 - len(expected))
        torch.testing.assert_close(
            logprobs[: len(expected)].double(), logs[expected], atol=1e-5, rtol=0
        )


def test_samples_are_repeated_draws_and_end_with_a_stop(llm: genlm.AsyncLM) -> None:
    population, steps = llm.population([1], 8), []
    sampled = population.sample_sync(4, stop=[2, "de"], seed=9)
    for _ in range(4):
        drawn = population.draw_sync(seed=9)
        ended = drawn.token_ids == 2
        population = population.extend(drawn.token_ids).finish(ended)
        texts = [bytes(97 + i for i in member[1:]) for member in members(population)]
        population = population.finish(np.array([b"de" in text for text in texts]))
        steps.append(drawn.token_ids)
    longest = sampled.token_ids.shape[1]
    assert torch.equal(sampled.token_ids, torch.stack(steps, 1)[:, :longest])
    assert members(sampled.population) == members(population)
    assert torch.equal(sampled.population.finished, population.finished)
    scores = llm.population([1], 8).score_sync(sampled.token_ids)
    torch.testing.assert_close(scores, sampled.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [4, 40])
def test_members_have_numbers_of_tokens_of_their_own(llm: genlm.AsyncLM, count: int) -> None:
    """A sample of more tokens begins with those of fewer."""
    population, limits = llm.population([1], count), np.arange(count) % 4
    population = population.finish(np.arange(count) == 2)
    longest = population.sample_sync(3, stop=[2], seed=5)
    sampled = population.sample_sync(torch.from_numpy(limits), stop=[2], seed=5)
    width = sampled.token_ids.shape[1]
    is_drawn = torch.arange(width) < torch.from_numpy(limits)[:, None]
    assert is_drawn[3].all()
    for column, whole, none in zip(sampled[:3], longest[:3], (-1, 0, 0), strict=True):
        torch.testing.assert_close(column, torch.where(is_drawn, whole[:, :width], none))
    ended = (sampled.token_ids == 2).any(1) | population.finished
    assert torch.equal(sampled.population.finished, ended)
    assert members(sampled.population) == members(population.extend(sampled.token_ids))
    none = population.sample_sync([0] * count, seed=5)
    assert none.token_ids.shape == (count, 0)
    with pytest.raises(ValueError, match=r"max_tokens has shape \(2,\); expected a number"):
        population.sample_sync([1, 2])
    with pytest.raises(ValueError, match="max_tokens has -1; it must be 0"):
        population.sample_sync([-1] * count)
    with pytest.raises(TokenTypeError, match="max_tokens must be integers"):
        population.sample_sync([0.5] * count)


@pytest.mark.parametrize("copies", [1, 20])
def test_samples_follow_masks_and_biases(llm: genlm.AsyncLM, copies: int) -> None:
    """Also those of few members; a member with an empty mask gets no token."""
    prompts, bias = [[1], [2], [3]] * copies, np.linspace(-1, 1, SIZE)
    options = {"mask_index": [0, 1, 2] * copies, "temperature": 0.7, "bias": bias, "seed": 4}
    population = llm.population(prompts)
    sampled = population.sample_sync(3, MASKS, stop=(), **options)
    index = options.pop("mask_index")
    deferred = RowMasks.deferred(lambda: RowMasks(MASKS, len(prompts), SIZE, index), len(index))
    other = population.sample_sync(3, deferred, stop=(), **options)
    for column, expected in zip(other[:3], sampled[:3], strict=True):
        assert torch.equal(column, expected)
    options["mask_index"] = index
    for place in range(3):
        drawn = population.draw_sync(MASKS, **options)
        assert torch.equal(drawn.token_ids, sampled.token_ids[:, place])
        population = population.extend(drawn.token_ids)
    assert members(sampled.population) == members(population)
    assert not sampled.population.finished.any()
    for member, prompt in enumerate(prompts):
        ids = sampled.token_ids[member].tolist()
        if prompt == [3]:
            assert ids == [-1] * 3
            assert not sampled.logprobs[member].any()
            assert not sampled.draw_logprob[member].any()
            continue
        for place, token in enumerate(ids):
            logprobs = row([*prompt, *ids[:place]])
            scores = (logprobs + torch.from_numpy(bias)) / 0.7
            scores[~torch.from_numpy(MASKS[prompt[0] - 1])] = -np.inf
            found = sampled.logprobs[member, place], sampled.draw_logprob[member, place]
            expected = logprobs[token], torch.log_softmax(scores, 0)[token]
            assert [*map(float, found)] == pytest.approx([*map(float, expected)], abs=1e-5)


def test_samples_under_a_mask_have_the_distribution_of_enumeration(llm: genlm.AsyncLM) -> None:
    count, bias = 4000, np.linspace(1, -1, SIZE)
    sampled = llm.population([1], count).sample_sync(2, MASKS[0], bias=bias, stop=(), seed=2)
    shares = Counter(map(tuple, sampled.token_ids.tolist()))

    def chances(prompt: list[int]) -> dict[int, float]:
        weights = (row(prompt) + torch.from_numpy(bias)).exp() * torch.from_numpy(MASKS[0])
        return {token: float(weights[token] / weights.sum()) for token in range(SIZE)}

    for first, chance in chances([1]).items():
        for second, further in chances([1, first]).items():
            expected = chance * further
            deviation = abs(shares[first, second] / count - expected)
            assert deviation <= 4.5 * np.sqrt(expected / count)


@pytest.mark.parametrize("copies", [1, 20])
def test_a_member_without_an_allowed_token_draws_once(llm: genlm.AsyncLM, copies: int) -> None:
    population = llm.population([1], copies)
    sampled = population.sample_sync(5, bias=np.full(SIZE, -np.inf), stop=(), seed=1)
    assert sampled.token_ids.tolist() == [[]] * copies
    assert members(sampled.population) == [(1,)] * copies


def test_a_bias_that_is_no_number_fails_a_sample_as_it_fails_a_draw(llm: genlm.AsyncLM) -> None:
    bias = np.zeros((3, SIZE))
    bias[1] = np.nan
    for size in (1, 20):
        population = llm.population([1], 3 * size)
        for request in (population.draw_sync, partial(population.sample_sync, 2)):
            with pytest.raises(genlm.PopulationError, match="bias is NaN") as error:
                request(bias=np.tile(bias, (size, 1)))
            assert error.value.members == tuple(range(1, 3 * size, 3))


# -- ends, errors, cancellation -------------------------------------------------------


def test_dead_and_finished_members_are_not_computed(tiny: genlm.AsyncLM) -> None:
    engine: Any = tiny.engine
    population = tiny.population([[1], [2], [3], [4]]).finish([False, True, False, False])
    drawn = population.draw_sync(MASKS, mask_index=[0, 0, 2, 1], seed=0)
    assert engine.evaluated == [[(1,), (4,)]]
    assert drawn.token_ids[1:3].tolist() == [-1, -1]
    assert drawn.log_mass[1:3].tolist() == [0, -np.inf]
    assert (drawn.logprobs - drawn.draw_logprob)[1:3].tolist() == [0, -np.inf]
    assert population.finished.tolist() == [False, True, False, False]
    assert tiny.population([1], 0).draw_sync().token_ids.shape == (0,)
    assert population[[1]].draw_sync().log_mass.tolist() == [0]
    assert len(engine.evaluated) == 1
    again = population.extend(drawn.token_ids)
    assert members(again)[1:3] == [(2,), (3,)]


def test_equal_members_are_computed_once(tiny: genlm.AsyncLM) -> None:
    engine: Any = tiny.engine
    tiny.population([1], 100).extend([1, 2] * 50).next_token_logprobs_sync()
    assert engine.evaluated == [[(1, 1), (1, 2)]]
    assert tiny.statistics().requests == 2


def test_every_query_of_an_engine_has_its_own_id() -> None:
    class Recorded(TinyEngine):
        def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
            query_ids.extend(query.query_id for query in queries)
            return super().evaluate(queries)

    query_ids: list[int] = []
    with genlm.AsyncLM(Recorded, output_cache=genlm.OutputCache(0)) as llm:
        llm.population([[i % 5, i // 5] for i in range(20)]).next_token_logprobs_sync()
        llm.reduce_text_sync([1, 1, 2, 3], ReturnedColumns(lambda rows: (rows,)))
        llm.batch_score_sync([[1, 2, 3], [2, 2, 2, 1]])
    assert len(query_ids) == len(set(query_ids)) >= 25


def test_members_that_fail_are_listed_and_the_others_can_be_asked_again(
    llm: genlm.AsyncLM,
) -> None:
    engine = strict(llm)
    population = llm.population([1], 4).extend([2, POISON, 3, POISON])
    with pytest.raises(genlm.PopulationError, match="2 of 4 members") as raised:
        population.next_token_logprobs_sync()
    assert raised.value.members == (1, 3)
    assert isinstance(raised.value.error, ArithmeticError)
    engine.is_strict = False
    engine.nan_after = 3
    with pytest.raises(genlm.PopulationError, match="not a distribution") as raised:
        population.draw_sync(seed=1)
    assert raised.value.members == (2,)
    engine.nan_after = None
    torch.testing.assert_close(
        population.next_token_logprobs_sync().double(),
        expected_rows(population),
        atol=1e-6,
        rtol=0,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": True},
        {"temperature": "1"},
        {"temperature": [1.0, None]},
        {"bias": True},
        {"bias": "high"},
        {"bias": [["high"] * SIZE] * 2},
    ],
    ids=repr,
)
def test_temperatures_and_biases_that_are_not_numbers_are_refused(
    tiny: genlm.AsyncLM, wrong: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} has values of type"):
        tiny.population([1], 2).draw_sync(seed=1, **wrong)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_bias_that_is_no_number_fails_the_members_that_have_it(
    tiny: genlm.AsyncLM, value: float, temperature: float
) -> None:
    population = tiny.population([[1], [2], [3]])
    of_tokens = np.zeros((3, SIZE))
    of_tokens[1, 2] = value
    for bias in (np.array([0, value, 0]), of_tokens):
        for ask in (
            lambda bias: population.draw_sync(temperature=temperature, bias=bias, seed=1),
            lambda bias: population.log_mass_sync([1, 2], bias=bias),
            lambda bias: population.draw_without_replacement_sync(2, bias=bias, seed=1),
        ):
            with pytest.raises(genlm.PopulationError, match=r"NaN or .* by -inf$") as raised:
                ask(bias)
            assert raised.value.members == (1,)
    excluded = population.draw_sync([3, 4], bias=of_tokens, temperature=temperature, seed=1)
    assert set(excluded.token_ids.tolist()) <= {3, 4}


def test_settings_that_cannot_be_meant_are_refused_before_anything_is_computed(
    tiny: genlm.AsyncLM,
) -> None:
    population = tiny.population([1], 3)
    with pytest.raises(ValueError, match="temperature above 0; top_tokens"):
        population.draw_without_replacement_sync(2, temperature=[1, 0, 1])
    with pytest.raises(ValueError, match=r"temperature has shape \(2,\); expected a number"):
        population.draw_sync(temperature=[1.0, 2.0])
    with pytest.raises(ValueError, match="temperature=nan; it must be finite"):
        population.draw_sync(temperature=[1.0, float("nan"), 1.0])
    with pytest.raises(ValueError, match="mask_index without masks"):
        population.draw_sync(mask_index=[0, 0, 1])
    with pytest.raises(TypeError, match="bias has values of type bool"):
        population.draw_sync(bias=torch.ones(SIZE, dtype=torch.bool))
    with pytest.raises(genlm.TokenIdError) as raised:
        population.draw_sync([[1], [2], [SIZE]])
    assert raised.value.places == (2,)
    engine: Any = tiny.engine
    assert engine.evaluated == []


def test_continuations_that_cannot_be_scored_name_their_members() -> None:
    with genlm.AsyncLM(lambda: TinyEngine(max_context=3)) as llm:
        population = llm.population([1], 3)
        with pytest.raises(genlm.PopulationError, match="of 5 tokens is too long") as raised:
            population.score_sync([[-1] * 4, [1, 2, -1, -1], [1, 2, 3, 4]])
        assert raised.value.members == (2,)
        with pytest.raises(genlm.PopulationError, match="outside the vocabulary") as raised:
            population.score_sync([[1], [SIZE], [1]])
        assert raised.value.members == (1,)
        strict(llm)
        with pytest.raises(genlm.PopulationError, match="ArithmeticError") as raised:
            population.score_sync([[-1, -1], [POISON, 2], [1, 2]])
        assert raised.value.members == (1,)


def test_an_engine_that_always_fails_is_called_few_times(tiny: genlm.AsyncLM) -> None:
    engine = strict(tiny)
    population = tiny.population([POISON], 64).extend(np.arange(64) % SIZE).extend([0] * 64)
    with pytest.raises(genlm.PopulationError, match="64 of 64"):
        population.next_token_logprobs_sync()
    assert len(engine.evaluated) <= 7


def test_several_sequences_take_no_size(tiny: genlm.AsyncLM) -> None:
    message = "`prompts` with `size` must be one sequence of token ids; found several"
    for prompts in ([[1], [2]], ([1],), [tiny.context([1])], np.array([[1], [2]])):
        with pytest.raises(TokenTypeError, match=message):
            tiny.population(prompts, 2)  # type: ignore[arg-type]
    for prompt in ([1], (1,), np.array([1]), torch.tensor([1]), tiny.context([1])):
        assert len(tiny.population(prompt, 2)) == 2


def test_contexts_that_are_full_are_listed() -> None:
    with genlm.AsyncLM(lambda: TinyEngine(max_context=3)) as llm:
        population = llm.population([1, 2], 3).extend([[3, 4], [3, -1], [-1, -1]])
        with pytest.raises(genlm.PopulationError, match=r"member 0.*context of 3") as raised:
            population.draw_sync()
        assert isinstance(raised.value.error, genlm.ContextLengthError)
        assert len(population[1:].draw_sync().token_ids) == 2
        with pytest.raises(genlm.PopulationError, match="2 of 3 members") as raised:
            population.score_sync([[1, -1], [1, 2], [1, 2]])
        assert raised.value.members == (0, 1)


def test_continuations_end_where_the_context_is_full(caplog: pytest.LogCaptureFixture) -> None:
    with genlm.AsyncLM(lambda: TinyEngine(max_context=4)) as llm:
        population = llm.population([[1], [1, 2, 3], [1, 2, 3, 4], [2]])
        population = population.finish([False, False, False, True])
        sampled = population.sample_sync(9, stop=(), seed=1)
        assert (sampled.token_ids >= 0).sum(1).tolist() == [4, 2, 1, 0]
        assert sampled.population.lengths.tolist() == [5, 5, 5, 1]
        assert sampled.population.finished.tolist() == [False, False, False, True]
        again = population.sample_sync(1, stop=(), seed=1)
        assert again.token_ids[:, 0].tolist() == sampled.token_ids[:, 0].tolist()
        [record] = caplog.records
        assert record.message.startswith("3 of 4 continuations ended before max_tokens=9")
        with pytest.raises(genlm.PopulationError, match=r"3 of 4 .*ContextLengthError"):
            sampled.population.sample_sync(1)


def test_arguments_of_a_population_are_refused_with_a_hint(llm: genlm.AsyncLM) -> None:
    population = llm.population([1], 2)
    with pytest.raises(TypeError, match="expected populations; found <Context"):
        genlm.Population.cat([population, llm.context([1])])
    with pytest.raises(ValueError, match=r"token_ids has lists of different lengths$"):
        population.score_sync([[[1], [1, 2]], [[1]]])
    with pytest.raises(ValueError, match=r"continuations of shape \(2,\); expected \(2, k\)"):
        population.score_sync([1, 2])
    with pytest.raises(ValueError, match="a continuation has a token after -1"):
        population.score_sync([[1, -1, 2], [1, 2, 3]])
    with pytest.raises(genlm.TokenTypeError, match="must be integers"):
        population.extend([[1], [1, 0.5]])
    with pytest.raises(genlm.TokenTypeError, match="must be integers; found str"):
        population.extend("1")
    with pytest.raises(ValueError, match=r"mask_index has lists of different lengths$"):
        population.draw_sync([[1]], mask_index=[[0], [0, 0]])
    with pytest.raises(genlm.TokenTypeError, match="pass the number of members as `size`"):
        llm.population([1, 2])
    with pytest.raises(genlm.EmptySequenceError) as raised:
        llm.population([[1], []])
    assert raised.value.places == (1,)


def test_a_large_population_is_computed_in_parts_between_which_others_run() -> None:
    with genlm.AsyncLM(TinyEngine, output_cache=genlm.OutputCache(0)) as llm:
        engine: Any = llm.engine
        engine.part = 2

        async def together() -> list[Any]:
            population = llm.population([[i % SIZE] * (1 + i // SIZE) for i in range(9)])
            task = asyncio.ensure_future(population.next_token_logprobs())
            await asyncio.sleep(0)
            return [population, await llm.next_token_logprobs([5, 5]), await task]

        population, single, rows = asyncio.run(together())
        torch.testing.assert_close(rows.double(), expected_rows(population), atol=1e-6, rtol=0)
        torch.testing.assert_close(single.double(), row([5, 5]), atol=1e-6, rtol=0)
        sizes = [len(batch) for batch in engine.evaluated]
        assert sorted(sizes) == [1, 1, 2, 2, 2, 2]
        assert engine.evaluated.index([(5, 5)]) < len(sizes) - 1


def test_a_cancelled_request_leaves_nothing_behind(llm: genlm.AsyncLM) -> None:
    async def cancelled() -> None:
        population = llm.population([1], 50).extend(np.arange(50) % SIZE)
        for _ in range(5):
            task = asyncio.ensure_future(population.draw())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        drawn = await population.draw(seed=2)
        assert torch.equal(drawn.token_ids, (await population.draw(seed=2)).token_ids)

    asyncio.run(cancelled())
    assert llm.statistics().pending == 0


def test_contexts_are_leased_while_a_population_refers_to_them() -> None:
    with genlm.AsyncLM(ServingEngine, output_cache=genlm.OutputCache(0)) as llm:
        engine: Any = llm.engine
        assert isinstance(engine, ServingEngine)
        assert not isinstance(engine, GroupEngine)
        population = llm.population([1], 3).extend([1, 2, 3])
        keys = {(None, context.sequence.key) for context in population}
        population.draw_sync()
        population = population.extend([4, 4, 4])
        population.draw_sync()  # computes the extension, which no longer needs the first ones
        gc.collect()
        llm.next_token_logprobs_sync([6])
        for _ in range(100):
            if len(engine.released) >= 3:
                break
            llm.next_token_logprobs_sync([6, len(engine.released) % SIZE])
        assert set(engine.released) == keys


def test_blocking_twins_work_in_a_running_event_loop(llm: genlm.AsyncLM) -> None:
    async def inside() -> Any:
        return llm.population([1], 3).draw_sync(seed=4)

    outside = llm.population([1], 3).draw_sync(seed=4)
    assert torch.equal(asyncio.run(inside()).token_ids, outside.token_ids)


def test_populations_of_other_models_and_adapters_are_refused(tiny: genlm.AsyncLM) -> None:
    with genlm.AsyncLM(TinyEngine) as other:
        with pytest.raises(ValueError, match=r"or adapters: .* and, at index 1, <Pop"):
            genlm.Population.cat([tiny.population([1], 1), other.population([1], 1)])
        with pytest.raises(ValueError, match="different model"):
            other.population([tiny.context([1])])
    with pytest.raises(genlm.UnsupportedCapabilityError):
        tiny.population([1], 2, lora_name="red")
    with pytest.raises(TypeError, match="size"):
        tiny.population([1], 1.5)  # type: ignore[call-overload]


def test_populations_of_none_and_of_one_member_are_like_others(llm: genlm.AsyncLM) -> None:
    nobody = llm.population([1], 0)
    assert nobody.reduce_sync(Entropy()).shape == (0,)
    assert nobody.next_token_logprobs_sync().shape == (0, SIZE)
    assert nobody.tokens.shape == (0, 0)
    assert nobody.log_mass_sync(MASKS[0]).shape == (0,)
    assert nobody.sample_sync(3).token_ids.shape == (0, 0)
    pair = llm.population([1], 2)
    drawn = pair.finish([True, False]).draw_sync(bias=[0.0, 1.5], seed=1)
    assert drawn.log_mass.tolist() == pytest.approx([0, 1.5], abs=1e-6)
