"""Draws follow the row, never leave its support, and repeat with their seed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import oracle_row

from genlm.core.rows.draws import batch_draw
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.sampling import (
    draw_tokens,
    stream_seeds,
    stream_uniform,
    stream_uniforms,
    uniforms,
)
from genlm.core.rows.truncation import Truncation

LARGEST_UNIFORM = 1 - 2**-53
INF = math.inf


def draw_token(row: torch.Tensor, temperature: float, uniform: float) -> int:
    """One draw from one row."""
    (token_id,) = draw_tokens(row[None], [temperature], [uniform]).tolist()
    return int(token_id)


def test_a_number_is_needed_for_each_row() -> None:
    for numbers in ([0.5], [0.5] * 3, [[0.5], [0.5]]):
        with pytest.raises(ValueError, match="for 2 rows; expected one for each"):
            draw_tokens(torch.zeros(2, 3), [1.0] * 2, numbers)  # type: ignore[arg-type]


# -- one draw -------------------------------------------------------------------------


CHI_SQUARE_LIMIT = 23.5
"""Exceeded by chance once in 10,000 runs with 4 degrees of freedom."""


def chi_square(draws: list[int], logprobs: torch.Tensor, temperature: float) -> float:
    """The statistic of draws against `exp(logprobs / temperature)`, impossible ids aside."""
    expected = torch.exp(logprobs.double() / temperature).numpy()
    expected = len(draws) * expected / expected.sum()
    counts = np.bincount(draws, minlength=len(expected))
    assert not counts[expected == 0].any()
    possible = expected > 0
    return float(np.sum((counts - expected)[possible] ** 2 / expected[possible]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution_and_no_other(temperature: float) -> None:
    # The seed is fixed, so the outcome is too.
    row = oracle_row([1, 2], None, 6).index_fill(0, torch.tensor([3]), -INF)
    uniforms = [stream_uniform(17, position) for position in range(10_000)]
    draws = draw_tokens(row.expand(10_000, 6), [temperature] * 10_000, uniforms).tolist()
    assert chi_square(draws, row, temperature) < CHI_SQUARE_LIMIT
    for other in (0.8 * temperature, 1.25 * temperature):
        assert chi_square(draws, row, other) > CHI_SQUARE_LIMIT


def test_each_uniform_number_gives_the_token_whose_interval_it_is_in() -> None:
    row = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25]).log()
    uniforms = [0.0, 0.2499, 0.2501, 0.7499, 0.7501, LARGEST_UNIFORM]
    assert [draw_token(row, 1.0, uniform) for uniform in uniforms] == [1, 1, 2, 2, 4, 4]
    rows = row.expand(len(uniforms), 5)
    assert draw_tokens(rows, [1.0] * 6, uniforms).tolist() == [1, 1, 2, 2, 4, 4]


@given(
    probabilities=st.lists(st.sampled_from([0.0, 1e-300, 1e-30, 0.1, 1.0]), min_size=1).filter(
        any
    ),
    temperature=st.sampled_from([1e-310, 1e-3, 1.0, 7.0, 1e300]),
    uniform=st.sampled_from([0.0, 2**-53, 0.5, LARGEST_UNIFORM]),
)
def test_an_impossible_token_is_never_drawn_even_at_the_extremes(
    probabilities: list[float], temperature: float, uniform: float
) -> None:
    row = torch.tensor(probabilities, dtype=torch.float64).log()
    token_id = draw_token(row, temperature, uniform)
    assert 0 <= token_id < len(probabilities)
    assert probabilities[token_id] > 0


@pytest.mark.parametrize("size", [1, 2, 1000, 128_000])
def test_the_largest_uniform_number_draws_the_last_possible_token(size: int) -> None:
    row = torch.full((size + 3,), -math.log(size))
    row[size:] = -INF
    assert draw_token(row, 1.0, LARGEST_UNIFORM) == size - 1


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-308, 5e-324])
def test_a_vanishing_temperature_draws_the_most_likely_token(temperature: float) -> None:
    row = torch.tensor([-30.0, -1.0, -0.5, -20.0])
    for uniform in (0.0, 0.5, LARGEST_UNIFORM):
        assert draw_token(row, temperature, uniform) == 2


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1.7e308])
def test_a_vast_temperature_draws_all_possible_tokens_alike(temperature: float) -> None:
    row = torch.tensor([-INF, -9.0, -0.1, -INF])
    drawn = [draw_token(row, temperature, uniform) for uniform in (0.0, 0.49, 0.51, 0.99)]
    assert drawn == [1, 1, 2, 2]


def test_temperature_0_takes_the_first_of_the_most_likely_whatever_the_number() -> None:
    row = torch.tensor([-5.0, -1.0, -INF, -1.0])
    for uniform in (0.0, 0.5, LARGEST_UNIFORM):
        assert draw_token(row, 0, uniform) == draw_token(row, 0.0, uniform) == 1


def test_temperature_0_is_greedy_beside_other_temperatures() -> None:
    rows = torch.tensor([[0.4, 0.6]] * 3).log()
    assert draw_tokens(rows, [0.0, 1.0, 1.0], [0.0, 0.0, 0.9]).tolist() == [1, 0, 1]
    assert draw_tokens(rows, [0.0] * 3, [0.0, 0.5, 0.9]).tolist() == [1, 1, 1]


@given(st.integers(0, 2**32), st.integers(1, 9))
def test_a_draw_does_not_depend_on_the_other_rows_of_its_batch(seed: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    rows = torch.from_numpy(generator.normal(0, 4, (count, 300))).float().log_softmax(-1)
    temperatures = generator.choice([0.0, 0.7, 1.0, 1.9], count).tolist()
    uniforms = generator.random(count).tolist()
    alone = [
        draw_token(*arguments) for arguments in zip(rows, temperatures, uniforms, strict=True)
    ]
    assert draw_tokens(rows, temperatures, uniforms).tolist() == alone


class OnApple(torch.Tensor):
    """A row on the CPU that stands for one on an Apple GPU: it cannot become float64."""

    device = property(lambda _: torch.device("mps"))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls) and result.dtype == torch.float64:
            raise TypeError("the MPS framework doesn't support float64")
        return result

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    "limits", [Truncation(), Truncation(top_k=3), Truncation(top_p=0.8), Truncation(min_p=0.4)]
)
def test_rows_on_devices_without_float64_are_drawn_from_as_others(
    limits: Truncation, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = oracle_row([1, 2], None, 6).expand(20, 6)
    uniforms = torch.tensor([stream_uniform(17, i) for i in range(20)], dtype=torch.float64)
    weights = RowWeights(rows.shape, truncation=limits)
    expected = batch_draw(rows, uniforms, weights).token_ids
    arange, to = torch.arange, torch.Tensor.to

    def move(tensor: torch.Tensor, target: Any) -> torch.Tensor:
        return to(tensor, getattr(target, "dtype", tensor.dtype))

    monkeypatch.setattr(torch, "arange", lambda count, **_: arange(count))
    monkeypatch.setattr(torch.Tensor, "to", move)
    drawn = batch_draw(rows.as_subclass(OnApple), uniforms, weights).token_ids
    assert torch.equal(drawn, expected)


def test_the_row_need_not_be_normalised_and_is_not_changed() -> None:
    row = oracle_row([1, 2, 3], None, 9)
    before = row.clone()
    for uniform in np.linspace(0, LARGEST_UNIFORM, 50):
        token_id = draw_token(row, 0.7, uniform)
        assert token_id == draw_token(row + 40, 0.7, uniform)
    assert torch.equal(row, before)


def test_rows_of_nan_disturb_no_other_row_and_rows_without_a_token_have_none() -> None:
    rows = torch.log_softmax(
        torch.randn(3, 700, generator=torch.Generator().manual_seed(0)), -1
    )
    rows = torch.cat([rows, torch.full((1, 700), math.nan), torch.full((1, 700), -INF)])
    temperatures, numbers = [1.0, 0.0, 0.7, 1.0, 1.0], torch.full((5,), 0.4).double()
    for limits in (Truncation(), Truncation(top_k=5), Truncation(top_p=0.5)):

        def drawn(count: int, limits: Truncation = limits) -> list[int]:
            shape, first = (count, 700), temperatures[:count]
            weights = RowWeights(shape, temperature=first, truncation=limits)
            return batch_draw(rows[:count], numbers[:count], weights).token_ids.tolist()

        token_ids = drawn(5)
        assert token_ids[:3] == drawn(3)
        assert -1 <= token_ids[3] < 700
        assert token_ids[4] == -1


# -- seeds ----------------------------------------------------------------------------


@given(st.none() | st.integers(0, 2**64), st.integers(0, 40))
def test_stream_seeds_are_distinct_and_fit_signed_64_bits(seed: int | None, count: int) -> None:
    seeds = stream_seeds(seed, count)
    assert len(set(seeds)) == len(seeds) == count
    assert all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)


@given(st.integers(0, 2**64), st.integers(0, 20), st.integers(0, 20))
def test_the_first_seeds_do_not_depend_on_how_many_there_are(
    seed: int, few: int, more: int
) -> None:
    assert stream_seeds(seed, few + more)[:few] == stream_seeds(seed, few)


def test_neighbouring_seeds_share_no_stream() -> None:
    assert (
        len({stream_seed for seed in range(100) for stream_seed in stream_seeds(seed, 20)})
        == 2000
    )


def test_without_a_seed_the_streams_are_fresh() -> None:
    assert stream_seeds(None, 3) != stream_seeds(None, 3)


def test_the_stream_is_splitmix64() -> None:
    # The first outputs of the published reference implementation for seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [stream_uniform(1234567, position) for position in range(3)] == [
        (value >> 11) / 2**53 for value in published
    ]


def test_the_stream_is_uniform_and_seeds_are_independent() -> None:
    for numbers in (
        [stream_uniform(7, position) for position in range(4000)],
        [stream_uniform(seed, 0) for seed in range(4000)],
    ):
        assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-6
    pairs = np.array([[stream_uniform(s, 0), stream_uniform(s, 1)] for s in range(4000)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.08


def splitmix64(state: int, position: int) -> int:
    """The published reference implementation, which steps through all earlier outputs."""
    for _ in range(position + 1):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return mixed ^ (mixed >> 31)


WORDS = st.integers(0, 2**64 - 1)


@given(WORDS, st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(0, 60))
def test_numbers_of_members_are_those_of_their_streams(
    seed: int, members: list[int], step: int
) -> None:
    key = splitmix64(seed, 0)
    seeds = [splitmix64(key, member) >> 1 for member in members]
    assert [stream_seeds(seed, member + 1)[member] for member in members] == seeds
    expected = [(splitmix64(member_seed, step) >> 11) / 2**53 for member_seed in seeds]
    assert uniforms(seed, np.array(members), step).tolist() == expected
    steps = np.full(len(members), step)
    assert uniforms(seed, np.array(members), steps).tolist() == expected
    assert stream_uniforms(seeds, steps).tolist() == expected
    assert [stream_uniform(member_seed, step) for member_seed in seeds] == expected


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**40)), min_size=1))
def test_numbers_of_several_streams_are_those_of_each(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = [seed for seed, _ in pairs], [position for _, position in pairs]
    expected = [stream_uniform(*pair) for pair in pairs]
    assert stream_uniforms(seeds, positions).tolist() == expected
    wrapped = np.array([seed % 2**64 for seed in seeds], np.uint64)
    assert stream_uniforms(wrapped.view(np.int64), np.array(positions)).tolist() == expected


def test_several_numbers_of_a_member_begin_with_its_only_one_and_are_distinct() -> None:
    members, steps = np.repeat(np.arange(30), 20), np.tile(np.arange(20), 30)
    numbers = uniforms(7, members, steps, 5)
    assert numbers.shape == (600, 5)
    assert numbers[:, 0].tolist() == uniforms(7, members, steps).tolist()
    assert numbers[:, :3].tolist() == uniforms(7, members, steps, 3).tolist()
    assert len(set(numbers.flatten().tolist())) == 3000
    key = splitmix64(7, 0)
    word = splitmix64(splitmix64(key, 29) >> 1, 19)
    assert numbers[-1, 2] == (splitmix64(word, 1) >> 11) / 2**53


def test_numbers_of_members_and_steps_are_uniform_and_independent() -> None:
    numbers = uniforms(
        3, np.arange(2000)[:, None].repeat(10, 1).ravel(), np.tile(range(10), 2000)
    )
    table = numbers.reshape(2000, 10)
    assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-6
    for other in (uniforms(4, np.arange(2000), 0), table[:, 1], np.roll(table[:, 0], 1)):
        assert abs(np.corrcoef(table[:, 0], other)[0, 1]) < 0.11


RECORDED_SEEDS = [6017775124710473527, 6467540162864785327, 3570589976667487115]
RECORDED_UNIFORMS = [0.5920866617983251, 0.36581663040190193]


def test_these_numbers_are_the_same_on_every_machine() -> None:
    assert stream_seeds(0, 3) == RECORDED_SEEDS
    assert uniforms(2**70 + 5, np.array([0, 10**6]), 12).tolist() == RECORDED_UNIFORMS


@pytest.mark.parametrize(
    "function", [stream_seeds, lambda seed, _: uniforms(seed, np.ones(1), 0)]
)
def test_negative_seeds_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match="seed=-3; it must be 0 or more"):
        function(-3, 2)


def test_a_seed_of_any_size_gives_a_number_below_one() -> None:
    for seed in (0, -1, 2**63, 2**64 - 1, 2**200):
        assert 0 <= stream_uniform(seed, 10**6) < 1
