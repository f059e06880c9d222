"""The stream of numbers, and tokens drawn by it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from genlm_vllm.draws import drawn_tokens, uniform


def test_the_stream_is_splitmix64() -> None:
    # The first outputs of the published reference implementation for seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [uniform(1234567, place) for place in range(3)] == [
        (value >> 11) / 2**53 for value in published
    ]


def test_the_stream_is_uniform_and_seeds_are_independent() -> None:
    for numbers in (
        [uniform(7, place) for place in range(4000)],
        [uniform(seed, 0) for seed in range(4000)],
    ):
        assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-6
    pairs = np.array([[uniform(s, 0), uniform(s, 1)] for s in range(4000)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.08


def test_a_seed_of_any_size_gives_a_number_below_one() -> None:
    for seed in (0, -1, 2**63, 2**64 - 1, 2**200):
        assert 0 <= uniform(seed, 10**6) < 1


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_tokens_invert_the_distribution_function(temperature: float) -> None:
    torch.manual_seed(0)
    rows = torch.randn(200, 50).log_softmax(-1)
    uniforms = torch.rand(200, dtype=torch.float64).tolist()
    found = drawn_tokens(rows, [temperature] * 200, uniforms).tolist()
    for row, number, token in zip(rows, uniforms, found, strict=True):
        weights = np.exp(row.double().numpy() / temperature)
        cumulative = np.cumsum(weights) / weights.sum()
        assert token == int(np.searchsorted(cumulative, number, side="right"))


def test_tokens_occur_as_often_as_they_should() -> None:
    row = torch.tensor([0.5, 0.0, 0.3, 0.2]).log()
    count = 20_000
    uniforms = [uniform(3, place) for place in range(count)]
    tokens = drawn_tokens(row.expand(count, 4), [1.0] * count, uniforms)
    found = torch.bincount(tokens, minlength=4)
    assert found[1] == 0
    expected = count * np.array([0.5, 0.3, 0.2])
    assert scipy.stats.chisquare(found[[0, 2, 3]].numpy(), expected).pvalue > 1e-6


def test_temperature_zero_is_greedy_beside_others() -> None:
    rows = torch.tensor([[0.4, 0.6], [0.4, 0.6], [0.4, 0.6]]).log()
    assert drawn_tokens(rows, [0.0, 1.0, 1.0], [0.0, 0.0, 0.9]).tolist() == [1, 0, 1]
    assert drawn_tokens(rows, [0.0] * 3, [0.0, 0.5, 0.9]).tolist() == [1, 1, 1]


def test_the_smallest_temperature_draws_the_most_likely_token() -> None:
    rows = torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.4, 0.6]]).log()
    smallest = 5e-324
    assert drawn_tokens(rows, [smallest] * 2, [0.0, 0.9]).tolist() == [1, 2]


def test_the_largest_number_draws_the_last_possible_token() -> None:
    largest = 1 - 2**-53
    for size in (2, 3, 1000):
        rows = torch.full((1, size + 2), float("-inf"))
        rows[0, 1 : size + 1] = torch.randn(size).log_softmax(-1)
        assert drawn_tokens(rows, [1.0], [largest]).item() <= size
        assert drawn_tokens(rows, [1.0], [0.0]).item() >= 1
