"""Groups that are computed together: their results equal those of each group alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine, oracle_row

from genlm.core.engine.group_engine import MemberColumns
from genlm.core.rows import joined_groups
from genlm.core.rows.group_reductions import (
    DrawColumns,
    DrawLogprobColumns,
    MassColumns,
    ScoreColumns,
    TokenColumns,
    TopColumns,
)
from genlm.core.rows.reductions import TopK
from genlm.core.rows.row_masks import RowMasks
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.shared_reduction import SharedReduction
from genlm.core.rows.truncation import Truncation
from genlm.plugin import (
    Generation,
    GroupQuery,
    GroupReduction,
    GroupResult,
    GroupValues,
    Lineage,
    TokenSequence,
)

SIZE = 40
SHARED = RowMasks(np.random.default_rng(0).random((5, SIZE)) < 0.5, 5, SIZE)


class Joint(ScriptedEngine):
    """Computes all pending groups together, and returns logits."""

    invalid: Collection[tuple[int, ...]] = ()
    """Sequences whose logits are NaN."""

    def logits(self, group: GroupQuery, places: Any) -> torch.Tensor:
        sequence_of = group.generation.lineage.sequence
        ids = [sequence_of(place).token_ids for place in group.wanted[places].tolist()]
        logits = torch.stack([oracle_row(each, None, SIZE) for each in ids]) + 3.0
        for place, each in enumerate(ids):
            if each in self.invalid:
                logits[place] = torch.nan
        return logits

    def evaluate_groups(self, parts: Sequence[tuple[GroupQuery, Any]]) -> GroupValues:
        values = torch.cat([self.logits(group, places) for group, places in parts])
        return GroupValues(values, are_logits=True)


def group(query_id: int, row_of: Sequence[int], reduction: GroupReduction) -> GroupQuery:
    """A query whose sequences begin with its id."""
    count = max(row_of) + 1
    sequences = [TokenSequence.of([query_id, place]) for place in range(count)]
    generation = Generation(Lineage.of_sequences(sequences))
    return GroupQuery(query_id, generation, np.arange(count), np.array(row_of), reduction)


def results(engine: Joint, queries: Sequence[GroupQuery]) -> dict[int, GroupResult]:
    """The results of queries that are pending together."""
    for query in queries:
        engine.submit_group(query)
    completions = engine.step()
    assert not engine._groups
    assert not any(completion.error for completion in completions)
    return {completion.query_id: completion.result for completion in completions}


@pytest.fixture
def joined_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of groups whose reductions were computed as those of one."""
    sizes = []
    original = joined_groups.reduce_groups

    def recorded(works: Any, *arguments: Any) -> None:
        original(works, *arguments)
        sizes.extend([len(works)] if len(works) > 1 else [])

    monkeypatch.setattr(joined_groups, "reduce_groups", recorded)
    return sizes


def deferred(masks: Any) -> RowMasks:
    return RowMasks.deferred(lambda: RowMasks(masks, len(masks), SIZE), len(masks))


def shared(n: int, index: Any) -> RowMasks:
    return RowMasks.deferred(lambda: SHARED.of(index), n)


MASKS: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "none": lambda n, rng: None,
    "one": lambda n, rng: rng.random(SIZE) < 0.5,
    "the same": lambda n, rng: np.arange(SIZE) % 3 > 0,
    "each": lambda n, rng: rng.random((n, SIZE)) < 0.5,
    "packed": lambda n, rng: rng.integers(-(2**31), 2**31, (n, 2), np.int64).astype(np.int32),
    "some without": lambda n, rng: [None, *(rng.random((n - 1, SIZE)) < 0.5)],
    "deferred": lambda n, rng: deferred(rng.random((n, SIZE)) < 0.5),
    "few tokens": lambda n, rng: np.eye(SIZE, dtype=bool)[rng.integers(0, SIZE, n)],
    "empty": lambda n, rng: np.zeros((n, SIZE), bool),
    "shared": lambda n, rng: shared(n, rng.integers(0, 5, n)),
}

BIASES: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "none": lambda n, rng: 0.0,
    "number": lambda n, rng: 0.5,
    "of rows": lambda n, rng: rng.normal(0, 3, (n, 1)),
    "of tokens": lambda n, rng: rng.normal(0, 3, (1, SIZE)),
    "the same of tokens": lambda n, rng: COMMON_BIAS,
    "half": lambda n, rng: torch.tensor(rng.normal(0, 3, (1, SIZE)), dtype=torch.float16),
    "of each": lambda n, rng: np.where(rng.random((n, SIZE)) < 0.1, -np.inf, 1.5),
}
COMMON_BIAS = torch.linspace(-2, 3, SIZE)


@st.composite
def draws(draw: st.DrawFn, query_id: int) -> GroupQuery:
    """A group query for draws, their log-probabilities, masses, scores or likely tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    row_of = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    row_of = np.unique(row_of, return_inverse=True)[1].tolist()
    count = len(row_of)
    temperature = draw(st.sampled_from([1.0, 0.7, 0.0, "each"]))
    several = draw(st.sampled_from([None, None, 1, 3]))
    if temperature == "each":
        temperature = rng.choice([0.5, 1.0, 2.0], count)
    elif temperature == 0.0 and several is not None:
        temperature = 1.0
    weights = RowWeights(
        (count, SIZE),
        MASKS[draw(st.sampled_from([*MASKS]))](count, rng),
        temperature=temperature,
        truncation=Truncation(top_p=draw(st.sampled_from([1.0, 1.0, 0.8]))),
        bias=BIASES[draw(st.sampled_from([*BIASES]))](count, rng),
    )
    numbers = rng.random(count if several is None else (count, several))
    token_ids = torch.tensor(rng.integers(-1, SIZE, (count, several or 2)))
    reductions = [
        DrawColumns(weights, numbers),
        DrawLogprobColumns(weights, token_ids),
        MassColumns(weights),
        ScoreColumns(token_ids[:, 0].clamp(min=0)),
        TokenColumns(token_ids),
        TopColumns(2, count),
    ]
    return group(query_id, row_of, draw(st.sampled_from(reductions)))


@given(st.data())
def test_draws_of_groups_equal_those_of_each_alone(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 5))
    queries = [data.draw(draws(query_id)) for query_id in range(count)]
    together = results(Joint(SIZE), queries)
    for query in queries:
        alone = results(Joint(SIZE), [query])[query.query_id]
        joint = together[query.query_id]
        assert joint.errors == alone.errors == {}
        for column, expected in zip(joint.columns, alone.columns, strict=True):
            torch.testing.assert_close(column, expected, atol=1e-6, rtol=0)


def divided(query: GroupQuery) -> list[tuple[torch.Tensor, MemberColumns]]:
    """The row of each sequence of a group, and the reduction of its members."""
    rows = Joint(SIZE).logits(query, np.arange(len(query.wanted))).log_softmax(1)
    members = [np.flatnonzero(query.row_of == place) for place in range(len(rows))]
    requests = [MemberColumns(query.reduction, each) for each in members]
    return list(zip(rows, requests, strict=True))


@given(st.data())
def test_draws_of_groups_that_are_divided_equal_those_of_each_alone(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 5))
    parts = [divided(data.draw(draws(query_id))) for query_id in range(count)]
    parts.append(divided(group(count, [0, 1, 1], SharedReduction(TopK(2)))))
    order = data.draw(st.permutations([pair for part in parts for pair in part]))
    rows, requests = zip(*order, strict=True)
    found = dict(zip(requests, MemberColumns.compute(torch.stack(rows), requests), strict=True))
    for part in parts:
        rows, requests = zip(*part, strict=True)
        alone = MemberColumns.compute(torch.stack(rows), requests)
        for request, expected in zip(requests, alone, strict=True):
            for column, other in zip(found[request], expected, strict=True):
                torch.testing.assert_close(column, other, atol=1e-6, rtol=0)


def test_draws_of_groups_that_are_divided_are_computed_as_those_of_one_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    original = DrawColumns.compute

    def recorded(self: Any, rows: torch.Tensor, row_of: Any, members: Any) -> Any:
        sizes.append(len(members))
        return original(self, rows, row_of, members)

    monkeypatch.setattr(DrawColumns, "compute", recorded)
    queries = [plain(i, temperature=1 - 0.5 * (i % 2)) for i in range(8)]
    parts = [pair for query in queries for pair in divided(query)]
    rows, requests = zip(*parts, strict=True)
    MemberColumns.compute(torch.stack(rows), requests)
    assert sizes == [12, 12]  # with and without a temperature


def plain(query_id: int, masks: Any = None, count: int = 3, **options: Any) -> GroupQuery:
    weights = RowWeights((count, SIZE), masks, **options)
    numbers = np.random.default_rng(query_id).random(count)
    return group(query_id, range(count), DrawColumns(weights, numbers))


def log_probability(**options: Any) -> DrawLogprobColumns:
    return DrawLogprobColumns(RowWeights((1, SIZE), **options), torch.tensor([[3, 5]]))


def test_draws_with_similar_weights_are_computed_as_one_group(joined_sizes: list[int]) -> None:
    mask = np.arange(SIZE) < 7
    kinds: list[Callable[[int], GroupQuery]] = [
        plain,
        lambda i: plain(i, mask),
        lambda i: plain(i, temperature=0.5 + i),
        lambda i: plain(i, truncation=Truncation(top_p=0.5)),
        lambda i: group(i, [0, 1], SharedReduction(TopK(2))),  # user-defined
        lambda i: group(i, [0, 1], TopColumns(2, 2)),
        lambda i: group(i, [0, 1], TopColumns(3, 2)),
        lambda i: group(i, [0, 0], TokenColumns(torch.tensor([[i, 3], [4, -1]]))),
        lambda i: plain(i, bias=1.0),
        lambda i: plain(i, bias=np.full(SIZE, float(i))),
        lambda i: plain(i, mask, bias=np.full((3, SIZE), float(i))),
        lambda i: plain(i, bias=np.ones(SIZE), count=33),  # biases of many rows are not copied
        lambda i: group(i, [0], MassColumns(RowWeights((1, SIZE), mask))),
        lambda i: group(i, [0], log_probability(temperature=2.0)),
    ]
    queries = [kinds[i % len(kinds)](i) for i in range(3 * len(kinds))]
    together = results(Joint(SIZE), queries)
    assert len(together) == len(queries)
    assert joined_sizes == [3] * 12


def test_scores_of_several_texts_are_computed_as_one_group(joined_sizes: list[int]) -> None:
    targets = np.random.default_rng(0).integers(0, SIZE, (3, 4))
    queries = [group(i, range(4), ScoreColumns(torch.tensor(targets[i]))) for i in range(3)]
    together = results(Joint(SIZE), queries)
    assert joined_sizes == [3]
    for i in range(3):
        rows = torch.stack([oracle_row((i, place), None, SIZE) for place in range(4)])
        logprobs, is_top = together[i].columns
        expected = rows.gather(1, torch.tensor(targets[i])[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        assert is_top.tolist() == (rows.argmax(1).numpy() == targets[i]).tolist()


def test_one_mask_of_all_groups_is_stored_once() -> None:
    mask = np.arange(SIZE) < 7
    batches = [RowMasks(mask, 2, SIZE) for _ in range(3)]
    joined = RowMasks.joined([*batches, RowMasks(~mask, 1, SIZE)])
    assert joined.places.tolist() == [0] * 6 + [1]
    factors = joined.factors(0, 7, torch.device("cpu"))
    assert factors.bool().tolist() == [mask.tolist()] * 6 + [(~mask).tolist()]
    same = RowMasks.joined(batches)
    assert same.factors(0, 6, torch.device("cpu")).shape == (1, SIZE)


def biased(bias: Any, count: int) -> RowWeights:
    return RowWeights((count, SIZE), bias=bias)


def biases_of(weights: RowWeights) -> torch.Tensor:
    """The biases of the tokens of all rows, shape `(1 or n, SIZE)`."""
    [part] = weights.parts(torch.zeros(weights.count, SIZE))
    assert part.bias is not None
    return part.bias


def test_a_bias_of_several_groups_is_stored_once() -> None:
    bias, rows = torch.randn(SIZE), np.random.default_rng(0).normal(0, 1, (2, SIZE))
    same = RowWeights.joined([biased(bias, 2), biased(bias, 1)])
    assert biases_of(same).shape == (1, SIZE)  # not copied for each row
    batches = [biased(bias, 2), biased(rows, 2), biased(bias, 1)]
    joined = RowWeights.joined(batches)
    expected = torch.stack([bias, bias, *torch.tensor(rows).float(), bias])
    assert torch.equal(biases_of(joined), expected)
    received = pickle.loads(pickle.dumps(joined.of(np.array([4, 3, 3]))))
    assert torch.equal(biases_of(received), expected[[4, 3, 3]])
    few = biased(np.random.default_rng(1).normal(0, 1, (9, SIZE)), 9).of(np.array([7, 2]))
    several = RowWeights.joined([few, biased(bias, 1)])
    assert torch.equal(biases_of(several), torch.stack([*biases_of(few), bias]))
    assert several.biases is not None
    assert len(several.biases.values) == 3  # without those of other rows
    assert joined.biases is not None
    found = joined.biases.of_ids(np.array([3, 4]), np.array([[7], [9]]))
    np.testing.assert_array_equal(found, expected[[3, 4], [7, 9]][:, None])


def test_biases_that_begin_at_the_same_number_are_different_ones() -> None:
    bias = torch.randn(4, SIZE)
    joined = RowWeights.joined([biased(bias[:2], 2), biased(bias[::2], 2)])
    assert torch.equal(biases_of(joined), bias[[0, 1, 0, 2]])


def test_weights_with_equal_biases_of_one_row_are_computed_once() -> None:
    bias = torch.randn(SIZE)
    batches = [biased(bias, 3), biased(torch.randn(1, SIZE), 2), biased(bias, 1)]
    joined = RowWeights.joined(batches)
    first, set_of = joined.distinct(np.array([0, 0, 0, 1, 1, 1]))
    assert first.tolist() == [0, 5, 3]
    assert set_of.tolist() == [0, 0, 0, 2, 2, 1]


def test_bitmasks_of_words_are_joined_with_those_of_bytes() -> None:
    words = np.array([[0b101, 1 << 7], [3, 0]], np.int32)  # tokens 0, 2 and 39; 0 and 1
    joined = RowMasks.joined([RowMasks([[7, 39]], 2, SIZE), RowMasks(words, 2, SIZE)])
    assert joined.bits(torch.device("cpu"))[2]  # packed
    factors = joined.factors(0, 4, torch.device("cpu"))
    assert [row.nonzero()[:, 0].tolist() for row in factors] == [[7, 39]] * 2 + [
        [0, 2, 39],
        [0, 1],
    ]


def test_only_masks_in_use_are_joined() -> None:
    used = RowMasks(np.eye(SIZE, dtype=bool), 3, SIZE, [9, 4, 9])
    joined = RowMasks.joined([used, RowMasks(np.ones(SIZE, bool), 1, SIZE)])
    rows, places, _ = joined.bits(torch.device("cpu"))
    assert len(rows) == 3
    assert places.tolist() == [1, 0, 1, 2]
    assert joined.unrestricted is None


def test_rows_without_a_mask_keep_none() -> None:
    some = RowMasks([None, [3], [4]], 3, SIZE)
    unrestricted = RowMasks.joined([RowMasks([5], 2, SIZE), some]).unrestricted
    assert unrestricted is not None
    assert unrestricted.tolist() == [False, False, True, False, False]


def test_an_error_is_that_of_one_group(joined_sizes: list[int]) -> None:
    def compute() -> RowMasks:
        raise ArithmeticError("no masks")

    failing = RowMasks.deferred(compute, 3)
    queries = [plain(0, np.arange(SIZE) < 9), plain(1, failing), plain(2, np.arange(SIZE) < 5)]
    together = results(Joint(SIZE), queries)
    assert not joined_sizes
    assert [sorted(together[i].errors) for i in range(3)] == [[], [0, 1, 2], []]
    assert "no masks" in str(together[1].errors[0])
    for query in (queries[0], queries[2]):
        alone = results(Joint(SIZE), [query])[query.query_id]
        for column, expected in zip(
            together[query.query_id].columns, alone.columns, strict=True
        ):
            assert torch.equal(column, expected)


def test_a_row_that_is_no_distribution_fails_its_sequence_alone(
    joined_sizes: list[int],
) -> None:
    engine = Joint(SIZE)
    engine.invalid = [(1, 2)]
    queries = [plain(i) for i in range(3)]
    together = results(engine, queries)
    assert joined_sizes == [3]
    assert [sorted(together[i].errors) for i in range(3)] == [[], [2], []]
    for query in queries:
        alone = results(Joint(SIZE), [query])[query.query_id]
        for column, expected in zip(
            together[query.query_id].columns, alone.columns, strict=True
        ):
            torch.testing.assert_close(column[:2], expected[:2], atol=1e-6, rtol=0)


def test_groups_without_a_row_that_is_a_distribution_fail_all_their_sequences(
    joined_sizes: list[int],
) -> None:
    engine = Joint(SIZE)
    engine.invalid = [(i, place) for i in range(2) for place in range(3)]
    together = results(engine, [plain(i) for i in range(2)])
    assert joined_sizes == [2]
    for i in range(2):
        assert together[i].columns == ()
        assert sorted(together[i].errors) == [0, 1, 2]


def test_a_pass_that_raises_or_returns_another_form_is_repeated_for_each_group() -> None:
    class Raising(Joint):
        def evaluate_groups(self, parts: Sequence[tuple[GroupQuery, Any]]) -> GroupValues:
            if len(parts) > 1:
                raise MemoryError(len(parts))
            return super().evaluate_groups(parts)

    class Short(Joint):
        def evaluate_groups(self, parts: Sequence[tuple[GroupQuery, Any]]) -> GroupValues:
            values = super().evaluate_groups(parts).values
            return GroupValues(values[: 8 if len(parts) > 1 else 3], are_logits=True)

    queries = [plain(i) for i in range(3)]
    expected = results(Joint(SIZE), queries)
    for kind in (Raising, Short):
        found = results(kind(SIZE), queries)
        for query_id, result in expected.items():
            for column, other in zip(result.columns, found[query_id].columns, strict=True):
                assert torch.equal(column, other)
