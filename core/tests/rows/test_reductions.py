"""Reductions of rows against float64, row by row."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from allocations import Allocations
from hypothesis import given
from hypothesis import strategies as st

from genlm import EvaluationError, Mask, Reduction
from genlm.core.queries.query import Reduced
from genlm.core.rows import logits as rows_module
from genlm.core.rows import outputs
from genlm.core.rows.draws import batch_draw
from genlm.core.rows.logits import rows_from_logits
from genlm.core.rows.outputs import reduce_logits, reduce_rows
from genlm.core.rows.reductions import (
    Draw,
    DrawnToken,
    LogMass,
    TokenLogprobs,
    TopK,
)
from genlm.core.rows.row_functions import ReductionOfFunction
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.truncation import Truncation
from genlm.core.vocab import Token, Vocabulary

INF = math.inf
SIZE = 1300
"""More than two blocks of the inversion, and no multiple of one."""


def some_rows(count: int, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(3 * torch.randn(count, size, generator=generator), -1)


def reduced(rows: torch.Tensor | list[torch.Tensor], *wanted: Reduction | None) -> list[Any]:
    """One output for each row."""
    results = reduce_rows(rows, [(output,) for output in wanted])
    values = []
    for result in results:
        assert isinstance(result, Reduced)
        values.append(result.values[0])
    return values


# -- values ---------------------------------------------------------------------------


def test_log_probabilities_of_tokens_are_gathered_in_their_order() -> None:
    rows = some_rows(3)
    wanted = [(5, 3, 5), (), (SIZE - 1,)]
    results = reduced(rows, *map(TokenLogprobs, wanted))
    for row, ids, values in zip(rows, wanted, results, strict=True):
        assert values.tolist() == row[list(ids)].tolist()
    results[0].zero_()  # shares memory with no other result
    assert results[2].tolist() == rows[2, -1:].tolist()


@given(st.lists(st.integers(0, 3), min_size=4, max_size=12), st.integers(1, 4))
def test_top_k_breaks_ties_by_the_lowest_id(levels: list[int], k: int) -> None:
    row = torch.log_softmax(torch.tensor(levels, dtype=torch.float32), -1)
    (top,) = reduced(row[None], TopK(k))
    expected = sorted(range(len(levels)), key=lambda i: (-levels[i], i))[:k]
    assert top.token_ids.tolist() == expected
    assert top.logprobs.tolist() == row[expected].tolist()


def test_top_k_of_different_sizes_are_computed_together() -> None:
    rows, sizes = some_rows(4), [1, 40, 3, SIZE]
    tops = reduced(rows, *map(TopK, sizes))
    for row, k, top in zip(rows, sizes, tops, strict=True):
        assert torch.equal(top.token_ids, row.argsort(descending=True, stable=True)[:k])
        assert torch.equal(top.logprobs, row[top.token_ids])


def test_log_masses_equal_logsumexp_in_float64() -> None:
    rows = some_rows(4)
    generator = np.random.default_rng(1)
    masks = [Mask(generator.random(SIZE) < share, SIZE) for share in (0.001, 0.1, 0.9, 0)]
    masses = reduced(rows, *map(LogMass, masks))
    for row, mask, mass in zip(rows, masks, masses, strict=True):
        expected = row.double()[list(mask)].logsumexp(-1) if mask else torch.tensor(-INF)
        assert mass == pytest.approx(float(expected), abs=1e-5)


# -- draws ----------------------------------------------------------------------------


def inverted(weights: np.ndarray[Any, Any], uniform: float) -> int:
    """The definition: the first id with a larger cumulative weight than the threshold."""
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], "right"))


def weights_of(row: torch.Tensor, draw: Draw) -> np.ndarray[Any, Any]:
    """The weights from which a draw is made, token by token in float64."""
    logits = row.double().numpy().copy()
    if draw.mask is not None:
        logits[[i for i in range(len(logits)) if i not in draw.mask]] = -INF
    weights = np.exp((logits - logits.max()) / draw.temperature)
    order = np.argsort(-weights, kind="stable")
    top_k, top_p, min_p = draw.truncation
    remaining = order[:top_k]
    if top_p < 1:
        share = np.cumsum(weights[remaining]) / weights[remaining].sum()
        remaining = remaining[
            : int(np.sum(share - weights[remaining] / weights[remaining].sum() < top_p))
        ]
    remaining = remaining[weights[remaining] >= min_p * weights.max()]
    limited = np.zeros_like(weights)
    limited[remaining] = weights[remaining]
    return limited


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "limits", [(None, None, None), (5, None, None), (None, 0.6, 0.01), (20, 0.5, None)]
)
def test_draws_invert_the_limited_distribution(
    temperature: float, masked: bool, limits: tuple[float | None, ...]
) -> None:
    generator = np.random.default_rng(3)
    rows = some_rows(40, seed=2)
    mask = Mask(generator.random(SIZE) < 0.3, SIZE) if masked else None
    truncation = Truncation.checked(SIZE, *limits)
    wanted = [Draw(float(generator.random()), temperature, mask, truncation) for _ in range(40)]
    draws = reduced(rows, *wanted)
    for row, draw, drawn in zip(rows, wanted, draws, strict=True):
        weights = weights_of(row, draw)
        expected = inverted(weights, draw.uniform)
        share = np.cumsum(weights)[min(expected, drawn.token_id)] / weights.sum()
        # float32 weights move the boundary between two ids by as little as this.
        assert drawn.token_id == expected or abs(share - draw.uniform) < 1e-6
        probability = weights[drawn.token_id] / weights.sum()
        assert drawn.draw_logprob == pytest.approx(math.log(probability), abs=1e-5)
        assert drawn.logprob == pytest.approx(float(row[drawn.token_id]), abs=1e-6)
        mass = 0.0 if mask is None else float(row.double()[list(mask)].logsumexp(-1))
        assert drawn.log_mass == pytest.approx(mass, abs=1e-5)


def test_frequencies_of_draws_are_the_probabilities() -> None:
    row = some_rows(1, size=700)[0]
    count = 20_000
    uniforms = (np.arange(count) + 0.5) / count
    rows = row.expand(count, -1)
    ids = batch_draw(rows, torch.from_numpy(uniforms), RowWeights(rows.shape)).token_ids
    frequencies = torch.bincount(ids, minlength=700).double() / count
    assert (frequencies - row.double().exp()).abs().max() < 1.5 / count


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_no_id_without_weight_is_drawn(uniform: float) -> None:
    row = torch.full((SIZE,), -INF)
    row[[600, 1200]] = math.log(0.5)
    numbers = torch.tensor([uniform], dtype=torch.float64)
    ids = batch_draw(row[None], numbers, RowWeights((1, SIZE))).token_ids.tolist()
    assert ids == [600 if uniform < 0.5 else 1200]


def test_the_same_draws_in_any_batch() -> None:
    rows = some_rows(30)
    masks = [None, Mask(range(0, SIZE, 3), SIZE), Mask([5], SIZE)]
    wanted = [
        Draw(i / 30, temperature, mask, Truncation.checked(SIZE, top_k, top_p, None))
        for i, (temperature, mask, top_k, top_p) in zip(
            range(30),
            itertools.cycle(itertools.product([1.0, 0.0, 0.3], masks, [None, 4], [None, 0.8])),
            strict=False,
        )
    ]
    together = reduced(rows, *wanted)
    alone = [reduced(row[None], draw)[0] for row, draw in zip(rows, wanted, strict=True)]
    assert together == alone


def test_a_draw_from_nothing_is_no_token_and_fails_no_other_request() -> None:
    rows = some_rows(4)
    rows[0, 3] = -INF
    rows[1, :] = -INF
    rows[1, 7] = 0.0
    wanted = [
        Draw(0.5, mask=Mask([3], SIZE)),
        Draw(0.5, temperature=0.0, mask=Mask([3, 4], SIZE)),
        Draw(0.5, mask=Mask([], SIZE), truncation=Truncation(3)),
        Draw(0.5),
    ]
    draws = reduced(rows, *wanted)
    assert draws[:3] == [(-1, -INF, -INF, 0)] * 3
    assert all(type(draw.token_id) is int for draw in draws)
    assert draws[3] == reduced(rows[3:], Draw(0.5))[0]
    masses = reduced(rows, *(LogMass(draw.mask) for draw in wanted[:3]), None)[:3]
    assert masses == [-INF] * 3


# -- batches --------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum(Reduction):
    """The sum of the probabilities, wrong for some requests on purpose."""

    problem: str = ""

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Sum]) -> Sequence[float]:
        if any(request.problem == "raises" for request in requests):
            raise ArithmeticError("no sum today")
        if any(request.problem == "exits" for request in requests):
            raise SystemExit("no program")
        if any(request.problem == "Ctrl-C" for request in requests):
            raise KeyboardInterrupt
        sums: list[float] = rows.exp().sum(-1).tolist()
        return sums[1:] if any(request.problem == "too few" for request in requests) else sums


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("raises", "Sum.compute raised ArithmeticError: no sum"),
        ("exits", "Sum.compute raised SystemExit: no program"),
        ("too few", "0 results for 1"),
    ],
)
def test_a_reduction_that_fails_does_so_alone(problem: str, message: str) -> None:
    rows = some_rows(4)
    results = reduced(rows, Sum(), Sum(problem), None, Sum())
    assert isinstance(results[1], EvaluationError)
    assert message in str(results[1])
    assert [results[0], results[3]] == pytest.approx([1.0, 1.0])
    assert torch.equal(results[2], rows[2])


def test_ctrl_c_during_a_reduction_is_raised_on_the_main_thread_only() -> None:
    rows = some_rows(2)
    with pytest.raises(KeyboardInterrupt):
        reduced(rows, Sum(), Sum("Ctrl-C"))
    with ThreadPoolExecutor(1) as executor:
        results = executor.submit(reduced, rows, Sum(), Sum("Ctrl-C")).result()
    assert results[0] == pytest.approx(1.0)
    assert "raised KeyboardInterrupt" in str(results[1])


@dataclass(frozen=True)
class Views(Reduction):
    """Whatever `view` makes of the rows, whose results may share memory."""

    view: Any

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Views]) -> Sequence[Any]:
        return requests[0].view(rows)  # type: ignore[no-any-return]


class Pair(NamedTuple):
    """A result with a tensor and a number."""

    row: torch.Tensor
    number: float


def itself(value: Any) -> Any:
    return value


VIEWS: dict[str, tuple[Any, Any]] = {
    "rows": (list, itself),
    "slices": (lambda rows: [row[::2] for row in rows], itself),
    "of another tensor": (lambda rows: (rows + 0.0).unbind(), itself),
    "one tensor": (lambda rows: rows + 0.0, itself),
    "of one row": (lambda rows: [rows.flatten()] * len(rows), itself),
    "named": (lambda rows: [Pair(row, 1.0) for row in rows], lambda value: value.row),
    "nested": (lambda rows: [{"a": [1, (r,)]} for r in rows], lambda value: value["a"][1][0]),
    "arrays": (lambda rows: list(rows.numpy()), torch.from_numpy),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", VIEWS)
def test_results_that_are_views_are_copied(name: str, count: int) -> None:
    view, tensor_of = VIEWS[name]
    rows, wanted = some_rows(count), Views(view)
    expected = [tensor_of(value).clone() for value in view(rows)]
    before = rows.clone()
    values = reduced(rows, *[wanted] * count)
    tensors = [tensor_of(value) for value in values]
    assert [type(value) for value in values] == [type(value) for value in view(rows)]
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, expected[index])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.zero_()
    assert torch.equal(rows, before)


def test_results_that_own_their_memory_are_not_copied() -> None:
    values = [torch.zeros(2), (1.0, torch.zeros(3)), np.zeros(3), [], None, "text"]
    results = reduced(some_rows(6), *[Views(lambda _: values)] * 6)
    assert all(here is there for here, there in zip(results, values, strict=True))


def test_rows_that_are_no_distributions_are_errors() -> None:
    rows = some_rows(3)
    rows[1, 4] = math.nan
    computed: list[list[float]] = []

    def largest(valid: torch.Tensor) -> list[float]:
        computed.append(valid.amax(1).tolist())
        return computed[-1]

    first, second, third = reduce_rows(
        rows, [(Views(largest),), (Views(largest), None), (Views(largest), None)]
    )
    assert computed == [rows[[0, 2]].amax(1).tolist()]
    assert isinstance(first, Reduced)
    assert isinstance(second, EvaluationError)
    assert isinstance(third, Reduced)
    for outputs_of_row in [(None,), (Views(largest), None)]:
        [alone] = reduce_rows(rows[1:2], [outputs_of_row])
        assert isinstance(alone, EvaluationError)


def test_several_outputs_of_one_row_come_in_their_order() -> None:
    rows = some_rows(2)
    before = rows.clone()
    wanted = (TopK(2), None, Draw(0.3), TopK(1), Sum())
    (result, other) = reduce_rows(rows, [wanted, (Sum(),)])
    assert isinstance(result, Reduced)
    assert isinstance(other, Reduced)
    top, row, drawn, best, total = result.values
    assert torch.equal(row, rows[0])
    assert row.data_ptr() != rows.data_ptr()
    assert top.token_ids[0] == best.token_ids[0] == rows[0].argmax()
    assert drawn == reduced(rows[:1], Draw(0.3))[0]
    assert total == pytest.approx(1.0)
    assert torch.equal(rows, before)


def test_large_batches_are_reduced_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(10)
    whole = reduced(rows, *(Draw(i / 10) for i in range(10)))
    monkeypatch.setattr(rows_module, "_VALUES_ON_CPU", 3 * SIZE)
    sizes: list[int] = []
    compute_draws = Draw.compute.__func__  # type: ignore[attr-defined]

    def compute(cls: type[Draw], part: torch.Tensor, requests: Sequence[Draw]) -> Any:
        sizes.append(len(part))
        return compute_draws(cls, part, requests)

    monkeypatch.setattr(Draw, "compute", classmethod(compute))
    assert reduced(rows, *(Draw(i / 10) for i in range(10))) == whole
    assert sizes == [3, 3, 3, 1]
    with Allocations() as made:
        assert reduced([*rows], *(Draw(i / 10) for i in range(10))) == whole
    assert made.largest <= 3 * rows[0].nbytes


def test_no_tensors_are_kept_between_the_parts_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    living: list[int] = []

    def largest(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        living.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
        values, ids = rows.topk(2)
        conjugated = torch.complex(values, values).conj()
        return values.bfloat16(), ids[:, 0], values > -1, conjugated, conjugated.imag

    rows = some_rows(10)
    wanted = [(TopK(3), ReductionOfFunction(largest))] * 10
    whole = reduce_rows(rows, wanted)
    gc.collect()
    living.clear()
    monkeypatch.setattr(rows_module, "_VALUES_ON_CPU", 3 * SIZE)
    for found, expected in zip(reduce_rows(rows, wanted), whole, strict=True):
        for pair in zip(found.values, expected.values, strict=True):  # type: ignore[union-attr]
            assert type(pair[0]) is type(pair[1])
            for result, right in zip(*pair, strict=True):
                assert result.dtype == right.dtype
                assert torch.equal(result, right)
                assert result.untyped_storage().nbytes() == right.nbytes
                result.zero_()
    assert living[0] == living[1] == living[2]  # the last part has fewer rows


def test_results_of_any_kind_are_those_of_a_batch_in_one_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, scale = some_rows(10), torch.ones(SIZE, requires_grad=True)
    wanted = Views(lambda part: list(zip(part.numpy()[:, :3], part @ scale, strict=True)))
    whole = reduced(rows, *[wanted] * 10)
    monkeypatch.setattr(rows_module, "_VALUES_ON_CPU", 3 * SIZE)
    in_parts = reduced(rows, *[wanted] * 10)
    for (array, total), (expected_array, expected) in zip(in_parts, whole, strict=True):
        assert np.array_equal(array, expected_array)
        assert total.item() == pytest.approx(expected.item())
    torch.stack([total for _, total in in_parts]).sum().backward()
    assert scale.grad is not None
    assert torch.allclose(scale.grad, rows.sum(0), atol=1e-4)


@pytest.mark.parametrize("masks", [1, 10])
def test_weights_are_computed_in_parts_with_the_mask_of_each_row(
    masks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_rows(10)
    all_masks = [Mask(range(i, SIZE, 3), SIZE) for i in range(masks)]
    wanted = [Draw(i / 10, 0.5 + i / 10, all_masks[i % masks]) for i in range(10)]
    whole = reduced(rows, *wanted)
    monkeypatch.setattr(rows_module, "_VALUES_ON_CPU", 3 * SIZE)
    assert reduced(rows, *wanted) == whole
    assert all(drawn.token_id in draw.mask for drawn, draw in zip(whole, wanted, strict=True))


@pytest.mark.parametrize("width", [150, 200, 256])
def test_draws_from_logits_depend_on_their_query_alone(width: int) -> None:
    tokens = [Token(i, bytes([i])) for i in range(200)]
    ids = Vocabulary(None, tokens, list(map(repr, tokens)))
    logits = 3 * torch.randn(9, width, generator=torch.Generator().manual_seed(2))
    logits[1, 3] = math.nan
    logits[2, 7] = -200.0
    unlikely = Mask([7], 200)  # its probability underflows, so it needs the row
    wanted: list[tuple[Any, ...]] = [
        (Draw(0.3),),
        (Draw(0.4),),
        (Draw(0.5, mask=unlikely),),
        (Draw(0.6, mask=Mask(range(50), 200)), None),
        (Draw(0.7, temperature=0.5), Draw(0.7)),
        (Draw(0.2, temperature=0.0),),
        (Draw(0.8, truncation=Truncation(3)), TopK(2), Draw(0.1)),
        (Draw(0.9, truncation=Truncation(top_p=0.4)),),
        (Draw(0.95), Draw(0.05)),
    ]
    assert [
        request.reads_logits for row in wanted for request in row if type(request) is Draw
    ] == [*(True, True, True, True, False, True, False, False, True, False, True, True)]
    together = reduce_logits(logits, ids, wanted)
    rows = reduce_rows(rows_from_logits(logits, ids), wanted)
    for i, (result, by_rows) in enumerate(zip(together, rows, strict=True)):
        [alone] = reduce_logits(logits[i : i + 1], ids, wanted[i : i + 1])
        if i == 1:
            assert isinstance(result, EvaluationError)
            assert isinstance(alone, EvaluationError)
            continue
        assert isinstance(result, Reduced)
        assert isinstance(alone, Reduced)
        assert isinstance(by_rows, Reduced)
        for here, there, expected in zip(
            result.values, alone.values, by_rows.values, strict=True
        ):
            if isinstance(here, DrawnToken):
                assert here == there
                assert here.token_id == expected.token_id
                assert here[1:] == pytest.approx(expected[1:], rel=1e-6, abs=2e-6)


class SumOfLogits(Reduction):
    """Raises for logits above 9, and needs rows if the largest logit is negative."""

    reads_logits = True

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Any]) -> Sequence[Any]:
        return ["row"] * len(requests)

    @classmethod
    def compute_from_logits(
        cls, logits: torch.Tensor, requests: Sequence[Any]
    ) -> Sequence[Any] | None:
        if (logits > 9).any():
            raise ArithmeticError
        return None if (logits.amax(1) < 0).any() else logits.sum(1).tolist()


def test_requests_that_cannot_be_computed_from_logits_are_computed_from_rows() -> None:
    tokens = [Token(i, bytes([i])) for i in range(3)]
    ids = Vocabulary(None, tokens, list(map(repr, tokens)))
    logits = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0], [-1.0, -2.0, -3.0], [0.0, 0, 0]])
    results = reduce_logits(logits, ids, [(SumOfLogits(),)] * 4)
    assert results == [Reduced((value,)) for value in (6.0, "row", "row", 0.0)]
    added = [*tokens, Token(3, b"of the tokenizer only")]
    wider = Vocabulary(None, added, list(map(repr, added)))
    assert reduce_logits(logits[:1], wider, [(SumOfLogits(),)]) == [Reduced(("row",))]


def test_logits_are_reduced_a_few_at_a_time_as_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = [Token(i, bytes([i])) for i in range(200)]
    ids = Vocabulary(None, tokens, list(map(repr, tokens)))
    logits = torch.randn(7, 256, generator=torch.Generator().manual_seed(1))
    logits[4, 9] = math.nan
    wanted = [(Draw(i / 7, mask=Mask(range(i, 200), 200)), TopK(3), None) for i in range(7)]
    expected = reduce_rows(rows_from_logits(logits, ids), wanted)
    monkeypatch.setattr(rows_module, "_VALUES_ON_CPU", 3 * 256)
    most: list[int] = []

    def rows_of(part: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        most.append(len(part))
        return rows_from_logits(part, *arguments, **options)

    monkeypatch.setattr(outputs, "rows_from_logits", rows_of)
    results = reduce_logits(logits, ids, wanted)
    assert most == [3, 3, 1]
    assert isinstance(results[4], EvaluationError)
    for here, there in zip(results[:4] + results[5:], expected[:4] + expected[5:], strict=True):
        assert isinstance(here, Reduced)
        assert isinstance(there, Reduced)
        assert here.values[0].token_id == there.values[0].token_id  # drawn without rows
        assert here.values[0][1:] == pytest.approx(there.values[0][1:], abs=2e-6)
        assert torch.equal(here.values[1].logprobs, there.values[1].logprobs)
        assert torch.equal(here.values[2], there.values[2])


@pytest.mark.parametrize("temperature", [1.0, 0.05, 200.0])
@pytest.mark.parametrize("depth", [30.0, 95.0, 300.0])
def test_masks_of_very_unlikely_tokens_are_drawn_from_exactly(
    temperature: float, depth: float
) -> None:
    row = some_rows(1)[0]
    row[0], mask = 0.0, Mask(range(1, SIZE), SIZE)
    row[1:] = torch.log_softmax(row[1:], -1) - depth  # all but the first have e**-depth
    logits = (row.double()[1:] / temperature).numpy()
    weights = np.exp(logits - logits.max())
    uniforms = [0.001, 0.3, 0.999]
    drawn = reduced(row.expand(3, -1), *(Draw(u, temperature, mask) for u in uniforms))
    for draw, uniform in zip(drawn, uniforms, strict=True):
        assert draw.token_id == 1 + inverted(weights, uniform)
        assert draw.log_mass == pytest.approx(-depth, abs=1e-3)
        probability = weights[draw.token_id - 1] / weights.sum()
        assert draw.draw_logprob == pytest.approx(math.log(probability), abs=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masks", ["none", "one", "each"])
def test_draws_on_a_device_are_those_of_the_host(masks: str) -> None:
    """But for uniform numbers within a rounding of the boundary between two ids."""
    rows, generator = some_rows(200, seed=4), np.random.default_rng(1)
    size = rows.shape[1]
    random_masks = [Mask(generator.random(size) < 0.6, size) for _ in range(len(rows))]
    row_masks = {
        "none": [None] * len(rows),
        "one": random_masks[:1] * len(rows),
        "each": random_masks,
    }[masks]
    requests = [(Draw(float(generator.random()), mask=mask),) for mask in row_masks]
    on_host = [reduced_row.values[0] for reduced_row in reduce_rows(rows, requests)]
    on_device = [reduced_row.values[0] for reduced_row in reduce_rows(rows.cuda(), requests)]
    for mask, here, there in zip(row_masks, on_host, on_device, strict=True):
        assert mask is None or there.token_id in mask
        assert there.log_mass == pytest.approx(here.log_mass, abs=1e-4)
    equal = sum(a.token_id == b.token_id for a, b in zip(on_host, on_device, strict=True))
    assert equal >= len(rows) - 2
