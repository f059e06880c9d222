"""`genlm.smc` against closed forms and against counts over all random numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm.smc import effective_sample_size, normalised_weights, systematic_resampling

LOG_WEIGHTS = st.lists(st.floats(-30, 30) | st.just(-math.inf), min_size=1, max_size=30).filter(
    lambda found: max(found) > -math.inf
)
UNIFORMS = st.floats(0, 1, exclude_max=True)
LARGEST = math.nextafter(1, 0)


def exact_weights(log_weights: list[float]) -> list[float]:
    largest = max(log_weights)
    weights = [math.exp(each - largest) for each in log_weights]
    return [weight / math.fsum(weights) for weight in weights]


@given(LOG_WEIGHTS, st.floats(-1e4, 1e4))
def test_weights_are_those_of_exp_and_do_not_depend_on_a_common_constant(log_weights, shift):
    expected = exact_weights(log_weights)
    shifted = [each + shift for each in log_weights]
    np.testing.assert_allclose(normalised_weights(log_weights), expected, atol=1e-14)
    np.testing.assert_allclose(normalised_weights(shifted), expected, atol=1e-9)


@given(LOG_WEIGHTS)
def test_the_effective_sample_size_is_kishs(log_weights):
    expected = 1 / math.fsum(weight**2 for weight in exact_weights(log_weights))
    assert effective_sample_size(log_weights) == pytest.approx(expected)
    assert 1 - 1e-9 <= expected <= len(log_weights) + 1e-9


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_equal_weights_are_as_many_as_there_are(count):
    assert effective_sample_size([-700.0] * count) == pytest.approx(count)
    assert effective_sample_size([0.0] + [-math.inf] * count) == 1


@given(LOG_WEIGHTS, UNIFORMS | st.just(0.0) | st.just(LARGEST), st.integers(0, 60))
def test_each_particle_is_chosen_its_share_of_times_rounded_up_or_down(
    log_weights, uniform, size
):
    chosen = systematic_resampling(log_weights, uniform, size)
    assert chosen.shape == (size,)
    assert (np.diff(chosen) >= 0).all()
    counts = np.bincount(chosen, minlength=len(log_weights))
    for weight, count in zip(exact_weights(log_weights), counts, strict=True):
        assert size * weight - 1 - 1e-9 < count < size * weight + 1 + 1e-9
        assert weight > 0 or count == 0


@given(LOG_WEIGHTS)
def test_each_particle_is_chosen_its_share_of_times_on_average(log_weights):
    """Over a grid of uniforms; each count changes at two of the grid's points at most."""
    size, grid = len(log_weights), 200
    counts = np.zeros(size)
    for index in range(grid):
        chosen = systematic_resampling(log_weights, (index + 0.5) / grid)
        counts += np.bincount(chosen, minlength=size)
    expected = size * np.array(exact_weights(log_weights))
    assert (np.abs(counts / grid - expected) <= 2 / grid + 1e-9).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_a_particle_without_weight_is_never_chosen(uniform):
    log_weights = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert set(systematic_resampling(log_weights, uniform, 100_001)) == {1, 3}


def test_arrays_give_arrays_and_tensors_give_tensors_of_their_dtype():
    array = np.log(np.array([1, 3], dtype=np.float32))
    tensor = torch.from_numpy(array)
    assert normalised_weights(array).dtype == np.float64
    assert normalised_weights(tensor).dtype == torch.float32
    torch.testing.assert_close(normalised_weights(tensor), torch.tensor([0.25, 0.75]))
    assert normalised_weights(torch.tensor([0, 0])).tolist() == [0.5, 0.5]
    assert systematic_resampling(array, 0.5).dtype == np.int64
    chosen = systematic_resampling(tensor, 0.1, size=4)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == [0, 1, 1, 1]


def test_tensors_with_gradients_and_of_half_precision_are_read():
    tensor = torch.zeros(3, requires_grad=True)
    assert not normalised_weights(tensor).requires_grad
    assert effective_sample_size(tensor.to(torch.bfloat16)) == pytest.approx(3)


def test_what_is_given_is_not_changed():
    array = np.array([0.0, 1.0])
    normalised_weights(array)[0] = 7
    systematic_resampling(array, 0.5)
    assert array.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "shape"),
        ([[0.0, 1.0]], "shape"),
        ([0.0, math.nan], "maximum of nan"),
        ([0.0, math.inf], "maximum of inf"),
        ([-math.inf, -math.inf], "maximum of -inf"),
    ],
)
@pytest.mark.parametrize("function", [effective_sample_size, normalised_weights])
def test_what_is_no_log_weights_is_refused(wrong, message, function):
    for given_as in (wrong, np.array(wrong), torch.tensor(wrong)):
        with pytest.raises(ValueError, match=message):
            function(given_as)


@pytest.mark.parametrize("uniform", [-0.1, 1.0, math.nan])
def test_a_number_that_is_no_uniform_is_refused(uniform):
    with pytest.raises(ValueError, match="from 0 to below 1"):
        systematic_resampling([0.0], uniform)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="size=-1"):
        systematic_resampling([0.0], 0.5, -1)
