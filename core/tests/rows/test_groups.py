"""Populations on `BatchEngine`, which computes them part by part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine, oracle_row

import genlm
from genlm.core.rows import groups
from genlm.core.rows.group_reductions import DrawColumns, Rows
from genlm.core.rows.logits import rows_from_logits
from genlm.core.rows.outputs import reduce_logits
from genlm.core.rows.row_masks import RowMasks
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.truncation import Truncation
from genlm.plugin import Generation, GroupQuery, GroupValues, Lineage, Query, TokenSequence
from genlm.prefix import PieceScores

SIZE = 16
PROMPTS = [(index, 1) for index in range(7)]


class Parts(ScriptedEngine):
    """Computes three sequences of a population at once."""

    smallest_group = 2

    def group_limit(self, group: genlm.GroupQuery) -> int:
        return 3


def rows(prompts: Any) -> torch.Tensor:
    return torch.stack([oracle_row(ids, None, SIZE) for ids in prompts])


def test_a_population_is_computed_in_parts_of_the_engines_limit(make_model):
    engine = Parts(SIZE)
    population = make_model(engine).population([*PROMPTS, *PROMPTS[::-1]])
    computed = population.next_token_logprobs_sync()
    assert [len(batch) for batch in engine.batches] == [3, 3, 1]
    assert torch.equal(computed, rows([*PROMPTS, *PROMPTS[::-1]]))
    drawn = population.draw_sync(seed=1)
    whole = make_model(ScriptedEngine(SIZE)).population([*PROMPTS, *PROMPTS[::-1]])
    for one, another in zip(drawn, whole.draw_sync(seed=1), strict=True):
        assert torch.equal(one, another)


@pytest.mark.parametrize(
    ("values", "description"),
    [
        (lambda rows: rows, "Tensor; expected GroupValues"),
        (lambda rows: GroupValues(rows[1:], are_logits=True), r"logits of shape \(0, 16\)"),
        (lambda rows: GroupValues(rows[:, 1:], are_logits=False), r"rows of shape \(1, 15\)"),
        (
            lambda rows: GroupValues(rows[None], are_logits=True),
            r"logits of shape \(1, 1, 16\)",
        ),
        (
            lambda rows: GroupValues(rows.double(), are_logits=False),
            "rows of shape .*float64, for 1 sequences",
        ),
    ],
)
def test_values_of_another_form_are_an_error_that_says_so(make_model, values, description):
    class Wrong(ScriptedEngine):
        smallest_group = 2

        def evaluate_groups(self, parts):
            return values(super().evaluate_groups(parts).values)

    population = make_model(Wrong(SIZE)).population([*PROMPTS, (9, 1)])
    with pytest.raises(genlm.PopulationError, match=f"evaluate_groups returned {description}"):
        population.draw_sync(seed=1)


@pytest.mark.parametrize("limit", [5, 100])
def test_populations_that_are_pending_together_are_one_batch(make_model, limit):
    class Limited(ScriptedEngine):
        smallest_group = 2

        def group_limit(self, group: genlm.GroupQuery) -> int:
            return limit

    engine = Limited(SIZE)
    llm = make_model(engine)
    llm.load_lora("path", "adapter")
    prompts = [[(1, 2), (1, 3)], [(1, 3), (4, 5), (1, 3)], [(6, 7), (6, 8)]]
    populations = [llm.population(each) for each in prompts]
    populations.append(llm.population(prompts[0], lora_name="adapter"))

    async def together() -> list[torch.Tensor]:
        return await asyncio.gather(*(each.next_token_logprobs() for each in populations))

    computed = asyncio.run(together())
    for found, each in zip(computed, prompts, strict=False):
        assert torch.equal(found, rows(each))
    adapted = [oracle_row(ids, "adapter", SIZE) for ids in prompts[0]]
    assert torch.equal(computed[3], torch.stack(adapted))
    first, *others = engine.batches
    assert first == [(1, 2), (1, 3), (4, 5), *([(6, 7), (6, 8)] if limit > 5 else [])]
    assert others == [*([[(6, 7), (6, 8)]] if limit == 5 else []), [(1, 2), (1, 3)]]


def test_rows_are_reduced_a_few_at_a_time(make_model, monkeypatch):
    monkeypatch.setattr("genlm.core.rows.logits._VALUES_ON_CPU", 2 * SIZE)
    members = [PROMPTS[place] for place in (6, 0, 3, 3, 5, 1, 0, 2)]
    computed = make_model(ScriptedEngine(SIZE)).population(members).next_token_logprobs_sync()
    assert torch.equal(computed, rows(members))


def test_equal_members_with_masks_in_any_order_are_drawn_in_parts(make_model, monkeypatch):
    """More distinct masks than rows of a part; each member is drawn as it is alone."""
    llm = make_model(Parts(SIZE))
    masks = np.random.default_rng(0).random((9, SIZE)) < 0.5
    index = np.random.default_rng(1).permutation(np.arange(40) % 9)
    population = llm.population([3], 40)
    expected = population.draw_sync(masks, mask_index=index, seed=1)
    monkeypatch.setattr("genlm.core.rows.logits._VALUES_ON_CPU", 2 * SIZE)
    tokens = population.draw_sync(masks, mask_index=index, seed=1)
    assert masks[index, tokens.token_ids].all()
    for one, other in zip(tokens, expected, strict=True):
        assert torch.equal(one, other)


def test_a_single_request_is_evaluated_between_two_parts(make_model):
    engine = Parts(SIZE)
    llm = make_model(engine)
    population = llm.population(PROMPTS)
    single = (9, 9)

    async def both() -> torch.Tensor:
        engine.hold()
        try:
            group = asyncio.ensure_future(population.next_token_logprobs())
            while not engine.batches:
                await asyncio.sleep(0)
            one = asyncio.ensure_future(llm.next_token_logprobs(single))
            while not llm.statistics().pending:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        finally:
            engine.release()
        await one
        return await group

    assert torch.equal(asyncio.run(both()), rows(PROMPTS))
    assert [single] in engine.batches[1:3]
    assert len(engine.batches) == 4


def test_a_population_that_is_cancelled_after_a_part_computes_no_other(make_model):
    engine = Parts(SIZE)
    llm = make_model(engine)
    population = llm.population(PROMPTS)

    async def cancelled() -> None:
        engine.hold()
        try:
            group = asyncio.ensure_future(population.next_token_logprobs())
            while not engine.batches:
                await asyncio.sleep(0)
            group.cancel()
            await asyncio.sleep(0)
        finally:
            engine.release()
        await llm.next_token_logprobs((9, 9))
        assert group.cancelled()

    asyncio.run(cancelled())
    assert [list(batch) for batch in engine.batches] == [PROMPTS[:3], [(9, 9)]]
    assert llm.statistics().pending == 0
    assert torch.equal(population.next_token_logprobs_sync(), rows(PROMPTS))


def test_a_sequence_that_raises_fails_its_members_alone(make_model):
    engine = Parts(SIZE, poison=[4])
    population = make_model(engine).population([*PROMPTS, PROMPTS[4]])
    with pytest.raises(genlm.PopulationError) as caught:
        population.next_token_logprobs_sync()
    assert caught.value.members == (4, 7)
    assert caught.value.size == 8
    assert "poisoned sequence (4, 1)" in str(caught.value)
    engine.poison.clear()
    assert torch.equal(population.next_token_logprobs_sync(), rows([*PROMPTS, PROMPTS[4]]))


def failing(message: Callable[[], str]) -> Callable[[], None]:
    def fail() -> None:
        raise ArithmeticError(message())

    return fail


def test_an_engine_that_always_raises_is_called_a_few_times(make_model):
    engine = ScriptedEngine(SIZE)
    engine.during_evaluate = failing(lambda: "the same")
    prompts = [(index, other) for index in range(SIZE) for other in range(SIZE)]
    population = make_model(engine).population(prompts)
    with pytest.raises(genlm.PopulationError, match="the same") as caught:
        population.draw_sync(seed=0)
    assert caught.value.members == tuple(range(256))
    assert len(engine.batches) == 7


def test_rows_may_come_in_any_order_and_in_any_parts():
    members = np.array([6, 0, 3, 3, 5, 1, 0, 2, 4])
    lineage = Lineage.of_sequences([TokenSequence.of(prompt) for prompt in PROMPTS])
    query = GroupQuery(0, Generation(lineage), np.arange(7), members, Rows())
    work = groups.GroupWork(query, ScriptedEngine(SIZE).vocabulary)
    for part in ([6, 2, 0], [1], [5, 3, 4]):
        part_rows = rows([PROMPTS[place] for place in part])
        work.reduce(np.array(part), GroupValues(part_rows, are_logits=False))
    [column] = work.result().columns
    assert torch.equal(column, rows([PROMPTS[place] for place in members]))


class Ids(SimpleNamespace):
    """The size of a vocabulary and its missing ids."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def ids(size: int, *missing_ids: int) -> Any:
    return Ids(size=size, missing_ids=missing_ids)


def drawn(
    values: torch.Tensor,
    row_of: Any,
    vocabulary: Any,
    *,
    are_logits: bool,
    masks: Any = None,
    mask_index: Any = None,
    draws: int | None = None,
    **options: Any,
) -> Any:
    """The result of one draw for each member, or of several without replacement."""
    wanted, count = np.arange(len(values)), len(row_of)
    uniforms = np.random.default_rng(0).random((count, draws) if draws else count)
    if mask_index is not None:
        masks = RowMasks(masks, count, vocabulary.size, mask_index)
    weights = RowWeights((count, vocabulary.size), masks, **options)
    reduction = DrawColumns(weights, uniforms)
    generation = Generation(Lineage.of_sequences([]))
    work = groups.GroupWork(GroupQuery(0, generation, wanted, row_of, reduction), vocabulary)
    work.reduce(wanted, GroupValues(values, are_logits=are_logits))
    return work.result()


@pytest.mark.parametrize("size", [300, 1100])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": np.arange(-60.0, 60.0)}, {"temperature": 0.5}, {"truncation": Truncation(3)}],
)
def test_draws_from_logits_are_those_from_rows(size: int, options: dict[str, Any]) -> None:
    vocabulary = ids(size, 0, 7)
    logits = 5 * torch.randn(40, size + 20, generator=torch.Generator().manual_seed(1))
    row_of = np.random.default_rng(1).permutation(np.arange(120) % 40)
    from_logits = drawn(logits, row_of, vocabulary, are_logits=True, **options)
    rows = rows_from_logits(logits, vocabulary)
    expected = drawn(rows, row_of, vocabulary, are_logits=False, **options)
    for one, other in zip(from_logits.columns, expected.columns, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("size", [300, 1100])
@pytest.mark.parametrize("masks_of", ["rows", "members"])
def test_masked_draws_from_logits_are_those_from_rows(size: int, masks_of: str) -> None:
    vocabulary = ids(size, 0, 7)
    logits = 5 * torch.randn(40, size + 20, generator=torch.Generator().manual_seed(1))
    rng = np.random.default_rng(1)
    row_of = rng.permutation(np.arange(120) % 40)
    masks: list[Any] = list(rng.random((9, size)) < 0.3)
    masks[4] = None
    index = row_of % 9 if masks_of == "rows" else rng.integers(0, 9, 120)
    rows = rows_from_logits(logits, vocabulary)
    results = [
        drawn(
            values,
            row_of,
            vocabulary,
            are_logits=are_logits,
            masks=[masks[i] for i in index],
        )
        for values, are_logits in ((logits, True), (rows, False))
    ]
    for one, other in zip(*(result.columns for result in results), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    log_mass = results[0].columns[2]
    assert (log_mass[index == 4] == 0).all()
    assert (log_mass[index != 4] < 0).all()


@pytest.mark.parametrize("size", [300, 1100])
@pytest.mark.parametrize("is_masked", [False, True])
def test_draws_without_replacement_from_logits_are_those_from_rows(
    size: int, is_masked: bool, monkeypatch
) -> None:
    """Also where the tokens of a mask, or those that are not unlikely, are fewer than draws."""
    vocabulary, row_of = ids(size, 0, 7), np.arange(40)
    logits = 5 * torch.randn(40, size + 20, generator=torch.Generator().manual_seed(1))
    logits[3, 5] += 150.0
    masks: list[Any] = [None] * 40
    if is_masked:
        masks[1:] = np.random.default_rng(1).random((39, size)) < 0.3
        masks[3][5] = True
        masks[8] = np.arange(size) < 4  # three tokens
    options: dict[str, Any] = {"masks": masks if is_masked else None, "draws": 5}
    rows = rows_from_logits(logits, vocabulary)
    expected = drawn(rows, row_of, vocabulary, are_logits=False, **options)
    monkeypatch.delattr(DrawColumns, "compute")
    found = drawn(logits, row_of, vocabulary, are_logits=True, **options)
    for one, other in zip(found.columns, expected.columns, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    token_ids = found.columns[0]
    assert (token_ids[8] < 0).sum() == (2 if is_masked else 0)
    assert (token_ids >= 0).sum() == token_ids.numel() - 2 * is_masked
    assert all(len(set(row)) == 5 for row in token_ids[[*range(8), *range(9, 40)]].tolist())


@pytest.mark.parametrize("draws", [None, 3])
def test_several_draws_of_a_row_that_is_no_distribution_fail(draws: int | None) -> None:
    logits = torch.randn(4, SIZE)
    logits[2, 5] = torch.nan
    result = drawn(logits, np.arange(4), ids(SIZE), are_logits=True, draws=draws)
    assert sorted(result.errors) == [2]


def test_rows_are_not_normalised_for_draws_under_masks(monkeypatch) -> None:
    monkeypatch.delattr(DrawColumns, "compute")
    logits = torch.randn(4, SIZE)
    masks = np.random.default_rng(0).random((2, SIZE)) < 0.5
    row_of, index = np.array([0, 1, 2, 3, 3]), np.array([0, 1, 0, 1, 1])
    result = drawn(logits, row_of, ids(SIZE), are_logits=True, masks=masks, mask_index=index)
    assert masks[index, result.columns[0]].all()


@pytest.mark.parametrize("kind", ["empty", "unlikely", "no distribution"])
def test_a_mask_without_probability_is_drawn_from_rows(kind: str) -> None:
    logits, masks = torch.randn(4, SIZE), np.ones((4, SIZE), bool)
    masks[:, 0] = False
    masks[2] = False
    if kind == "unlikely":
        masks[2, [3, 5]] = True
        logits[2, [3, 5]] = torch.tensor([-110.0, -111.0])
    elif kind == "no distribution":
        masks[2, 3] = True
        logits[2, 4] = torch.nan
    vocabulary, rows = ids(SIZE), torch.log_softmax(logits, -1)
    found = drawn(logits, np.arange(4), vocabulary, are_logits=True, masks=masks)
    expected = drawn(rows, np.arange(4), vocabulary, are_logits=False, masks=masks)
    assert sorted(found.errors) == sorted(expected.errors) == [2] * (kind == "no distribution")
    valid = [place for place in range(4) if place not in found.errors]
    for one, other in zip(found.columns, expected.columns, strict=True):
        assert torch.allclose(one[valid], other[valid], atol=1e-5)
    if kind == "unlikely":
        exact = rows[2].double()[[3, 5]].logsumexp(0)
        assert found.columns[2][2].item() == pytest.approx(exact.item(), abs=1e-4)
        assert found.columns[0][2].item() in {3, 5}


def test_a_row_that_is_no_distribution_fails_alone_beside_draws_from_logits() -> None:
    vocabulary = ids(SIZE)
    logits = torch.randn(4, SIZE)
    expected = drawn(logits, np.arange(4), vocabulary, are_logits=True)
    logits[1, 3], logits[2, 5] = torch.nan, torch.inf
    from_logits = drawn(logits, np.arange(4), vocabulary, are_logits=True)
    assert sorted(from_logits.errors) == [1, 2]
    for one, other in zip(from_logits.columns, expected.columns, strict=True):
        assert torch.allclose(one[[0, 3]], other[[0, 3]], atol=1e-6)


def test_a_reduction_gets_logits_of_all_ids_or_rows() -> None:
    widths = []

    class Recorded(Rows):
        def compute_from_logits(self, logits: torch.Tensor, row_of: Any, members: Any) -> Any:
            widths.append(logits.shape[1])

    numbers = np.arange(3)
    for width in (SIZE - 2, SIZE, SIZE + 5):
        query = GroupQuery(
            0, Generation(Lineage.of_sequences([])), numbers, numbers, Recorded()
        )
        work = groups.GroupWork(query, ids(SIZE))
        work.reduce(numbers, GroupValues(torch.randn(3, width), are_logits=True))
        assert work.result().columns[0].shape == (3, SIZE)
    assert widths == [SIZE, SIZE]


class Views(genlm.GroupReduction):
    """Returns views of the rows."""

    def compute(self, rows, row_of, members):
        return rows[:, 0], rows[:, 1:3]


def test_results_of_engines_in_inference_mode_are_normal_tensors():
    vocabulary, numbers = ids(SIZE), np.arange(3)
    group = GroupQuery(0, Generation(Lineage.of_sequences([])), numbers, numbers, Rows())
    texts = [
        Query(1, [1, 2], targets=(2, 3)),
        Query(2, [1, 2], targets=(2, 3), outputs=(Rows(),)),
    ]
    with torch.inference_mode():
        logits = torch.randn(3, SIZE)
        work, scores = groups.GroupWork(group, vocabulary), PieceScores(texts, vocabulary)
        work.reduce(numbers, GroupValues(logits, are_logits=True))
        scores.add(np.arange(4), torch.randn(4, SIZE))
        [row] = reduce_logits(logits[:1], vocabulary, [(None,)])
        token_scores, reduced = scores.results()
        tensors = [*work.result().columns, *row.values, *token_scores, *reduced.values[0]]
    assert not any(tensor.is_inference() for tensor in tensors)


def test_columns_outlive_the_memory_of_their_rows():
    vocabulary = ids(SIZE)
    numbers, generation = np.arange(3), Generation(Lineage.of_sequences([]))
    expected, results = [], []
    for seed in range(2):
        logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed))
        work = groups.GroupWork(
            GroupQuery(seed, generation, numbers, numbers, Views()), vocabulary
        )
        work.reduce(numbers, GroupValues(logits, are_logits=True))
        results.append(work.result().columns)
        expected.append(logits.log_softmax(-1))
    for columns, rows in zip(results, expected, strict=True):
        assert torch.equal(columns[0], rows[:, 0])
        assert torch.equal(columns[1], rows[:, 1:3])
