"""Draws, masses and normalisers by the Triton kernels against float64.

With `TRITON_INTERPRET=1` the kernels run on the CPU (`test_interpreter.py`).
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from genlm.core.queries.generations import Generation, Lineage
from genlm.core.queries.query import GroupQuery, GroupValues
from genlm.core.rows import device_rows, groups
from genlm.core.rows.device_rows import draw_on_device, has_kernels, log_sums_on_device
from genlm.core.rows.draws import DrawnTokens, batch_draw, batch_log_mass
from genlm.core.rows.group_reductions import DrawColumns, MassColumns
from genlm.core.rows.row_masks import RowMasks
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.truncation import Truncation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
INF = math.inf
COUNT, SIZE = 5, 1300
"""Rows of three blocks, the last of which is shorter."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(device_rows, "_can_run_kernels", lambda device: True)


def some_logits(seed: int = 0, count: int = COUNT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, SIZE, generator=generator)).to(DEVICE)


def random(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def check(
    drawn: DrawnTokens,
    logits: torch.Tensor,
    numbers: Array,
    *,
    allowed: Array | None = None,
    bias: Any = 0.0,
    temperatures: Any = 1.0,
) -> None:
    """Compare draws with the inversion of the cumulative weights in float64."""
    exact = logits.double().log_softmax(-1).cpu().numpy()
    scores = exact + bias
    if allowed is not None:
        scores = np.where(allowed, scores, -INF)
    for row, (token, logprob, mass, draw_logprob) in enumerate(
        zip(*(column.tolist() for column in drawn), strict=True)
    ):
        if not np.isfinite(scores[row]).any():
            assert (token, logprob, mass, draw_logprob) == (-1, -INF, -INF, 0)
            continue
        assert mass == pytest.approx(float(np.logaddexp.reduce(scores[row])), abs=2e-5)
        assert logprob == pytest.approx(exact[row, token], abs=1e-5)
        temperature = np.broadcast_to(temperatures, len(exact))[row]
        weights = np.exp((scores[row] - scores[row].max()) / temperature)
        cumulative = np.cumsum(weights) / weights.sum()
        expected = int(np.searchsorted(cumulative, numbers[row], "right"))
        # float32 weights move the boundary between two ids by as little as this.
        boundary = cumulative[min(token, expected)]
        assert token == expected or abs(boundary - numbers[row]) < 1e-6
        probability = math.log(weights[token] / weights.sum())
        assert draw_logprob == pytest.approx(probability, abs=3e-5)


def draw(logits: torch.Tensor, numbers: Any, weights: RowWeights | None = None) -> DrawnTokens:
    numbers = torch.as_tensor(numbers, dtype=torch.float64)
    return DrawnTokens(*draw_on_device(logits, numbers, weights))


ALLOWED = random().random((COUNT, SIZE)) < np.array([[0.3], [0.9], [0.004], [0.0], [0.5]])
WORDS = np.packbits(
    np.pad(ALLOWED, ((0, 0), (0, -SIZE % 32)), constant_values=True), axis=1, bitorder="little"
).view("<i4")
BIASES: dict[str, Any] = {
    "none": 0.0,
    "of rows": np.linspace(-3, 90, COUNT)[:, None],
    "of tokens": np.sin(np.arange(SIZE)) * 4,
    "of each": np.where(random(2).random((COUNT, SIZE)) < 0.1, -INF, 5.0),
}
MASKS: dict[str, Any] = {
    "none": None,
    "booleans": ALLOWED,
    "words": WORDS,
    "one": ALLOWED[0],
    "a list": [*ALLOWED[:4], None],
}


@pytest.mark.parametrize(
    ("masks", "bias", "temperature"),
    [
        ("none", "none", 1.0),
        ("none", "of tokens", 0.3),
        ("none", "of each", 1.0),
        ("booleans", "none", 1.0),
        ("booleans", "of rows", np.array([1.0, 0.4, 3.0, 1.0, 0.2])),
        ("words", "of each", 2.0),
        ("words", "none", 1e-40),
        ("one", "none", 1.0),
        ("one", "of tokens", 0.7),
        ("a list", "none", 1.0),
    ],
)
def test_draws_follow_their_definition(masks: str, bias: str, temperature: Any) -> None:
    logits, numbers = some_logits(), random().random(COUNT)
    weights = RowWeights(logits.shape, MASKS[masks], bias=BIASES[bias], temperature=temperature)
    allowed = None
    if MASKS[masks] is not None:
        allowed = np.broadcast_to(ALLOWED[0], ALLOWED.shape) if masks == "one" else ALLOWED
    if masks == "a list":
        allowed = ALLOWED.copy()
        allowed[4] = True
    temperature = np.maximum(temperature, 1e-30)
    drawn = draw(logits, numbers, weights)
    check(drawn, logits, numbers, allowed=allowed, bias=BIASES[bias], temperatures=temperature)
    if masks == "a list":
        assert drawn.log_mass[4] == 0


def test_joined_weights_have_the_biases_and_masks_of_each_row() -> None:
    """Of three batches, of which the first and the last have the same bias."""
    logits, numbers = some_logits(), random().random(COUNT)
    common, own = BIASES["of tokens"], BIASES["of each"][2:4]
    batches = [
        RowWeights((2, SIZE), ALLOWED[:2], bias=common, temperature=0.7),
        RowWeights((2, SIZE), ALLOWED[2:4], bias=own, temperature=2.0),
        RowWeights((1, SIZE), ALLOWED[4], bias=common, temperature=0.7),
    ]
    drawn = draw(logits, numbers, RowWeights.joined(batches))
    bias = np.stack([common, common, *own, common])
    temperatures = np.array([0.7, 0.7, 2.0, 2.0, 0.7])
    check(drawn, logits, numbers, allowed=ALLOWED, bias=bias, temperatures=temperatures)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_other_dtypes_are_read_where_they_are(dtype: torch.dtype) -> None:
    padded = torch.cat([some_logits(), some_logits(3)], 1).to(dtype)
    logits, numbers = padded[:, :SIZE], random().random(COUNT)
    check(draw(logits, numbers), logits.float(), numbers)
    totals, highest = log_sums_on_device(logits)
    assert torch.allclose(totals, logits.float().logsumexp(-1), atol=1e-5)
    assert torch.equal(highest, logits.float().amax(-1))
    transposed = logits.T.contiguous().T
    assert all(map(torch.equal, draw(transposed, numbers), draw(logits, numbers)))


def test_the_smallest_and_largest_numbers_draw_tokens_that_have_a_weight() -> None:
    logits = some_logits()
    weights = RowWeights(logits.shape, ALLOWED)
    for number, find in ((0.0, np.argmax), (1 - 2.0**-53, None)):
        drawn = draw(logits, np.full(COUNT, number), weights)
        for row, token in enumerate(drawn.token_ids.tolist()):
            places = np.flatnonzero(ALLOWED[row])
            if not len(places):
                assert token == -1
            else:
                assert token == (places[0] if find else places[-1])


def test_very_unlikely_tokens_are_drawn_from_exactly() -> None:
    logits, numbers = some_logits(), np.array([0.1, 0.4, 0.6, 0.9, 0.99])
    logits[:, 600:620] -= 300
    allowed = np.zeros((COUNT, SIZE), np.bool_)
    allowed[:, 600:620] = True
    drawn = draw(logits, numbers, RowWeights(logits.shape, allowed, temperature=0.5))
    check(drawn, logits, numbers, allowed=allowed, temperatures=0.5)
    assert (drawn.log_mass < -250).all()


def test_rows_that_are_not_distributions_are_nan_beside_others() -> None:
    logits, numbers = some_logits(), random().random(COUNT)
    expected = draw(logits, numbers)
    logits[0, 3], logits[1, 700] = math.nan, INF
    logits[2] = -INF
    drawn = draw(logits, numbers)
    assert drawn.token_ids[:3].tolist() == [-1, -1, -1]
    assert all(column[:3].isnan().all() for column in drawn[1:])
    assert all(
        torch.equal(one[3:], other[3:]) for one, other in zip(drawn, expected, strict=True)
    )
    totals, highest = log_sums_on_device(logits)
    assert (highest - totals).isfinite().tolist() == [False, False, False, True, True]
    logits = some_logits()
    logits[:, :600] = -INF  # a whole block
    assert torch.allclose(log_sums_on_device(logits)[0], logits.logsumexp(-1), atol=1e-5)
    check(draw(logits, numbers), logits, numbers)


def test_draws_of_rows_have_the_logprobs_of_the_rows() -> None:
    rows, numbers = some_logits().log_softmax(-1), random().random(8)
    row_of = torch.tensor([0, 0, 1, 3, 3, 3, 4, 4])
    numbers = torch.from_numpy(numbers)
    drawn = batch_draw(rows, numbers, RowWeights(rows.shape, ALLOWED), row_of=row_of)
    alone = [
        batch_draw(rows[row : row + 1], u[None], RowWeights((1, SIZE), ALLOWED[row : row + 1]))
        for row, u in zip(row_of.tolist(), numbers, strict=True)
    ]
    for column, parts in zip(drawn, zip(*alone, strict=True), strict=True):
        assert torch.equal(column, torch.cat(parts))
    assert drawn.token_ids.tolist()[3:6] == [-1, -1, -1]
    kept = drawn.token_ids >= 0
    assert torch.equal(drawn.logprobs[kept], rows[row_of.to(DEVICE), drawn.token_ids][kept])
    mass = batch_log_mass(rows, RowWeights(rows.shape, ALLOWED))
    assert torch.equal(mass[row_of.to(DEVICE)], drawn.log_mass)


class Ids(SimpleNamespace):
    """A vocabulary of ids, some of which no token has."""

    __hash__ = object.__hash__


def columns_of(reduction: Any, logits: torch.Tensor, row_of: Array, missing: Any = ()) -> Any:
    wanted = np.arange(len(logits))
    vocabulary: Any = Ids(size=SIZE, missing_ids=missing)
    query = GroupQuery(0, Generation(Lineage.of_sequences([])), wanted, row_of, reduction)
    work = groups.GroupWork(query, vocabulary)
    work.reduce(wanted, GroupValues(logits, are_logits=True))
    return work.result()


def test_members_of_one_row_have_their_own_masks_and_temperatures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_of = np.array([4, 1, 1, 0, 4, 2, 1, 3])
    index = np.array([0, 1, 2, 3, 0, 4, 1, 0])
    temperature = np.array([1.0, 0.5, 1.0, 1.0, 1.0, 2.0, 0.5, 1.0])
    logits, numbers = some_logits(), random().random(8)
    logits = torch.cat([logits, some_logits(2)], 1)  # wider than the vocabulary
    weights = RowWeights((8, SIZE), RowMasks(WORDS, 8, SIZE, index), temperature=temperature)
    found = columns_of(DrawColumns(weights, numbers), logits, row_of, missing=(7, 900))
    mass = columns_of(MassColumns(weights), logits, row_of, missing=(7, 900))
    assert all(column.device.type == "cpu" for column in (*found.columns, *mass.columns))
    monkeypatch.setattr(device_rows, "_can_run_kernels", lambda device: False)
    expected = columns_of(DrawColumns(weights, numbers), logits, row_of, missing=(7, 900))
    assert torch.equal(found.columns[0], expected.columns[0])
    for one, other in zip(found.columns[1:], expected.columns[1:], strict=True):
        assert torch.allclose(one, other, atol=2e-5)
    assert torch.allclose(mass.columns[0], expected.columns[2], atol=2e-5)


def test_an_invalid_row_fails_alone_beside_draws_by_kernels() -> None:
    logits, numbers = some_logits(), random().random(COUNT)
    logits[1, 3] = math.nan
    weights = RowWeights(logits.shape, ALLOWED)
    for reduction in (DrawColumns(weights, numbers), MassColumns(weights)):
        found = columns_of(reduction, logits, np.arange(COUNT))
        assert sorted(found.errors) == [1]
        assert found.columns[0][[0, 2, 4]].isfinite().all()


def test_masks_of_several_requests_are_copied_to_the_device_once() -> None:
    shared = RowMasks.of_bits(WORDS, SIZE, np.arange(COUNT), is_shared=True)
    rows = [shared.of(np.array(index)).bits(DEVICE) for index in ([0, 2], [4, 4])]
    assert rows[0][0].data_ptr() == rows[1][0].data_ptr()
    assert [places.tolist() for _, places, _ in rows] == [[0, 2], [4, 4]]
    few = RowMasks(WORDS, 2, SIZE, [4, 1])
    bits, places, is_packed = few.bits(DEVICE)
    assert is_packed
    assert len(bits) == 2
    expected = torch.from_numpy(WORDS).view(torch.uint8)[[4, 1]].to(DEVICE)
    assert torch.equal(bits[places], expected)


def test_a_bias_in_any_memory_layout_is_read() -> None:
    logits, numbers = some_logits(), random().random(COUNT)
    bias = torch.from_numpy(random(4).normal(0, 3, (SIZE, COUNT))).float().T
    for layout in (bias, bias.to(DEVICE), bias[2].expand(COUNT, SIZE)):
        drawn = draw(logits, numbers, RowWeights(logits.shape, bias=layout))
        check(drawn, logits, numbers, bias=layout.cpu().numpy())


@pytest.mark.parametrize("value", [math.nan, INF])
def test_a_bias_that_is_not_finite_is_found(value: float) -> None:
    logits, numbers = some_logits(), random().random(COUNT)
    bias = np.zeros((COUNT, SIZE))
    bias[1, 600] = value
    weights = RowWeights(logits.shape, bias=bias)
    drawn = draw(logits, numbers, weights)
    assert drawn.token_ids[1] == -1
    for column in drawn[1:]:
        assert column.isnan().tolist() == [False, True, False, False, False]
    columns = columns_of(DrawColumns(weights, numbers), logits, np.arange(COUNT)).columns
    assert not columns[2][1].isfinite()


def test_no_rows_are_no_draws() -> None:
    logits = some_logits()[:0]
    assert [len(column) for column in draw(logits, [])] == [0, 0, 0, 0]
    assert [len(column) for column in log_sums_on_device(logits)] == [0, 0]


@pytest.mark.parametrize("limit", [{"temperature": 0}, {"truncation": Truncation(5)}])
def test_weights_without_kernels_are_computed_by_torch(limit: Any) -> None:
    logits = some_logits()
    assert has_kernels(logits)
    weights = RowWeights(logits.shape, ALLOWED, **limit)
    assert not has_kernels(logits, weights)
    numbers = torch.from_numpy(random().random(COUNT))
    drawn = batch_draw(logits.log_softmax(-1), numbers, weights)
    tokens = drawn.token_ids.tolist()
    assert all(ALLOWED[row, token] for row, token in enumerate(tokens) if token >= 0)
