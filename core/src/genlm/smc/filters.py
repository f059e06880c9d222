"""`Filters`: the particle filters of `steer` and `batch_steer`, which step together.

The particles of all filters are the members of one population, filter after filter, so that a
step is one draw, one extension and one selection of ancestors, whatever the number of filters.
Weights are arrays of shape `(filters, size)`; arrays of shape `(filters * size,)` have one
element for each member of the population.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.constraints.protocol import Constraint, attribute_values, checked_result
from genlm.core.base.arrays import host_array
from genlm.core.model.population import Population
from genlm.core.rows.draws import DrawnTokens
from genlm.core.rows.sampling import SeedStreams, stream_seeds
from genlm.core.vocab.text import search_stop
from genlm.smc.particles import BatchStep, ParticlesBatch
from genlm.smc.resampling import (
    Floats,
    LogWeights,
    RelativeWeights,
    filter_ancestors,
)

if TYPE_CHECKING:
    from genlm.core.model.members import ArrayLike

    Bias: TypeAlias = ArrayLike | Callable[[Population], ArrayLike | Awaitable[ArrayLike]]
    Potential: TypeAlias = Callable[[Population], LogWeights | Awaitable[LogWeights]]

Flags: TypeAlias = npt.NDArray[np.bool_]
Integers64: TypeAlias = npt.NDArray[np.int64]


class Filters:
    """Particle filters of the same number of particles, and what their next step depends on.

    The particles of a filter do not depend on the other filters: the random numbers of its
    draws and ancestors are derived from its seed.

    Args:
        batch: The particles before the first step.
        constraint: Constraint of all particles.
        potential: As `steer`, of the population of all particles.
        bias: As `steer`, for the population of all particles.
        max_tokens: Maximum number of steps.
        ends: Token ids that finish a particle.
        stop_texts: Texts that finish a particle.
        temperature: Temperature of the draws.
        resample_below: Threshold of the effective sample size, as a share of `size`.
        potential_every: Number of steps between two evaluations of the potential.
        seeds: Random seed of each filter.
    """

    def __init__(
        self,
        batch: ParticlesBatch,
        constraint: Constraint | None,
        potential: Potential | None,
        bias: Bias | None,
        *,
        max_tokens: int,
        ends: Integers64,
        stop_texts: tuple[bytes, ...],
        temperature: float,
        resample_below: float,
        potential_every: int,
        seeds: Sequence[int],
    ) -> None:
        self._batch = batch
        self._constraint = constraint
        self._potential = potential
        self._bias = bias
        self._is_end = np.zeros(batch.llm.vocab_size + 1, bool)  # the last for -1, no token
        self._is_end[ends] = True
        self._stop_texts = stop_texts
        self._tails = np.full(len(batch.population), b"", object)
        self._temperature = temperature
        self._resample_below = resample_below
        self._potential_every = potential_every
        self._max_tokens = max_tokens
        self._limits = np.minimum(_room(batch), max_tokens)
        self._running = self._limits > 0
        self._random = [np.random.default_rng(seed) for seed in seeds]
        draw_seeds = [int(random.integers(2**63)) for random in self._random]
        streams = [stream_seeds(seed, batch.size) for seed in draw_seeds]
        # A user-defined proposal of a single filter gets an integer.
        self._seed = (
            draw_seeds[0] if len(batch) == 1 else SeedStreams(np.array(streams).reshape(-1))
        )
        for random in self._random:
            # Skips the numbers with which an earlier filter resampled these particles.
            random.random(batch.population._step)  # noqa: SLF001 - internal to genlm
        # The factors of the weight of each particle, so that a new value replaces the last one.
        self._log_weights = batch.log_weights
        self._step_counts = batch.step_counts
        self._constraint_logs = np.zeros(len(batch.population))
        self._potential_logs = np.zeros(len(batch.population))
        self._in_order = np.tile(np.arange(batch.size), (len(batch), 1))
        self._in_order.setflags(write=False)  # of all steps without resampling
        has_own_proposal = constraint is not None and constraint._has_own_proposal  # noqa: SLF001
        self._gains_are_masses = temperature == 1 and bias is None and not has_own_proposal

    async def run(self, *, progress: bool) -> AsyncGenerator[ParticlesBatch, None]:
        """Make the steps of all filters, and return the particles after each.

        Args:
            progress: Whether to show a progress bar.
        """
        from tqdm.auto import tqdm

        steps = int(self._limits.max(initial=0))
        with tqdm(total=steps, desc="steer", unit="step", disable=not progress) as bar:
            while self._running.any():
                self._batch = await self._step()
                _show(bar, self._batch)
                yield self._batch
        is_cut = ~self._batch.population.finished.numpy() & self._of_members(
            self._limits < self._max_tokens
        )
        if is_cut.any():
            self._batch.llm._log_cut(  # noqa: SLF001 - as `sample` does
                int(is_cut.sum()), len(is_cut), self._max_tokens
            )

    async def _step(self) -> ParticlesBatch:
        """Draw a token for each particle, update the weights, and resample filters."""
        batch, size = self._batch, self._batch.size
        active = self._of_members(self._running)
        population = batch.population
        drawn = await self._draw(population if active.all() else population.finish(~active))
        # A copy: tensors that are kept divide the memory in which steps allocate rows.
        token_ids = drawn.token_ids.numpy().copy()
        gain = drawn.log_mass if self._gains_are_masses else drawn.logprobs - drawn.draw_logprob
        log_weights = self._log_weights.ravel() + gain.double().numpy()
        population = population.extend(token_ids)
        is_over = self._is_end[token_ids]
        if self._stop_texts:
            is_over |= self._completes_stop_text(token_ids)
        if self._constraint is not None:
            advanced = self._constraint.advance(token_ids)
            self._constraint = checked_result(advanced, self._constraint, "advance")
            is_over |= attribute_values(self._constraint, "finished")
            name = f"{type(self._constraint).__name__}.log_potential"
            self._constraint_logs = _reweighted(
                log_weights, active, self._constraint.log_potential, self._constraint_logs, name
            )
        population = population.finish(is_over | (log_weights == -np.inf))
        self._step_counts = step_counts = self._step_counts + self._running
        if self._potential is not None:
            is_last = self._all_finished(population) | (step_counts >= self._limits)
            is_due = self._running & (is_last | (step_counts % self._potential_every == 0))
            if is_due.any():
                values = self._potential(population)
                if isinstance(values, Awaitable):
                    values = await values
                due = self._of_members(is_due)
                self._potential_logs = _reweighted(
                    log_weights, due, values, self._potential_logs, "the potential"
                )
                population = population.finish(log_weights == -np.inf)
        self._running &= ~self._all_finished(population) & (step_counts < self._limits)
        token_ids, log_weights, finished = (
            column.reshape(-1, size)
            for column in (token_ids, log_weights, population.finished.numpy())
        )
        weights = RelativeWeights.of(log_weights)
        is_resampled = self._running & (weights.effective_size < self._resample_below * size)
        ancestors, next_log_weights = self._in_order, log_weights.copy()
        if is_resampled.any():
            places = is_resampled.nonzero()[0].tolist()
            uniforms = np.array([self._random[place].random() for place in places])
            ancestors = filter_ancestors(weights.values, is_resampled, uniforms)
            members = (ancestors + np.arange(0, len(population), size)[:, None]).ravel()
            population = population[members]
            self._select(members)
            means = weights.log_mean[:, None]
            next_log_weights = np.where(is_resampled[:, None], means, log_weights)
        step = BatchStep(token_ids, log_weights, finished, ancestors, is_resampled)
        steps, self._log_weights = (*batch.steps, step), next_log_weights
        return ParticlesBatch(
            population, next_log_weights.copy(), steps, step_counts.copy(), batch.llm
        )

    def _of_members(self, values: Flags) -> Flags:
        """Return flags of filters for each of their members."""
        return np.repeat(values, self._batch.size)

    def _all_finished(self, population: Population) -> Flags:
        """Return whether all particles of each filter are finished."""
        finished: Flags = population.finished.numpy().reshape(-1, self._batch.size)
        return np.logical_and.reduce(finished, axis=1)  # type: ignore[no-any-return]

    async def _draw(self, population: Population) -> DrawnTokens:
        options: dict[str, Any] = {"temperature": self._temperature, "seed": self._seed}
        if self._bias is not None:
            bias = self._bias(population) if callable(self._bias) else self._bias
            options["bias"] = await bias if isinstance(bias, Awaitable) else bias
        if self._constraint is None:
            return await population.draw(**options)
        return await self._constraint.draw(population, **options)

    def _completes_stop_text(self, token_ids: Integers64) -> Flags:
        """Return whether the token drawn for each particle completes a stop text."""
        is_complete, byte_vocab = np.zeros(len(token_ids), bool), self._batch.llm.byte_vocab
        for member in np.flatnonzero(token_ids >= 0).tolist():
            text = self._tails[member] + bytes(byte_vocab[token_ids[member]])
            is_complete[member], self._tails[member] = search_stop(text, self._stop_texts)
        return is_complete

    def _select(self, ancestors: Integers64) -> None:
        """Continue with the ancestors of resampled particles."""
        self._constraint_logs = self._constraint_logs[ancestors]
        self._potential_logs = self._potential_logs[ancestors]
        self._tails = self._tails[ancestors]
        if self._constraint is not None:
            selected = self._constraint[ancestors]
            self._constraint = checked_result(selected, self._constraint, "indexing")


def _room(batch: ParticlesBatch) -> Floats:
    """Return the number of tokens for which the contexts of each filter have room."""
    population = batch.population
    lengths = np.where(population.finished.numpy(), 0, population.lengths.numpy())
    room: Floats = (
        (batch.llm.max_context or math.inf) + 1.0 - lengths.reshape(-1, batch.size).max(axis=1)
    )
    return room


def _reweighted(
    log_weights: Floats, flags: Flags, values: LogWeights, before: Floats, name: str
) -> Floats:
    """Replace a factor of the weights of some particles, in place.

    Args:
        log_weights: Log-weights of all particles, shape `(n,)`.
        flags: The particles whose factor is replaced; those of weight 0 are left out.
        values: Logs of the new factors, shape `(n,)` or one number.
        before: Logs of the factors that the weights contain, shape `(n,)`.
        name: Name of the values for errors.

    Returns:
        Logs of the factors that the weights now contain.
    """
    live = flags & (log_weights > -np.inf)
    checked = checked_logs(values, live, name)
    after = np.where(live, checked, before)
    log_weights[live] += after[live] - before[live]
    return after


def checked_logs(values: LogWeights, live: Flags, name: str) -> Floats:
    """Return log-factors or log-weights, of which those of live particles are checked."""
    try:
        array = host_array(values, name)
        kind = array.dtype.kind
    except ValueError:  # lists of different lengths
        kind = "O"
    if kind == "b":
        raise TypeError(
            f"{name} has booleans; expected log-factors: 0 for True, -inf for False"
        )
    if kind not in "iuf":
        raise TypeError(
            f"{name} is {type(values).__name__}; expected one number for each of "
            f"{len(live)} particles"
        )
    potentials = array.astype(np.float64, copy=False)
    if potentials.shape not in {(), live.shape}:
        raise ValueError(
            f"{name} has shape {potentials.shape}; expected one number for each of "
            f"{len(live)} particles"
        )
    wrong = live & ~(potentials < np.inf)
    if wrong.any():
        raise ValueError(
            f"{name} is NaN or inf for {wrong.sum()} of {len(live)} particles, the "
            f"first at index {wrong.argmax()}; expected finite numbers or -inf"
        )
    return potentials


def _show(bar: Any, batch: ParticlesBatch) -> None:
    """Advance a progress bar, unless it is hidden."""
    if not bar.disable:
        effective = RelativeWeights.of(batch.steps[-1].log_weights).effective_size.mean()
        finished = int(batch.population.finished.sum())
        bar.set_postfix_str(f"effective {effective:.1f}, finished {finished}", refresh=False)
        bar.update()
