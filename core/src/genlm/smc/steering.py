"""`steer`: a particle filter over a model."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.constraints.protocol import Constraint, Language, attribute_values
from genlm.core.base.arrays import host_array
from genlm.core.base.blocking import blocking_iterator, off_loop
from genlm.core.base.validation import checked_integer, checked_number, checked_stop
from genlm.core.model.population import Population
from genlm.core.rows.draws import DrawnTokens
from genlm.core.rows.sampling import checked_seed
from genlm.core.vocab.text import search_stop
from genlm.smc.particles import History, Particles, Step
from genlm.smc.resampling import (
    Floats,
    LogWeights,
    systematic_resampling,
)

if TYPE_CHECKING:
    from genlm.core.base.validation import Stop
    from genlm.core.model.context import TokenIds
    from genlm.core.model.lm import AsyncLM
    from genlm.core.model.members import ArrayLike

    Bias: TypeAlias = ArrayLike | Callable[[Population], ArrayLike | Awaitable[ArrayLike]]
    Potential: TypeAlias = Callable[[Population], LogWeights | Awaitable[LogWeights]]

logger = logging.getLogger("genlm")


async def steer(
    llm: AsyncLM,
    prompt: TokenIds | Population,
    size: int | None = None,
    *,
    max_tokens: int,
    log_weights: LogWeights | None = None,
    constraint: Language | Constraint | None = None,
    text: bytes = b"",
    potential: Potential | None = None,
    bias: Bias | None = None,
    stop: Stop | None = None,
    temperature: float = 1.0,
    resample_below: float = 0.5,
    seed: int | None = None,
    progress: bool = False,
) -> AsyncGenerator[Particles, None]:
    """Continue a prompt with a particle filter, and yield the particles after each step.

    Every particle is extended by a token drawn from the tokens that the constraint allows. Its
    weight is multiplied by the ratio of the model's probability of the token to that of the
    draw, and by the change of the potentials. When the effective sample size is small,
    `systematic_resampling` chooses ancestors, except after the last step, where resampling
    would only add variance. The filter ends when all particles are finished or have weight 0.

        async for particles in genlm.smc.steer(llm, prompt, 100, max_tokens=40, seed=0):
            print(particles.log_evidence)

    Args:
        llm: The model.
        prompt: Token ids or a `Context` with which all particles begin; or a `Population` of
            the model, whose members are the first particles; finished ones draw no token.
        size: Number of particles, at least 1; by default that of the members of a population.
        max_tokens: Maximum number of steps. The filter makes fewer if the model's context is
            full, which is logged as a warning; `finished` of the particles is then False.
        log_weights: Log-weights of the first particles, shape `(size,)`, such as those of the
            particles of another filter; by default 0. The constraint and the potential are
            factors in addition to them, so subtract the values of a potential that both
            filters have.
        constraint: A `Language` of `genlm.constraints`, whose texts begin after the prompt, or
            a `Constraint` of `size` members.
        text: End of the prompt that belongs to the texts of the `Language`.
        potential: Function that returns the log of a factor of the probability of each member,
            shape `(n,)`; `-inf` for a sequence that cannot be continued. It may be a coroutine
            function, such as one that awaits the scores of another model; with `steer_sync`
            it may await only methods of models. A plain function is called on the event loop,
            which it blocks.
        bias: Addend of the log-probabilities of the draws, as for `Population.draw`, or a
            function or coroutine function of the population that returns it, such as the
            logarithm of a twist for each next token. It changes the proposal and not the
            target, because the weights account for it; a token with the bias `-inf` is never
            drawn, so the target must exclude it, too.
        stop: Token ids and texts that finish a particle, as for `Population.sample`; by default
            the tokenizer's end of text, if it has one. The texts of a `Language` end with
            token ids.
        temperature: Temperature of the draws; the weights account for it.
        resample_below: Threshold of the effective sample size, as a share of `size`: 0 never
            resamples, 1 resamples after every step with unequal weights but the last.
        seed: Random seed; None for fresh randomness. A filter that continues the population of
            another one can use the same seed.
        progress: Whether to show a progress bar of the steps.

    Raises:
        ValueError: A number is out of range, the population is of another model, the constraint
            has another size, the potential or the log-weights are NaN, infinite or of another
            shape, `text` is given without a `Language`, or as `Language.start`.
        TypeError: An argument, or the result of the potential, is of another type.
        GenlmError: As `Population.draw`.
    """
    from tqdm.auto import tqdm

    if not 0 <= checked_number("resample_below", resample_below) <= 1:
        raise ValueError(f"resample_below={resample_below!r}; expected a share from 0 to 1")
    particles = _first_particles(llm, prompt, size, log_weights)
    max_tokens = checked_integer("max_tokens", max_tokens, 0)
    temperature = checked_number("temperature", temperature)
    if potential is not None and not callable(potential):
        raise TypeError(
            f"potential={potential!r}; expected a function of a population that returns "
            f"log-factors, shape (n,)"
        )
    stop_ids, stop_texts = checked_stop(stop, llm.vocab_size, llm.vocabulary.eos_token_id)
    if isinstance(constraint, Language) and stop_texts:
        raise TypeError(f"stop={stop!r}; texts of languages end with token ids, not texts")
    ends = np.array(sorted(stop_ids), np.int64)
    language_stop = None if stop is None else ends
    particle_filter = _Filter(
        particles,
        await _first_constraint(constraint, llm, len(particles), text, language_stop),
        potential,
        bias,
        ends=ends,
        stop_texts=stop_texts,
        temperature=temperature,
        resample_below=resample_below,
        seed=checked_seed(seed),
    )
    population = particles.population
    lengths = population.lengths[~population.finished].tolist()
    room = (llm.max_context or math.inf) + 1 - max(lengths, default=0)
    steps = int(min(max_tokens, room))
    with tqdm(total=steps, desc="steer", unit="step", disable=not progress) as bar:
        for step in range(1, steps + 1):
            particles = await particle_filter.step(is_last=step == steps)
            _show(bar, particles)
            yield particles
            if particles.population.finished.all():
                return
    if steps < max_tokens:
        unfinished = int((~particles.population.finished).sum())
        llm._log_cut(unfinished, len(particles), max_tokens)  # noqa: SLF001 - as `sample` does


steer_sync = blocking_iterator(steer)


def _initial_population(
    llm: AsyncLM, prompt: TokenIds | Population, size: int | None
) -> Population:
    """Return the first particles of a filter; see `steer`."""
    if isinstance(prompt, Particles):
        raise TypeError(
            "prompt is Particles; to continue a filter, pass particles.population and "
            "log_weights=particles.log_weights"
        )
    if not isinstance(prompt, Population):
        return llm.population(prompt, checked_integer("size", size, 1))
    llm._requests.adapter_of(prompt, None)  # noqa: SLF001 - checks that it is of this model
    count = checked_integer("size", len(prompt) if size is None else size, 1)
    if count != len(prompt):
        raise ValueError(f"a population of {len(prompt)} members for {count} particles")
    if prompt.finished.all():
        logger.warning(
            "all %d members of the population are finished and draw no token; "
            "population.resume() continues them",
            count,
        )
    return prompt


def _first_particles(
    llm: AsyncLM,
    prompt: TokenIds | Population,
    size: int | None,
    log_weights: LogWeights | None,
) -> Particles:
    """Return the particles before the first step; those without weight are finished."""
    population = _initial_population(llm, prompt, size)
    weights = np.zeros(len(population))
    if log_weights is not None:
        weights += _checked_logs(log_weights, np.ones(len(population), bool), "log_weights")
    is_dead = np.isneginf(weights)
    if is_dead.any():
        population = population.finish(is_dead)
    return Particles(population, weights, History(), llm)


async def _first_constraint(
    constraint: Language | Constraint | None,
    llm: AsyncLM,
    size: int,
    text: bytes,
    stop: npt.NDArray[np.int64] | None,
) -> Constraint | None:
    """Return the constraint of the first particles."""
    if isinstance(constraint, Language):
        # Another thread compiles automata and grammars for the vocabulary.
        constraint = await off_loop(constraint.start, llm, size, text=text, stop=stop)
    elif text:
        raise ValueError("text belongs to the texts of a Language; pass one as constraint")
    if not isinstance(constraint, Constraint | None):
        raise TypeError(
            f"constraint={constraint!r}; expected a Language or a Constraint of "
            f"genlm.constraints, such as Automaton.regex(pattern)"
        )
    if constraint is not None and len(constraint) != size:
        raise ValueError(f"a constraint of {len(constraint)} members for {size} particles")
    return constraint


class _Filter:
    """The particles of `steer`, and what their next step depends on."""

    def __init__(
        self,
        particles: Particles,
        constraint: Constraint | None,
        potential: Potential | None,
        bias: Bias | None,
        *,
        ends: npt.NDArray[np.int64],
        stop_texts: tuple[bytes, ...],
        temperature: float,
        resample_below: float,
        seed: int,
    ) -> None:
        self.particles = particles
        self._constraint = constraint
        self._potential = potential
        self._bias = bias
        self._ends = ends
        self._stop_texts = stop_texts
        self._tails = [b""] * len(particles)
        self._temperature = temperature
        self._resample_below = resample_below
        self._rng = np.random.default_rng(seed)
        self._draw_seed = int(self._rng.integers(2**63))
        # Skips the numbers with which an earlier filter resampled these particles.
        self._rng.random(particles.population._step)  # noqa: SLF001 - internal to genlm
        self._log_potential = np.zeros(len(particles))
        # A subclass that overrides `draw` may use another proposal, such as one with a bias.
        has_own_draw = constraint is not None and type(constraint).draw is not Constraint.draw
        self._gains_are_masses = temperature == 1 and bias is None and not has_own_draw

    async def step(self, *, is_last: bool) -> Particles:
        """Draw a token for each particle, and update the weights.

        Ancestors are chosen if the step is not the last and the effective sample size is small.
        """
        particles = self.particles
        drawn = await self._draw(particles.population)
        # A copy: tensors that are kept divide the memory in which steps allocate rows.
        token_ids = drawn.token_ids.numpy().copy()
        gain = drawn.log_mass if self._gains_are_masses else drawn.logprobs - drawn.draw_logprob
        log_weights = particles.log_weights + gain.double().numpy()
        population = particles.population.extend(token_ids)
        is_over = np.isin(token_ids, self._ends)
        if self._stop_texts:
            is_over |= self._completes_stop_text(token_ids)
        if self._constraint is not None:
            advanced = self._constraint.advance(token_ids)
            self._constraint = _checked_constraint(advanced, self._constraint, "advance")
            is_over |= attribute_values(self._constraint, "finished")
        await self._weight_by_potentials(population, log_weights)
        population = population.finish(is_over | (log_weights == -np.inf))
        finished = population.finished.numpy()
        step = Step(token_ids, log_weights, finished, np.arange(len(log_weights)))
        is_last = is_last or bool(finished.all())
        if not is_last and step.effective_sample_size < self._resample_below * len(log_weights):
            ancestors = systematic_resampling(log_weights, self._rng.random())
            step = step._replace(ancestors=ancestors, is_resampled=True)
            population = population[ancestors]
            log_weights = np.full(len(log_weights), step.log_evidence)
            self._select(ancestors)
        history = particles.history.followed_by(step)
        self.particles = Particles(population, log_weights, history, particles.llm)
        return self.particles

    async def _draw(self, population: Population) -> DrawnTokens:
        options: dict[str, Any] = {"temperature": self._temperature, "seed": self._draw_seed}
        if self._bias is not None:
            bias = self._bias(population) if callable(self._bias) else self._bias
            options["bias"] = await bias if isinstance(bias, Awaitable) else bias
        if self._constraint is None:
            return await population.draw(**options)
        return await self._constraint.draw(population, **options)

    def _completes_stop_text(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether the token drawn for each particle completes a stop text."""
        is_complete, byte_vocab = np.zeros(len(token_ids), bool), self.particles.llm.byte_vocab
        for member in np.flatnonzero(token_ids >= 0).tolist():
            text = self._tails[member] + bytes(byte_vocab[token_ids[member]])
            is_complete[member], self._tails[member] = search_stop(text, self._stop_texts)
        return is_complete

    async def _weight_by_potentials(self, population: Population, log_weights: Floats) -> None:
        """Multiply the weights by the change of the potentials since the previous step."""
        potential = np.zeros(len(population))
        live = log_weights > -np.inf
        if self._constraint is not None:
            name = f"{type(self._constraint).__name__}.log_potential"
            potential += _checked_logs(self._constraint.log_potential, live, name)
        if self._potential is not None:
            values = self._potential(population)
            if isinstance(values, Awaitable):
                values = await values
            potential = potential + _checked_logs(values, live)
        log_weights[live] += potential[live] - self._log_potential[live]
        self._log_potential = np.where(live, potential, self._log_potential)

    def _select(self, ancestors: npt.NDArray[np.int64]) -> None:
        """Continue with the ancestors of resampled particles."""
        self._log_potential = self._log_potential[ancestors]
        self._tails = [self._tails[ancestor] for ancestor in ancestors]
        if self._constraint is not None:
            selected = self._constraint[ancestors]
            self._constraint = _checked_constraint(selected, self._constraint, "indexing")


def _checked_constraint(result: object, constraint: Constraint, method: str) -> Constraint:
    """Return the result of a method of a constraint, a constraint of the same size."""
    name = f"the result of {type(constraint).__name__}, {method},"
    if not isinstance(result, Constraint):
        raise TypeError(f"{name} is {type(result).__name__}; expected a Constraint")
    if len(result) != len(constraint):
        raise ValueError(f"{name} has {len(result)} members; expected {len(constraint)}")
    return result


def _checked_logs(
    values: LogWeights, live: npt.NDArray[np.bool_], name: str = "the potential"
) -> Floats:
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


def _show(bar: Any, particles: Particles) -> None:
    """Advance a progress bar, unless it is hidden."""
    if not bar.disable:
        effective = particles.history[-1].effective_sample_size
        finished = int(particles.population.finished.sum())
        bar.set_postfix_str(f"effective {effective:.1f}, finished {finished}", refresh=False)
        bar.update()
