"""Sequential Monte Carlo: `steer`, a particle filter over a model, and its arithmetic.

`normalised_weights`, `effective_sample_size` and `systematic_resampling` are pure functions of
log-weights, which are natural logarithms up to a common constant: a particle whose weight is 0
has `-inf`. They compute in float64 on the host, which waits for a GPU once.

Introduced in Chopin and Papaspiliopoulos, An Introduction to Sequential Monte Carlo, Springer
2020; resampling is its chapter 9.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.blocking import run_blocking

if TYPE_CHECKING:
    from genlm.core.context import TokenIds
    from genlm.core.lm import AsyncLM
    from genlm.core.population import Population
    from genlm.core.row_masks import MasksLike
    from genlm.core.validation import Integers

__all__ = [
    "Constraint",
    "Particles",
    "effective_sample_size",
    "normalised_weights",
    "resampled",
    "steer",
    "steer_sync",
    "systematic_resampling",
]

Floats: TypeAlias = npt.NDArray[np.float64]
LogWeights: TypeAlias = Sequence[float] | npt.NDArray[np.floating] | torch.Tensor


class Constraint(Protocol):
    """Which next tokens the members of a population may have; immutable.

    Attributes:
        masks: As `Population.draw` takes them: one for each member, or several that
            `mask_index` refers to.
        mask_index: The mask of each member, shape `(n,)`; None if member i has mask i, or all
            have the only one.
    """

    @property
    def masks(self) -> MasksLike: ...  # noqa: D102
    @property
    def mask_index(self) -> npt.NDArray[np.integer] | torch.Tensor | None: ...  # noqa: D102

    def advance(self, token_ids: npt.NDArray[np.int64]) -> Self:
        """Return the constraint after each member was extended by a token; -1 for none."""
        ...

    def __getitem__(self, ancestors: npt.NDArray[np.int64]) -> Self:
        """Return the constraint of chosen members, which may be repeated."""
        ...


@dataclass(frozen=True)
class Particles:
    """The particles of a filter after a step.

    Attributes:
        population: The sequences, prompt included; `population.finished` says which ended.
        log_weights: Shape `(n,)`, float64; `-inf` for particles that cannot be continued.
        ancestors: The particle of the step before that each continues, shape `(n,)`, int64.
        token_ids: The token that each was extended by before it was chosen, in the order of
            the step before, shape `(n,)`, int64; -1 for none.
    """

    population: Population
    log_weights: Floats
    ancestors: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]

    @property
    def log_evidence(self) -> float:
        """Log of the mean weight; its exponential is an unbiased estimate of the evidence.

        With a constraint and no potential, the evidence is the probability that the model by
        itself keeps to the constraint for as many tokens.
        """
        return float(np.logaddexp.reduce(self.log_weights) - np.log(len(self.log_weights)))

    @property
    def weights(self) -> Floats:
        """Weights that sum to 1, shape `(n,)`, float64; see `normalised_weights`."""
        return normalised_weights(self.log_weights)


async def steer(
    llm: AsyncLM,
    prompt: TokenIds,
    size: int,
    *,
    max_tokens: int,
    constraint: Constraint | None = None,
    potential: Callable[[Population], LogWeights] | None = None,
    stop: Integers | None = None,
    temperature: float = 1.0,
    resample_below: float = 0.5,
    seed: int | None = None,
) -> AsyncIterator[Particles]:
    """Continue a prompt by a particle filter, and yield the particles after each step.

    Each particle is extended by a token drawn from what the constraint allows, and its weight
    is multiplied by the ratio of the model's probability of the token and that of the draw,
    and by the change of the potential. When the effective sample size is small, ancestors are
    chosen by `systematic_resampling`. Ends when all particles are finished or have weight 0.

        async for particles in genlm.smc.steer(llm, prompt, 100, max_tokens=40, seed=0):
            print(particles.log_evidence)

    Args:
        llm: The model.
        prompt: Token ids or a `Context`.
        size: Number of particles.
        max_tokens: Number of steps at most.
        constraint: Of `size` members, all of which have the prompt.
        potential: Log of what the model's probability of a sequence is multiplied by, for each
            member, shape `(n,)`; `-inf` for a sequence that cannot be continued.
        stop: Token ids that finish a particle; by default the tokenizer's end of text, if it
            has one.
        temperature: Of the draws; the weights account for it.
        resample_below: Share of the particles below which the effective sample size leads to
            resampling: 0 for never, 1 for at every step in which weights differ.
        seed: Makes all draws reproducible; None takes fresh randomness.

    Raises:
        ValueError: A number out of range.
        GenlmError: As `Population.draw`.
    """
    if not 0 <= resample_below <= 1:
        raise ValueError(f"resample_below={resample_below!r}; expected a share from 0 to 1")
    rng = np.random.default_rng(seed)
    end = llm.vocabulary.eos_token_id
    ends = np.array(([] if end is None else [end]) if stop is None else stop, np.int64)
    draw_seed = int(rng.integers(2**63))
    state = Particles(
        llm.population(prompt, size), np.zeros(size), np.arange(size), np.full(size, -1)
    )
    log_potential = np.zeros(size)
    for _ in range(max_tokens):
        drawn = await state.population.draw(
            None if constraint is None else constraint.masks,
            mask_index=None if constraint is None else constraint.mask_index,
            temperature=temperature,
            seed=draw_seed,
        )
        token_ids, gain = drawn.token_ids.numpy(), drawn.log_mass.double().numpy()
        if temperature != 1:
            is_drawn = token_ids >= 0
            gain[is_drawn] = (drawn.logprobs - drawn.draw_logprob).double().numpy()[is_drawn]
        population = state.population.extend(token_ids)
        log_weights = state.log_weights + gain
        if potential is not None:
            found, live = _float64(potential(population)), log_weights > -np.inf
            log_weights[live] += found[live] - log_potential[live]
            log_potential = np.where(live, found, log_potential)
        is_over = np.isin(token_ids, ends) | (log_weights == -np.inf)
        if llm.max_context is not None:
            is_over |= population.lengths.numpy() > llm.max_context
        population = population.finish(is_over)
        if constraint is not None:
            constraint = constraint.advance(token_ids)
        state = Particles(population, log_weights, np.arange(size), token_ids)
        has_weight = bool(np.isfinite(log_weights).any())
        if has_weight and effective_sample_size(log_weights) < resample_below * size:
            chosen = systematic_resampling(log_weights, rng.random())
            state = replace(
                state,
                population=population[chosen],
                log_weights=np.full(size, state.log_evidence),
                ancestors=chosen,
            )
            log_potential = log_potential[chosen]
            constraint = None if constraint is None else constraint[chosen]
        yield state
        if state.population.finished.all():
            return


def steer_sync(
    llm: AsyncLM, prompt: TokenIds, size: int, *, max_tokens: int, **options: Any
) -> Iterator[Particles]:
    """Yield what `steer` yields, which has all options; waits on the calling thread."""
    states = steer(llm, prompt, size, max_tokens=max_tokens, **options)
    while True:
        try:
            yield run_blocking(anext(states))  # type: ignore[arg-type]
        except StopAsyncIteration:
            return


def effective_sample_size(log_weights: LogWeights) -> float:
    """Return how many equally weighted particles have the same variance: Kish's figure.

    It is `1 / sum(w**2)` of the normalised weights: the number of particles if their weights
    are equal, 1 if one particle has all the weight. Programs resample below half the particles.

    Args:
        log_weights: One number for each particle, shape `(particles,)`.

    Raises:
        ValueError: They are not one finite number or `-inf` for each particle, or no
            particle survived: all are `-inf`.
    """
    return float(1 / np.square(_normalised(log_weights)).sum())


@overload
def normalised_weights(log_weights: torch.Tensor) -> torch.Tensor: ...
@overload
def normalised_weights(log_weights: Sequence[float] | npt.NDArray[np.floating]) -> Floats: ...
def normalised_weights(log_weights: LogWeights) -> Floats | torch.Tensor:
    """Return the weights of the particles, divided by their sum.

    Args:
        log_weights: One number for each particle, shape `(particles,)`.

    Returns:
        Shape `(particles,)`, sum 1: float64 of numpy, or for a torch tensor a new tensor of its
        dtype on its device.

    Raises:
        ValueError: As `effective_sample_size`.
    """
    weights = _normalised(log_weights)
    if isinstance(log_weights, torch.Tensor):
        dtype = log_weights.dtype if log_weights.is_floating_point() else torch.float64
        return torch.from_numpy(weights).to(log_weights.device, dtype)
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
    """Choose ancestors: particle `i` about `size * w[i]` times, and that on average.

    The points `(uniform + k) / size` are looked up in the cumulative weights, so each particle
    is chosen `floor` or `ceil` of `size * w[i]` times; a particle without weight never is.
    Kitagawa, Monte Carlo Filter and Smoother, 1996.

    Args:
        log_weights: One number for each particle, shape `(particles,)`.
        uniform: A random number, 0 <= uniform < 1, such as `rng.random()`.
        size: How many to choose; by default as many as there are.

    Returns:
        Indices of particles, ascending, shape `(size,)`, int64: a numpy array, or for a torch
        tensor a tensor on its device. All weights are equal afterwards.

    Raises:
        ValueError: `uniform` or `size` is out of range, or as `effective_sample_size`.
    """
    if not 0 <= uniform < 1:
        raise ValueError(f"uniform={uniform!r}: expected a number from 0 to below 1")
    weights = _normalised(log_weights)
    count = len(weights) if size is None else size
    if count < 0:
        raise ValueError(f"size={size!r}: expected a number of particles")
    cumulative = np.cumsum(weights)
    points = (uniform + np.arange(count)) / max(count, 1)
    found = np.searchsorted(cumulative / cumulative[-1], points, side="right")
    # The last point may be rounded to 1, which is beyond every particle.
    last = int(np.flatnonzero(weights)[-1])
    chosen: npt.NDArray[np.int64] = np.minimum(found, last).astype(np.int64)
    if isinstance(log_weights, torch.Tensor):
        return torch.from_numpy(chosen).to(log_weights.device)
    return chosen


def resampled(
    log_weights: LogWeights, uniform: float, below: float = 0.5
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Choose ancestors if weights have become too unequal; keep all particles otherwise.

        ancestors, log_weights = resampled(log_weights, rng.random())
        population = population[ancestors]

    Resampled particles all have the mean weight, so the mean of the weights at the end is an
    unbiased estimate of the evidence.

    Args:
        log_weights: One number for each particle, shape `(particles,)`.
        uniform: A random number, as `systematic_resampling` takes it.
        below: Share of the particles below which the effective sample size leads to resampling.

    Returns:
        The ancestor of each particle, shape `(particles,)`, int64, and its log-weight, float64.

    Raises:
        ValueError: As `systematic_resampling`.
    """
    given = _float64(log_weights)
    size = len(given)
    if effective_sample_size(given) >= below * size:
        return np.arange(size), given
    log_mean = np.logaddexp.reduce(given) - np.log(size)
    return systematic_resampling(given, uniform), np.full(size, log_mean)


def _float64(values: LogWeights) -> Floats:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def _normalised(log_weights: LogWeights) -> Floats:
    given = _float64(log_weights)
    if given.ndim != 1 or not given.size:
        raise ValueError(f"expected log-weights of shape (particles,); found {given.shape}")
    largest = given.max()  # nan if one is
    if largest == -np.inf:
        raise ValueError(
            f"no particle survived: all {given.size} log-weights are -inf. Nothing that was "
            f"proposed is possible under the masks or potentials; end the program here, or "
            f"begin again with more particles"
        )
    if not np.isfinite(largest):
        raise ValueError(
            f"expected log-weights that are finite or -inf, at least one finite; found a "
            f"maximum of {largest}"
        )
    weights: Floats = np.exp(given - largest)
    weights /= weights.sum()
    return weights
