"""Draws from batches of rows against their definition in float64, row by row."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from allocations import Allocations

from genlm import Mask
from genlm.core.rows import draws
from genlm.core.rows import logits as rows_module
from genlm.core.rows.draws import DrawnTokens
from genlm.core.rows.group_reductions import DrawColumns, MassColumns
from genlm.core.rows.row_biases import checked_biases
from genlm.core.rows.row_masks import RowMasks
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.sampling import uniforms
from genlm.core.rows.truncation import Truncation

INF = math.inf
SIZE = 1300
COUNT = 24
"""Rows of most tests."""

Array = np.ndarray[Any, Any]


def some_rows(count: int = COUNT, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(3 * torch.randn(count, size, generator=generator), -1)


NUMBERS = uniforms(1, np.arange(COUNT), 0)


def weights_of(
    rows: torch.Tensor, masks: Any, index: Any, bias: Any = None, **settings: Any
) -> RowWeights:
    if index is not None:
        masks = RowMasks(masks, *rows.shape, index)
    return RowWeights(rows.shape, masks, bias=0.0 if bias is None else bias, **settings)


def tensor_of(numbers: Any) -> torch.Tensor:
    return torch.as_tensor(numbers, dtype=torch.float64)


def batch_draw(
    rows: torch.Tensor,
    numbers: Any,
    masks: Any = None,
    index: Any = None,
    **settings: Any,
) -> DrawnTokens:
    weights = weights_of(rows, masks, index, **settings)
    return draws.batch_draw(rows, tensor_of(numbers), weights)


def batch_draw_without_replacement(
    rows: torch.Tensor, numbers: Any, masks: Any = None, **settings: Any
) -> DrawnTokens:
    weights = weights_of(rows, masks, None, **settings)
    return draws.batch_draw_without_replacement(rows, tensor_of(numbers), weights)


def batch_log_mass(
    rows: torch.Tensor, masks: Any = None, index: Any = None, **settings: Any
) -> torch.Tensor:
    return draws.batch_log_mass(rows, weights_of(rows, masks, index, **settings))


def sets_of_tokens(count: int = COUNT, seed: int = 1) -> Array:
    """Booleans, some rows with few and one with no token."""
    generator = np.random.default_rng(seed)
    shares = generator.choice([0.003, 0.3, 0.9], (count, 1))
    allowed: Array = generator.random((count, SIZE)) < shares
    allowed[5] = False
    return allowed


def words_of(allowed: Array) -> Array:
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)), constant_values=True)
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32)


def same(drawn: DrawnTokens, expected: DrawnTokens) -> bool:
    return all(map(torch.equal, drawn, expected))


def check_draws(
    drawn: DrawnTokens,
    rows: torch.Tensor,
    numbers: Array,
    allowed: Array | None = None,
    temperatures: Array | None = None,
    bias: Array | None = None,
) -> None:
    """Compare draws with the inversion of the cumulative weights in float64."""
    count, size = rows.shape
    exact = rows.double().numpy()
    allowed = np.ones((count, size), np.bool_) if allowed is None else allowed
    scores = np.where(allowed, exact + (0.0 if bias is None else bias), -INF)
    with np.errstate(divide="ignore"):
        masses = np.log(np.exp(scores).sum(-1))
    temperatures = np.ones(count) if temperatures is None else temperatures
    for row in range(count):
        token, mass = int(drawn.token_ids[row]), float(drawn.log_mass[row])
        row_scores = scores[row]
        if not np.isfinite(row_scores).any():
            assert [float(column[row]) for column in drawn] == [-1, -INF, -INF, 0]
            continue
        assert mass == pytest.approx(masses[row], abs=2e-5)
        assert float(drawn.logprobs[row]) == float(rows[row, token])
        if temperatures[row] == 0:
            assert token == int(row_scores.argmax())
            assert float(drawn.draw_logprob[row]) == 0
            continue
        weights = np.exp((row_scores - row_scores.max()) / temperatures[row])
        cumulative = np.cumsum(weights) / weights.sum()
        expected = int(np.searchsorted(cumulative, numbers[row], "right"))
        # float32 weights move the boundary between two ids by as little as this.
        boundary = cumulative[min(token, expected)]
        assert token == expected or abs(boundary - numbers[row]) < 1e-6
        probability = math.log(weights[token] / weights.sum())
        assert float(drawn.draw_logprob[row]) == pytest.approx(probability, abs=2e-5)


# -- values ---------------------------------------------------------------------------

TEMPERATURES: dict[str, Any] = {
    "1": 1.0,
    "0.3": 0.3,
    "0": 0,
    "one for each": np.resize([1.0, 0.0, 0.4, 3.0], COUNT),
}
BIASES: dict[str, Any] = {
    "none": None,
    "number": -2.5,
    "of rows": np.linspace(-3, 90, COUNT),
    "of tokens": np.sin(np.arange(SIZE)) * 4,
    "of each": np.random.default_rng(5).normal(0, 20, (COUNT, SIZE)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("bias", BIASES)
def test_draws_follow_their_definition(bias: str, temperature: str, masked: bool) -> None:
    rows, before = some_rows(), some_rows()
    allowed = sets_of_tokens() if masked else None
    row_temperatures, added = TEMPERATURES[temperature], BIASES[bias]
    drawn = batch_draw(rows, NUMBERS, allowed, temperature=row_temperatures, bias=added)
    exact = None if added is None else np.asarray(added, np.float32).astype(np.float64)
    if exact is not None and exact.shape == (COUNT,):
        exact = exact[:, None]
    temperatures = np.broadcast_to(np.asarray(row_temperatures, np.float64), (COUNT,))
    check_draws(drawn, rows, NUMBERS, allowed, temperatures, exact)
    mass = batch_log_mass(rows, allowed, bias=added)
    assert torch.allclose(mass, drawn.log_mass, atol=1e-5)
    if allowed is None and added is None:
        assert drawn.log_mass.tolist() == [0.0] * COUNT
    assert torch.equal(rows, before)
    assert [column.dtype for column in drawn] == [torch.int64] + [torch.float32] * 3


def test_a_bias_of_minus_infinity_excludes_tokens_as_a_mask_does() -> None:
    rows, allowed = some_rows(), sets_of_tokens()
    drawn = batch_draw(rows, NUMBERS, bias=np.where(allowed, 0.0, -INF))
    check_draws(drawn, rows, NUMBERS, allowed)
    dead = batch_draw(rows, NUMBERS, bias=np.resize([0.0, -INF], COUNT))
    assert dead.token_ids[1::2].tolist() == [-1] * (COUNT // 2)
    assert dead.logprobs[1::2].tolist() == [-INF] * (COUNT // 2)
    expected = batch_draw(rows, NUMBERS)
    assert torch.equal(dead.token_ids[::2], expected.token_ids[::2])


def test_very_unlikely_tokens_are_drawn_from_exactly_with_a_bias_as_without() -> None:
    rows = some_rows(3)
    rows[:, 0], rows[:, 1:] = 0.0, torch.log_softmax(rows[:, 1:], -1) - 200
    allowed = np.ones((3, SIZE), np.bool_)
    allowed[:, 0] = False
    for bias in (None, np.zeros(SIZE), np.full((3, SIZE), 250.0)):
        drawn = batch_draw(rows, NUMBERS[:3], allowed[:1], bias=bias)
        expected = np.float64(0 if bias is None else bias.flat[0])
        assert drawn.log_mass.tolist() == pytest.approx([expected - 200] * 3, abs=1e-3)
        assert torch.equal(
            drawn.token_ids, batch_draw(rows[:, 1:] + 200, NUMBERS[:3]).token_ids + 1
        )


# -- masks ----------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "numpy booleans": lambda allowed: allowed,
    "torch booleans": torch.from_numpy,
    "strided booleans": lambda allowed: torch.from_numpy(allowed.T.copy()).T,
    "read-only words": lambda allowed: np.frombuffer(
        words_of(allowed).tobytes(), np.int32
    ).reshape(len(allowed), -1),
    "torch words": lambda allowed: torch.from_numpy(words_of(allowed)),
    "masks": lambda allowed: [Mask(each, SIZE) for each in allowed],
    "lists of ids": lambda allowed: [np.flatnonzero(each).tolist() for each in allowed],
}


@pytest.mark.parametrize("form", FORMS)
def test_masks_of_rows_in_any_form_are_the_same(form: str) -> None:
    rows, allowed = some_rows(), sets_of_tokens()
    expected = batch_draw(rows, NUMBERS, allowed)
    masks = FORMS[form](allowed)
    assert same(batch_draw(rows, NUMBERS, masks), expected)
    assert torch.equal(batch_log_mass(rows, masks), batch_log_mass(rows, allowed))
    index = np.random.default_rng(0).integers(0, COUNT, COUNT)
    reordered = batch_draw(rows, NUMBERS, allowed[index])
    for kind in (np.asarray, torch.from_numpy, np.ndarray.tolist):
        assert same(batch_draw(rows, NUMBERS, masks, kind(index)), reordered)


@pytest.mark.parametrize(
    "form",
    [
        lambda flags: flags,
        lambda flags: flags.tolist(),
        torch.from_numpy,
        lambda flags: flags[None],
        lambda flags: words_of(flags[None]),
        lambda flags: np.flatnonzero(flags).tolist(),
        lambda flags: set(np.flatnonzero(flags).tolist()),
        lambda flags: Mask(flags, SIZE),
        lambda flags: [Mask(flags, SIZE)],
        lambda flags: RowMasks(flags, COUNT, SIZE),
        lambda flags: [Mask(flags, SIZE), None],
    ],
)
def test_one_mask_in_any_form_is_of_all_rows(form: Any) -> None:
    rows, flags = some_rows(), sets_of_tokens()[1]
    masks = form(flags)
    index = np.zeros(COUNT, np.int64) if isinstance(masks, list) and None in masks else None
    expected = batch_draw(rows, NUMBERS, np.tile(flags, (COUNT, 1)))
    assert same(batch_draw(rows, NUMBERS, masks, index), expected)


@pytest.mark.parametrize("masks", [None, [Mask(range(7, SIZE), SIZE)]])
@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.5])
def test_the_columns_of_draws_share_no_memory(masks: Any, temperature: float) -> None:
    rows, places = some_rows(), torch.arange(COUNT)
    reduction = DrawColumns(weights_of(rows, masks, None, temperature=temperature), NUMBERS)
    for compute in (reduction.compute, reduction.compute_from_logits):
        columns = compute(rows, places, places)
        if columns is not None:
            assert len({column.untyped_storage().data_ptr() for column in columns}) == 4


def test_rows_without_a_mask_have_mass_1_beside_others_and_alone() -> None:
    rows, mask = some_rows(), Mask(range(7, SIZE, 5), SIZE)
    masks = [mask, None, None, mask] * (COUNT // 4)
    drawn = batch_draw(rows, NUMBERS, masks)
    assert drawn.log_mass[1::4].tolist() == drawn.log_mass[2::4].tolist() == [0.0] * 6
    for row, row_mask in enumerate(masks):
        one = slice(row, row + 1)
        alone = batch_draw(rows[one], NUMBERS[one], None if row_mask is None else [row_mask])
        assert same(DrawnTokens(*(column[one] for column in drawn)), alone)
    everything = batch_draw(rows, NUMBERS, [None] * COUNT)
    assert same(everything, batch_draw(rows, NUMBERS))


@pytest.mark.parametrize("masks", [[], [[]] * COUNT, np.zeros((1, SIZE), np.bool_)])
def test_an_empty_mask_leaves_nothing_to_draw(masks: Any) -> None:
    drawn = batch_draw(some_rows(), NUMBERS, masks)
    assert drawn.token_ids.tolist() == [-1] * COUNT
    assert all(column.tolist() == [-INF] * COUNT for column in drawn[1:3])
    assert drawn.draw_logprob.tolist() == [0] * COUNT


WRONG_MASKS: list[tuple[Any, Any, str]] = [
    (np.ones((3, SIZE), np.bool_), None, "3 masks for 24 rows"),
    ([[1], [2]], None, "2 masks for 24 rows"),
    (np.ones((COUNT, SIZE + 1), np.bool_), None, r"expected booleans of shape \(masks, 1300\)"),
    (np.ones((COUNT, 40), np.int32), None, r"packed bits, int32, of shape \(masks, 41\)"),
    (np.ones((COUNT, SIZE), np.int64), None, r"masks of shape \(24, 1300\), torch.int64"),
    (np.ones(41, np.int32), None, "may be token ids or packed bits"),
    ([[1], [2]], [0] * 5, r"mask_index has shape \(5,\); expected \(24,\)"),
    ([[1], [2]], [2] * COUNT, "from 0 to 1; 24 of 24 are not, at places 0, 1, 2, 3, 4, ...;"),
    ([[1], [2]], [0] * (COUNT - 1) + [-1], "1 of 24 are not, at places 23; the first is -1"),
    ([SIZE], None, "token id 1300 at position 0 of a mask"),
    ([[1], [-1]], [0] * COUNT, "token id -1 at position 0 of a mask"),
]


@pytest.mark.parametrize(("masks", "index", "message"), WRONG_MASKS)
def test_wrong_masks_are_refused(masks: Any, index: Any, message: str) -> None:
    for function in (
        batch_log_mass,
        lambda rows, *options: batch_draw(rows, NUMBERS, *options),
    ):
        with pytest.raises(ValueError, match=message):
            function(some_rows(), masks, index)


def test_a_bias_that_may_be_of_rows_or_of_tokens_is_refused() -> None:
    rows = some_rows(5, 5)
    with pytest.raises(ValueError, match=r"pass shape \(5, 1\) for rows or \(1, 5\)"):
        batch_log_mass(rows, bias=np.zeros(5))
    bias = np.arange(5.0)
    by_row, by_token = (batch_log_mass(rows, bias=bias.reshape(s)) for s in [(5, 1), (1, 5)])
    assert by_row.tolist() == bias.tolist()
    assert torch.allclose(by_token, (rows + torch.from_numpy(bias)).logsumexp(-1).float())
    with pytest.raises(ValueError, match=r"a bias of shape \(3,\) for 5 rows over 5 tokens"):
        batch_log_mass(rows, bias=np.zeros(3))


# -- batches --------------------------------------------------------------------------


def settings_of(seed: int) -> dict[str, Any]:
    """Different settings for each row."""
    generator = np.random.default_rng(seed)
    masks = [None, Mask([3], SIZE), Mask(range(0, SIZE, 3), SIZE), Mask([], SIZE)]
    return {
        "masks": [masks[i] for i in generator.integers(0, 4, COUNT)],
        "temperature": generator.choice([0.0, 0.5, 1.0, 2.0], COUNT),
        "bias": generator.normal(0, 2, (COUNT, SIZE)) if seed % 2 else None,
        "truncation": Truncation(
            generator.choice([9, SIZE], COUNT), generator.choice([0.4, 1.0], COUNT)
        ),
    }


def selected_settings(settings: dict[str, Any], places: Array) -> dict[str, Any]:
    return {
        "masks": [settings["masks"][i] for i in places],
        "temperature": settings["temperature"][places],
        "bias": None if settings["bias"] is None else settings["bias"][places],
        "truncation": settings["truncation"].of(places),
    }


@pytest.mark.parametrize("seed", range(4))
def test_a_draw_depends_on_its_own_row_and_settings_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, settings = some_rows(seed=seed), settings_of(seed)
    together = batch_draw(rows, NUMBERS, **settings)
    for row in range(COUNT):
        one = np.array([row])
        alone = batch_draw(rows[one], NUMBERS[one], **selected_settings(settings, one))
        assert same(alone, DrawnTokens(*(column[one] for column in together)))
    order = np.random.default_rng(seed).permutation(COUNT)
    shuffled = batch_draw(rows[order], NUMBERS[order], **selected_settings(settings, order))
    assert same(shuffled, DrawnTokens(*(column[order] for column in together)))
    monkeypatch.setattr(rows_module, "_VALUES_ON_CPU", 5 * SIZE)
    assert same(batch_draw(rows, NUMBERS, **settings), together)


@pytest.mark.parametrize("draw", [batch_draw, batch_draw_without_replacement])
def test_no_rows_are_no_draws(draw: Any) -> None:
    shape = () if draw is batch_draw else (3,)
    drawn = draw(some_rows(0), np.ones((0, *shape)), np.ones((0, SIZE), np.bool_))
    assert [tuple(column.shape) for column in drawn] == [
        (0, *shape),
        (0, *shape),
        (0,),
        (0, *shape),
    ]
    assert batch_log_mass(some_rows(0)).tolist() == []


@pytest.mark.parametrize("limits", [Truncation(), Truncation(50), Truncation(top_p=0.5)])
def test_what_is_needed_beside_the_rows_does_not_grow_with_their_number(
    limits: Truncation,
) -> None:
    sizes, numbers = [], []
    for count in (8, 80):
        rows = torch.zeros(1, 128_000).log_softmax(1).expand(count, -1)
        with Allocations() as made:
            batch_draw(
                rows,
                np.full(count, 0.3),
                np.arange(128_000) > 99,
                temperature=0.7,
                truncation=limits,
            )
            assert not rows_module.invalid_rows(rows, 128_000)
        sizes.append(made.largest)
        numbers.append(made.most)
    assert sizes[1] <= sizes[0] <= 2**24
    assert numbers[1] <= numbers[0] + 8  # results of all parts, and of the previous part


def test_the_weights_of_all_rows_are_not_copied() -> None:
    weights = RowWeights((3, SIZE), bias=np.zeros((3, SIZE)))
    assert weights.of(np.arange(3)) is weights
    assert weights.of(np.array([0, 2, 1])) is not weights


def test_the_biases_of_some_rows_are_not_copied_but_sent_alone() -> None:
    bias, rows = torch.randn(6, SIZE), some_rows(3)
    weights = RowWeights((6, SIZE), bias=bias)
    with Allocations() as made:
        some = weights.of(np.array([4, 1, 1, 3])).of(np.array([2, 0, 3]))
    assert made.largest < bias[0].nbytes
    expected = RowWeights((3, SIZE), bias=bias[[1, 4, 3]])
    places, ids = np.array([2, 0]), np.array([[5, 6], [7, 0]])
    sent = pickle.dumps(some)
    assert len(sent) < bias.nbytes
    for found in (some, pickle.loads(sent)):
        assert torch.equal(
            draws.batch_log_mass(rows, found), draws.batch_log_mass(rows, expected)
        )
        biases = [weights.biases.of_ids(places, ids) for weights in (found, expected)]  # type: ignore[union-attr]
        assert biases[0].tolist() == biases[1].tolist()


def test_biases_of_tokens_are_those_that_draws_add() -> None:
    biases = RowWeights((1, SIZE), bias=np.full((1, SIZE), 0.1)).biases
    assert biases is not None
    found = biases.of_ids(np.array([0]), np.array([[3]]))
    assert found.tolist() == [[float(np.float32(0.1))]]


def test_there_are_no_biases_of_no_rows() -> None:
    assert checked_biases(np.zeros((0, SIZE)), 0, SIZE) == []


@pytest.mark.parametrize("draws_of_member", [1, 3])
def test_members_with_one_row_and_different_weights_need_no_copies_of_the_row(
    draws_of_member: int,
) -> None:
    size, sizes = 128_000, []
    rows = some_rows(1, size)
    for count in (8, 80):
        settings: Any = {
            "temperature": np.linspace(0.5, 2, count),
            "masks": np.arange(size) % 3 > 0,
        }
        weights = RowWeights((count, size), **settings)
        numbers = np.stack([uniforms(1, np.arange(count), i) for i in range(3)], 1)
        numbers = numbers[:, 0] if draws_of_member == 1 else numbers
        row_of, members = torch.zeros(count, dtype=torch.long), torch.arange(count)
        with Allocations() as made:
            drawn = DrawColumns(weights, numbers).compute(rows, row_of, members)
            mass = MassColumns(weights).compute(rows, row_of, members)[0]
        sizes.append(made.largest)
        several = rows.expand(count, -1)
        alone = (
            draws.batch_draw if draws_of_member == 1 else draws.batch_draw_without_replacement
        )
        assert same(DrawnTokens(*drawn), alone(several, tensor_of(numbers), weights))
        assert torch.equal(mass, draws.batch_log_mass(several, weights))
    assert sizes[1] <= sizes[0] <= 2**24


@pytest.mark.parametrize("masked", [False, True])
def test_many_draws_from_a_row_are_those_of_its_numbers_in_bounded_memory(masked: bool) -> None:
    count, row = 20_000, some_rows(2)
    numbers = torch.from_numpy(uniforms(1, np.arange(count), 0))
    row_of = torch.arange(count) // (count // 2)
    masks = RowMasks(np.arange(SIZE) % 3 > 0, 2, SIZE) if masked else None
    weights = RowWeights(row.shape, masks)
    with Allocations() as made:
        several = draws.batch_draw(row, numbers, weights, row_of=row_of)
        from_logits = draws.draw_from_logits(row + 7, numbers, row_of, masks)
    assert made.largest < 2**24
    assert from_logits is not None
    for number in (0, 1, 9_999, 10_000, 15_000, 19_999):
        place = int(row_of[number])
        single = draws.batch_draw(
            row[place : place + 1],
            numbers[number : number + 1],
            RowWeights((1, SIZE), None if masks is None else masks.of(np.array([place]))),
        )
        for drawn in (several, from_logits):
            assert int(drawn.token_ids[number]) == int(single.token_ids)
            for column, expected in zip(drawn[1:], single[1:], strict=True):
                torch.testing.assert_close(column[number : number + 1], expected)


# -- distributions, with fixed numbers ------------------------------------------------


def test_frequencies_are_the_probabilities_under_mask_bias_and_temperature() -> None:
    row, count = some_rows(1, 12, seed=3)[0], 40_000
    bias, allowed = np.linspace(-1, 1, 12), np.arange(12) % 5 != 1
    drawn = batch_draw(
        row.expand(count, -1),
        uniforms(8, np.arange(count), 4),
        allowed,
        temperature=1.7,
        bias=bias,
    )
    weights = np.where(allowed, np.exp((row.double().numpy() + bias) / 1.7), 0)
    counts = np.bincount(drawn.token_ids.numpy(), minlength=12)
    assert not counts[~allowed].any()
    expected = count * weights[allowed] / weights.sum()
    assert scipy.stats.chisquare(counts[allowed], expected).pvalue > 1e-3
    untempered = np.exp(row.double().numpy() + bias)[allowed]
    wrong = count * untempered / untempered.sum()
    assert scipy.stats.chisquare(counts[allowed], wrong).pvalue < 1e-9


def test_draws_without_replacement_have_the_ordered_distribution_of_gumbel_top_k() -> None:
    row, count = torch.tensor([0.5, 0.05, 0.2, 0.1, 0.15]).log(), 60_000
    numbers = uniforms(2, np.arange(count), 0, 3)
    sequences = batch_draw_without_replacement(row.expand(count, -1), numbers, [0, 1, 2, 4])
    probabilities = np.array([0.5, 0.05, 0.2, 0, 0.15])
    expected, counts = [], []
    keys = (sequences.token_ids @ torch.tensor([25, 5, 1])).numpy()
    for ordered in itertools.permutations([0, 1, 2, 4], 3):
        logprob, left = 0.0, 0.9
        for token in ordered:
            logprob += math.log(probabilities[token] / left)
            left -= probabilities[token]
        drawn = keys == 25 * ordered[0] + 5 * ordered[1] + ordered[2]
        assert np.allclose(sequences.draw_logprob[drawn].sum(-1), logprob, atol=1e-5)
        expected.append(count * math.exp(logprob))
        counts.append(int(drawn.sum()))
    assert sum(counts) == count
    assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3
    # The trick itself, with other numbers, has the same distribution.
    gumbels = scipy.stats.gumbel_r.rvs(size=(count, 5), random_state=1)
    with np.errstate(divide="ignore"):
        perturbed = np.log(probabilities) + gumbels
    tops = np.argsort(-perturbed, -1)[:, :3] @ np.array([25, 5, 1])
    two = [[np.sum(keys == key), np.sum(tops == key)] for key in np.unique(keys)]
    assert scipy.stats.chi2_contingency(np.array(two).T).pvalue > 1e-3


@pytest.mark.parametrize("bias", [None, np.sin(np.arange(SIZE))])
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_draws_without_replacement_are_draws_from_what_is_left(
    temperature: float, bias: Any
) -> None:
    rows, allowed = some_rows(), sets_of_tokens()
    numbers = uniforms(4, np.arange(COUNT), 0, 6)
    options = {"temperature": temperature, "bias": bias}
    sequences = batch_draw_without_replacement(rows, numbers, allowed, **options)
    assert torch.equal(
        sequences.log_mass, batch_draw(rows, numbers[:, 0], allowed).log_mass
    ) or (bias is not None)
    left = allowed.copy()
    for turn in range(6):
        step = batch_draw(rows, numbers[:, turn], left, **options)
        if turn == 0:
            assert torch.equal(sequences.token_ids[:, 0], step.token_ids)
        for row in range(COUNT):
            token, expected = int(sequences.token_ids[row, turn]), int(step.token_ids[row])
            assert (token == -1) == (expected == -1)
            if token == expected:
                near = pytest.approx(float(step.draw_logprob[row]), abs=1e-4)
                assert float(sequences.draw_logprob[row, turn]) == near
                assert float(sequences.logprobs[row, turn]) == float(step.logprobs[row])
            if token >= 0:
                assert left[row, token]
                left[row, token] = False
    agreement = (sequences.token_ids[:, -1] == step.token_ids).float().mean()
    assert agreement > 0.9  # others are moved over a boundary by rounding


def test_without_replacement_a_row_runs_out_of_tokens_and_tiny_ones_are_drawn_too() -> None:
    for first in (0, 3):  # an entry of -1 does not stand for token 0
        row = torch.full((SIZE,), -INF)
        row[[first, 700, 1299]] = torch.tensor([0.0, -90.0, -300.0])
        numbers = np.full((2, 6), 0.7)
        masks = [[first, 5, 700, 1299], []]
        sequences = batch_draw_without_replacement(row.expand(2, -1), numbers, masks)
        assert sequences.token_ids.tolist() == [[first, 700, 1299, -1, -1, -1], [-1] * 6]
        assert sequences.logprobs.tolist() == [[0, -90, -300, *[-INF] * 3], [-INF] * 6]
        assert sequences.draw_logprob.flatten().tolist() == pytest.approx([0] * 12)
        assert sequences.log_mass.tolist() == [0.0, -INF]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"bias": np.sin(np.arange(140))}]
)
def test_many_draws_without_replacement_have_the_ordered_distribution(
    settings: dict[str, Any],
) -> None:
    """Draw three tokens after the 130 others of a mask, which are almost certain."""
    count, last, allowed = 20_000, [3, 70, 139], np.ones(140, np.bool_)
    allowed[[0, 40, 100, 101, 102, 103, 104]] = False
    row = torch.full((140,), 40.0)
    row[last] = torch.tensor([0.5, 0.3, 0.2]).log()
    rows = row.log_softmax(0).expand(count, -1)
    numbers = uniforms(5, np.arange(count), 0, 135)
    drawn = batch_draw_without_replacement(rows, numbers, allowed[None], **settings)
    first, then = drawn.token_ids.tensor_split([130], 1)
    others = np.setdiff1d(np.flatnonzero(allowed), last)
    assert (first.sort(1).values == torch.from_numpy(others)).all()
    assert (then[:, 3:] == -1).all()
    scores = (row.double().numpy() + settings.get("bias", 0.0))[last]
    weights = dict(zip(last, np.exp(scores / settings.get("temperature", 1.0)), strict=True))
    expected, counts = [], []
    for ordered in itertools.permutations(last):
        shares = [weights[ordered[i]] / sum(weights[j] for j in ordered[i:]) for i in range(3)]
        is_drawn = (then[:, :3] == torch.tensor(ordered)).all(1)
        logprobs = drawn.draw_logprob[is_drawn, 130:133]
        assert np.allclose(logprobs, np.log(shares), atol=1e-5)
        expected.append(count * math.prod(shares))
        counts.append(int(is_drawn.sum()))
    assert sum(counts) == count
    assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3


@pytest.mark.parametrize("size", [300, SIZE])
def test_more_draws_without_replacement_begin_with_fewer(size: int) -> None:
    rows, allowed = some_rows()[:, :size].log_softmax(-1), sets_of_tokens()[:, :size]
    numbers = uniforms(4, np.arange(COUNT), 0, size)
    most = batch_draw_without_replacement(rows, numbers, allowed)
    for row, ids in zip(allowed, most.token_ids.tolist(), strict=True):
        assert sorted(ids) == sorted(np.flatnonzero(row).tolist() + [-1] * (~row).sum())
    for k in (1, 127, 128, 129, 200):
        fewer = batch_draw_without_replacement(rows, numbers[:, :k], allowed)
        assert torch.equal(fewer.token_ids, most.token_ids[:, :k])
        torch.testing.assert_close(fewer.draw_logprob, most.draw_logprob[:, :k])
    # Against sums of what remains, in float64.
    columns = rows.double(), most.token_ids, most.draw_logprob.double()
    for row, ids, logprobs in zip(*columns, strict=True):
        drawn = row[ids[ids >= 0]]
        expected = drawn - drawn.flip(0).logcumsumexp(0).flip(0)
        near = {"atol": 2e-4, "rtol": 1e-4}
        torch.testing.assert_close(logprobs[: len(drawn)], expected, **near)


@pytest.mark.parametrize("size", [100, 1536])
def test_draws_without_replacement_may_be_changed_in_place(size: int) -> None:
    rows = torch.full((2, size), -math.log(size))
    for column in batch_draw_without_replacement(rows, torch.full((2, 3), 0.5)):
        assert not column.is_inference()
        column.add_(1)
