"""Weights, effective sample size and resampling of particle filters.

All functions are pure functions of log-weights: natural logarithms up to a common constant,
`-inf` for weight 0. They compute in float64 on the host, which waits for a GPU once.

Reference: Chopin and Papaspiliopoulos, An Introduction to Sequential Monte Carlo, Springer
2020; resampling is chapter 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.arrays import host_array
from genlm.core.base.validation import checked_number, checked_size

Floats: TypeAlias = npt.NDArray[np.float64]
LogWeights: TypeAlias = Sequence[float] | npt.NDArray[np.floating] | torch.Tensor


def effective_sample_size(log_weights: LogWeights) -> float:
    """Return Kish's effective sample size, `1 / sum(w**2)` of the normalised weights.

    It is the number of particles if all weights are equal, and 1 if one particle has the whole
    weight. Particles are commonly resampled when it is below half their number.

    Args:
        log_weights: One number per particle, shape `(particles,)`.

    Raises:
        ValueError: The log-weights are not one finite number or `-inf` per particle, or all
            are `-inf`.
        TypeError: The log-weights are not numbers.
    """
    return float(_checked_weights(log_weights).effective_size)


@overload
def normalised_weights(log_weights: torch.Tensor) -> torch.Tensor: ...
@overload
def normalised_weights(log_weights: Sequence[float] | npt.NDArray[np.floating]) -> Floats: ...
def normalised_weights(log_weights: LogWeights) -> Floats | torch.Tensor:
    """Return the weights of the particles, divided by their sum.

    Args:
        log_weights: One number per particle, shape `(particles,)`.

    Returns:
        Weights, shape `(particles,)`, sum 1: a numpy array of float64, or for a torch tensor a
        new tensor of its dtype on its device.

    Raises:
        ValueError: As `effective_sample_size`.
        TypeError: As `effective_sample_size`.
    """
    weights = _checked_weights(log_weights).values
    weights /= weights.sum()
    if isinstance(log_weights, torch.Tensor):
        return _as_tensor(weights, log_weights)
    return weights


@overload
def systematic_resampling(
    log_weights: torch.Tensor, uniform: float, size: int | None = None
) -> torch.Tensor: ...
@overload
def systematic_resampling(
    log_weights: Sequence[float] | npt.NDArray[np.floating],
    uniform: float,
    size: int | None = None,
) -> npt.NDArray[np.int64]: ...
def systematic_resampling(
    log_weights: LogWeights, uniform: float, size: int | None = None
) -> npt.NDArray[np.int64] | torch.Tensor:
    """Choose ancestors by systematic resampling: particle `i` on average `size * w[i]` times.

    The points `(uniform + k) / size` are looked up in the cumulative weights, so a particle
    is chosen `floor` or `ceil` of `size * w[i]` times; a particle of weight 0 is never chosen.
    Source: Kitagawa, Monte Carlo Filter and Smoother, 1996.

    Args:
        log_weights: One number per particle, shape `(particles,)`.
        uniform: A random number, 0 <= uniform < 1, such as `rng.random()`.
        size: Number of ancestors; by default the number of particles.

    Returns:
        Indices of particles, ascending, shape `(size,)`, int64: a numpy array, or for a torch
        tensor a tensor on its device. The chosen particles have equal weights.

    Raises:
        ValueError: `uniform` or `size` is out of range, or as `effective_sample_size`.
        TypeError: `uniform`, `size` or the log-weights are not numbers.
    """
    uniforms = np.array([_checked_uniform(uniform)])
    weights = _checked_weights(log_weights).values
    count = len(weights) if size is None else checked_size(size, 0)
    ancestors = systematic_ancestors(weights[None], uniforms, count).reshape(-1)
    if isinstance(log_weights, torch.Tensor):
        return torch.from_numpy(ancestors).to(log_weights.device)
    return ancestors


def systematic_ancestors(weights: Floats, uniforms: Floats, size: int) -> npt.NDArray[np.int64]:
    """Choose ancestors as `systematic_resampling` in each of several filters.

    Args:
        weights: Weights of the particles, not all 0, up to a factor, shape
            `(filters, particles)`.
        uniforms: A random number for each filter, shape `(filters,)`.
        size: Number of ancestors in each filter.

    Returns:
        Shape `(filters, size)`, int64, ascending in each filter.
    """
    cumulative = weights.cumsum(axis=1)
    cumulative /= cumulative[:, -1:]
    # Number of points (uniform + k) / size below the cumulative weight of each particle.
    points = np.ceil(size * cumulative - uniforms[:, None])
    children = np.where(cumulative == 1, size, points).astype(np.int64)
    children[:, 1:] -= children[:, :-1].copy()
    members = np.arange(weights.size).repeat(children.ravel())
    ancestors: npt.NDArray[np.int64] = members.reshape(len(weights), size) % weights.shape[1]
    return ancestors


def filter_ancestors(
    weights: Floats, is_resampled: npt.NDArray[np.bool_], uniforms: Floats
) -> npt.NDArray[np.int64]:
    """Choose ancestors in some of several filters, and keep the particles of the others.

    Args:
        weights: As `systematic_ancestors`.
        is_resampled: Whether to choose ancestors in each filter, shape `(filters,)`.
        uniforms: A random number for each of these filters.

    Returns:
        Index of each particle's ancestor in its filter, shape `(filters, particles)`.
    """
    ancestors = np.tile(np.arange(weights.shape[1]), (len(weights), 1))
    ancestors[is_resampled] = systematic_ancestors(
        weights[is_resampled], uniforms, weights.shape[1]
    )
    return ancestors


@overload
def resampled(
    log_weights: torch.Tensor, uniform: float, below: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def resampled(
    log_weights: Sequence[float] | npt.NDArray[np.floating],
    uniform: float,
    below: float = 0.5,
) -> tuple[npt.NDArray[np.int64], Floats]: ...
def resampled(
    log_weights: LogWeights, uniform: float, below: float = 0.5
) -> tuple[npt.NDArray[np.int64] | torch.Tensor, Floats | torch.Tensor]:
    """Choose ancestors if the effective sample size is small; keep all particles otherwise.

        ancestors, log_weights = resampled(log_weights, rng.random())
        population = population[ancestors]

    Every resampled particle has the mean weight, so the mean of the final weights is an
    unbiased estimate of the evidence.

    Args:
        log_weights: One number per particle, shape `(particles,)`.
        uniform: A random number as for `systematic_resampling`.
        below: Threshold of the effective sample size, as a share of the number of particles.

    Returns:
        Ancestors, shape `(particles,)`, int64, and log-weights of the new particles: numpy
        arrays, these of float64, or for a torch tensor tensors on its device, these of its
        dtype.

    Raises:
        ValueError: `below` is not a share from 0 to 1, or as `systematic_resampling`.
        TypeError: As `systematic_resampling`.
    """
    logs = float64_array(log_weights)
    _checked_weights(logs)
    ancestors, new_logs = _resampled(logs[None], np.array([_checked_uniform(uniform)]), below)
    return _like(log_weights, ancestors, new_logs[0])


@overload
def batch_resampled(
    log_weights: torch.Tensor, uniforms: npt.ArrayLike, below: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def batch_resampled(
    log_weights: npt.NDArray[np.floating], uniforms: npt.ArrayLike, below: float = 0.5
) -> tuple[npt.NDArray[np.int64], Floats]: ...
def batch_resampled(
    log_weights: npt.NDArray[np.floating] | torch.Tensor,
    uniforms: npt.ArrayLike,
    below: float = 0.5,
) -> tuple[npt.NDArray[np.int64] | torch.Tensor, Floats | torch.Tensor]:
    """Resample each of several filters as `resampled` does; their particles are one population.

        ancestors, log_weights = batch_resampled(log_weights, rng.random(len(log_weights)))
        population = population[ancestors]

    A filter whose particles all have weight 0 keeps its particles.

    Args:
        log_weights: One number per particle, shape `(filters, particles)`.
        uniforms: A random number for each filter, shape `(filters,)`.
        below: As `resampled`.

    Returns:
        Ancestors among the particles of all filters, one filter after the other, shape
        `(filters * particles,)`, int64, and log-weights of the new particles, shape
        `(filters, particles)`: numpy arrays or tensors, as `resampled`.

    Raises:
        ValueError: A log-weight is NaN or `inf`, or a shape, `uniforms` or `below` is wrong.
        TypeError: The arguments are not numbers.
    """
    logs = float64_array(log_weights)
    if logs.ndim != 2 or not logs.shape[1]:
        raise ValueError(
            f"expected log-weights of shape (filters, particles); found {logs.shape}"
        )
    if not (logs < np.inf).all():  # true for NaN
        raise ValueError("expected log-weights that are finite or -inf; found NaN or inf")
    numbers = host_array(uniforms, "uniforms")
    if numbers.shape != logs.shape[:1]:
        raise ValueError(
            f"uniforms of shape {numbers.shape} for {len(logs)} filters; pass one for each"
        )
    checked = np.array([_checked_uniform(number) for number in numbers.tolist()])
    return _like(log_weights, *_resampled(logs, checked, below))


def _resampled(
    logs: Floats, uniforms: Floats, below: float
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Resample each of several filters; see `batch_resampled`."""
    if not 0 <= (below := checked_number("below", below)) <= 1:
        raise ValueError(f"below={below!r}; expected a share from 0 to 1")
    weights, (filters, size) = RelativeWeights.of(logs), logs.shape
    sizes = weights.effective_size
    is_resampled = (sizes < below * size) & (sizes > 0)
    ancestors = filter_ancestors(weights.values, is_resampled, uniforms[is_resampled])
    ancestors += np.arange(0, filters * size, size)[:, None]
    new_logs = np.where(is_resampled[:, None], weights.log_mean[:, None], logs)
    return ancestors.reshape(-1), new_logs


def _like(
    log_weights: LogWeights, ancestors: npt.NDArray[np.int64], logs: Floats
) -> tuple[npt.NDArray[np.int64] | torch.Tensor, Floats | torch.Tensor]:
    """Return ancestors and log-weights as tensors if the given log-weights are a tensor."""
    if not isinstance(log_weights, torch.Tensor):
        return ancestors, logs
    return torch.from_numpy(ancestors).to(log_weights.device), _as_tensor(logs, log_weights)


class RelativeWeights(NamedTuple):
    """Weights of the particles of one or several filters, relative to the largest of a filter.

    Attributes:
        values: Weights divided by the largest one, all 0 if it is 0, shape `(..., n)`.
        log_largest: Log of the largest weight, 0 if it is 0, shape `(...)`.
    """

    values: Floats
    log_largest: Floats

    @classmethod
    def of(cls, log_weights: Floats) -> RelativeWeights:
        """Return the weights with these logarithms, shape `(..., n)`."""
        largest = log_weights.max(axis=-1)
        largest = np.where(largest == -np.inf, 0.0, largest)
        return cls(np.exp(log_weights - largest[..., None]), largest)

    @property
    def log_mean(self) -> Floats:
        """Log of the mean weight, exact for equal weights, shape `(...)`."""
        with np.errstate(divide="ignore"):  # of log 0
            log_mean: Floats = np.log(self.values.mean(axis=-1)) + self.log_largest
        return log_mean

    @property
    def effective_size(self) -> Floats:
        """Effective sample size, 0 if all weights are 0, shape `(...)`."""
        squares = np.square(self.values).sum(axis=-1)
        size: Floats = np.square(self.values.sum(axis=-1)) / np.where(squares > 0, squares, 1)
        return size


def float64_array(values: LogWeights) -> Floats:
    """Return log-weights as a numpy array."""
    array = host_array(values, "log_weights")
    if array.dtype.kind not in "iuf" and array.size:
        raise TypeError(f"log_weights has values of type {array.dtype}; expected numbers")
    return array.astype(np.float64, copy=False)


def _checked_uniform(uniform: float) -> float:
    if not 0 <= (number := checked_number("uniform", uniform)) < 1:
        raise ValueError(f"uniform={number!r}; expected a number from 0 to below 1")
    return number


def _as_tensor(numbers: Floats, log_weights: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of the dtype of log-weights, at least of floats, on their device."""
    dtype = log_weights.dtype if log_weights.is_floating_point() else torch.float64
    return torch.tensor(numbers, dtype=dtype, device=log_weights.device)


def _checked_weights(log_weights: LogWeights) -> RelativeWeights:
    """Return the weights of particles; raise errors as `effective_sample_size`."""
    logs = float64_array(log_weights)
    if logs.ndim != 1 or not logs.size:
        raise ValueError(f"expected log-weights of shape (particles,); found {logs.shape}")
    largest = logs.max()  # NaN if a log-weight is NaN
    if largest == -np.inf:
        raise ValueError(
            f"no particle survived: all {logs.size} log-weights are -inf. No proposed token is "
            f"possible under the masks or potentials; end the program here, or restart it with "
            f"more particles"
        )
    if not np.isfinite(largest):
        raise ValueError(
            f"expected log-weights that are finite or -inf, at least one finite; found a "
            f"maximum of {largest}"
        )
    return RelativeWeights.of(logs)
