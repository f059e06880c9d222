"""`steer` and `batch_steer`: particle filters over a model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt

from genlm.constraints.joined import JoinedConstraint
from genlm.constraints.languages import Language
from genlm.constraints.protocol import Constraint
from genlm.constraints.states import check_text
from genlm.core.base.arrays import host_array
from genlm.core.base.blocking import blocking_iterator, off_loop
from genlm.core.base.validation import (
    checked_batch,
    checked_integer,
    checked_number,
    checked_size,
    checked_stop,
)
from genlm.core.model.lm import AsyncLM, checked_model
from genlm.core.model.members import has_several
from genlm.core.model.population import Population
from genlm.core.rows.sampling import batch_seeds, checked_seed
from genlm.smc.filters import Filters, checked_logs
from genlm.smc.particles import Particles, ParticlesBatch

if TYPE_CHECKING:
    from genlm.core.base.validation import Stop
    from genlm.core.model.context import TokenBatch, TokenIds
    from genlm.smc.filters import Bias, Potential
    from genlm.smc.resampling import LogWeights

T = TypeVar("T")

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
    potential_every: int = 1,
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
            shape `(n,)`; `-inf` for a sequence that cannot be continued. Texts that have ended
            are `population.finished`. The function may be a coroutine function, such as one
            that awaits the scores of another model; with `steer_sync` it may await only methods
            of models. A plain function is called on the event loop, which it blocks.
        potential_every: Number of steps between two evaluations of the potential, for example
            16 for a reward model that is slow. The weights change by the potential in these
            steps and in the last step of the filter.
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
    population = _initial_population(llm, prompt, size)
    if isinstance(constraint, Sequence):
        raise _not_a_constraint(constraint)
    check_text(text)
    if log_weights is not None:
        logs = checked_logs(log_weights, np.ones(len(population), bool), "log_weights")
        log_weights = np.broadcast_to(logs, (1, len(population)))
    batches = batch_steer(
        llm,
        population,
        len(population),
        max_tokens=max_tokens,
        log_weights=log_weights,
        constraint=constraint,
        text=text,
        potential=potential,
        potential_every=potential_every,
        bias=bias,
        stop=stop,
        temperature=temperature,
        resample_below=resample_below,
        seed=[checked_seed(seed)],
        progress=progress,
    )
    async with contextlib.aclosing(batches):
        async for batch in batches:
            yield batch[0]


async def batch_steer(
    llm: AsyncLM,
    prompts: TokenBatch | Population,
    size: int,
    *,
    max_tokens: int,
    log_weights: LogWeights | None = None,
    constraint: Language | Sequence[Language] | Constraint | None = None,
    text: bytes | Sequence[bytes] = b"",
    potential: Potential | None = None,
    potential_every: int = 1,
    bias: Bias | None = None,
    stop: Stop | None = None,
    temperature: float = 1.0,
    resample_below: float = 0.5,
    seed: int | Sequence[int] | None = None,
    progress: bool = False,
) -> AsyncGenerator[ParticlesBatch, None]:
    """Continue several prompts, each with a particle filter, and yield the particles of all.

    The filters are independent: each has its own weights and evidence, is resampled by itself,
    and draws as `steer` does with its prompt and seed. Their particles are members of one
    population, so a step of all filters takes about as long as a step of one filter with as
    many particles, and much less time than concurrent calls of `steer` if each filter has few
    particles.

        async for batch in genlm.smc.batch_steer(llm, prompts, 10, max_tokens=40, seed=0):
            pass
        answers = [particles.texts[particles.weights.argmax()] for particles in batch]

    A filter whose particles are all finished, or have weight 0, makes no further step, as
    `steer`. The iteration ends after the last step of any filter; without prompts, it is empty.

    Args:
        llm: The model.
        prompts: Token ids or `Context` of each filter, all with one adapter; or a `Population`
            of the model with `size` members for each filter, in order, such as that of an
            earlier batch. Its draws continue with the random numbers after the last step of any
            filter.
        size: Number of particles of each filter, at least 1.
        max_tokens: As `steer`. A filter whose contexts are full ends before the others.
        log_weights: Log-weights before the first step, shape `(filters, size)`.
        constraint: A `Language` for all filters, a sequence with a `Language` for each, or a
            `Constraint` of all particles, filter after filter. Filters with the same object
            share its tables.
        text: As `steer`; for all filters, or a sequence of one for each filter.
        potential: As `steer`, a function of the population of all particles, filter after
            filter: member i belongs to filter `i // size`. Values of the members of filters
            that have ended are ignored.
        potential_every: As `steer`.
        bias: As `steer`, of all particles. A function gets the same population, in which the
            members of filters that have ended are finished. Their contexts may be full: request
            rows for `population[~population.finished]`.
        stop: As `steer`.
        temperature: As `steer`.
        resample_below: As `steer`.
        seed: Random seed of all filters, from which `genlm.plugin.stream_seeds` derives that of
            each filter; or a sequence of one seed for each filter.
        progress: As `steer`.

    Raises:
        ValueError: There is not one language, text or seed for each filter, the number of
            members of a population is not a multiple of `size`, or as `steer`.
        TypeError: As `steer`.
        GenlmError: As `Population.draw`.
    """
    population, count = _initial_populations(llm, prompts, checked_size(size, 1))
    if not count:
        return
    llm._requests.adapter_of(population, None)  # noqa: SLF001 - checks that it is of this model
    if population.finished.all():
        logger.warning(
            "all %d members of the population are finished and draw no token; "
            "population.resume() continues them",
            len(population),
        )
    if log_weights is not None:
        array = host_array(log_weights, "log_weights")
        if array.shape != (count, size):
            raise ValueError(
                f"log_weights has shape {array.shape}; expected ({count}, {size}), one number "
                f"for each particle of each filter"
            )
        log_weights = array.reshape(-1)
    if not 0 <= checked_number("resample_below", resample_below) <= 1:
        raise ValueError(f"resample_below={resample_below!r}; expected a share from 0 to 1")
    batch = _first_particles(llm, population, size, log_weights)
    if potential is not None and not callable(potential):
        raise TypeError(
            f"potential={potential!r}; expected a function of a population that returns "
            f"log-factors, shape (n,)"
        )
    max_tokens = checked_integer("max_tokens", max_tokens, 0)
    temperature = checked_number("temperature", temperature)
    stop_ids, stop_texts = checked_stop(stop, llm.vocab_size, llm.vocabulary.eos_token_id)
    has_language = constraint is not None and not isinstance(constraint, Constraint)
    if has_language and stop_texts:
        raise TypeError(f"stop={stop!r}; texts of languages end with token ids, not texts")
    ends = np.array(sorted(stop_ids), np.int64)
    language_stop = None if stop is None else ends
    filters = Filters(
        batch,
        await _first_constraint(constraint, llm, batch, text, language_stop),
        potential,
        bias,
        max_tokens=max_tokens,
        ends=ends,
        stop_texts=stop_texts,
        temperature=temperature,
        resample_below=resample_below,
        potential_every=checked_integer("potential_every", potential_every, 1),
        seeds=batch_seeds(seed, count, "filters"),
    )
    async with contextlib.aclosing(filters.run(progress=progress)) as batches:
        async for batch in batches:
            yield batch


steer_sync = blocking_iterator(steer)
batch_steer_sync = blocking_iterator(batch_steer)


def _initial_population(
    llm: AsyncLM, prompt: TokenIds | Population, size: int | None
) -> Population:
    """Return the first particles of a filter; see `steer`."""
    checked_model(llm)
    if not isinstance(prompt, (Population, Particles, ParticlesBatch)):
        if has_several(prompt):
            raise TypeError(
                "several prompts; call batch_steer for a filter for each, or pass a Population "
                "of the first particles of one filter"
            )
        return llm.population(prompt, checked_size(size, 1))
    population = _checked_population(prompt)
    count = checked_integer("size", len(population) if size is None else size, 1)
    if count != len(population):
        raise ValueError(f"a population of {len(population)} members for {count} particles")
    return population


def _initial_populations(
    llm: AsyncLM, prompts: TokenBatch | Population, size: int
) -> tuple[Population, int]:
    """Return the first particles of several filters, and the number of filters."""
    checked_model(llm)
    if isinstance(prompts, (Population, Particles, ParticlesBatch)):
        population = _checked_population(prompts)
        if len(population) % size:
            raise ValueError(
                f"a population of {len(population)} members for filters of {size} particles; "
                f"expected {size} members for each filter"
            )
        return population, len(population) // size
    sequences = cast("TokenBatch", checked_batch(prompts, "call `steer` for one prompt"))
    population = llm.population(sequences)
    return population[np.repeat(np.arange(len(population)), size)], len(population)


def _checked_population(prompt: object) -> Population:
    """Return a population with which filters begin."""
    if not isinstance(prompt, Population):
        raise TypeError(
            f"prompt is {type(prompt).__name__}; to continue a filter, pass "
            f"particles.population and log_weights=particles.log_weights"
        )
    return prompt


def _first_particles(
    llm: AsyncLM, population: Population, size: int, log_weights: LogWeights | None
) -> ParticlesBatch:
    """Return the particles before the first step; those without weight are finished."""
    weights = np.zeros(len(population))
    if log_weights is not None:
        weights += checked_logs(log_weights, np.ones(len(population), bool), "log_weights")
    is_dead = np.isneginf(weights)
    if is_dead.any():
        population = population.finish(is_dead)
    step_counts = np.zeros(len(population) // size, np.int64)
    return ParticlesBatch(population, weights.reshape(-1, size), (), step_counts, llm)


async def _first_constraint(
    constraint: Language | Sequence[Language] | Constraint | None,
    llm: AsyncLM,
    batch: ParticlesBatch,
    text: bytes | Sequence[bytes],
    stop: npt.NDArray[np.int64] | None,
) -> Constraint | None:
    """Return the constraint of the first particles."""
    size = len(batch.population)
    if isinstance(constraint, (Language, Sequence)):
        # Another thread compiles automata and grammars for the vocabulary.
        constraint = await off_loop(_started, constraint, llm, batch, text, stop)
    elif text != b"":
        raise ValueError("text belongs to the texts of a Language; pass one as constraint")
    return None if constraint is None else _checked_constraint(constraint, size)


def _checked_constraint(constraint: object, size: int) -> Constraint:
    """Return the constraint of `size` particles before the first step."""
    if not isinstance(constraint, Constraint):
        raise _not_a_constraint(constraint)
    if len(constraint) != size:
        raise ValueError(f"a constraint of {len(constraint)} members for {size} particles")
    return constraint


def _started(
    languages: Language | Sequence[Language],
    llm: AsyncLM,
    batch: ParticlesBatch,
    texts: bytes | Sequence[bytes],
    stop: npt.NDArray[np.int64] | None,
) -> Constraint:
    """Start the languages of the filters; equal ones with equal texts are started once."""
    count, size = len(batch), batch.size
    all_languages = (
        [languages] * count
        if isinstance(languages, Language)
        else _for_each("constraint", languages, count)
    )
    are_several = isinstance(texts, Sequence) and not isinstance(texts, (bytes, bytearray, str))
    all_texts = _for_each("text", texts, count) if are_several else [texts] * count
    filters_of: dict[tuple[int, bytes], list[int]] = {}
    for place, (language, text) in enumerate(zip(all_languages, all_texts, strict=True)):
        if not isinstance(language, Language):
            raise _not_a_constraint(language)
        check_text(text)
        filters_of.setdefault((id(language), bytes(cast("bytes", text))), []).append(place)
    parts = [
        _checked_constraint(
            all_languages[places[0]].start(llm, len(places) * size, text=text, stop=stop),
            len(places) * size,
        )
        for (_, text), places in filters_of.items()
    ]
    if len(parts) == 1:
        return parts[0]
    members = [
        (np.array(places)[:, None] * size + np.arange(size)).reshape(-1)
        for places in filters_of.values()
    ]
    return JoinedConstraint(parts, members, llm.vocab_size)


def _for_each(argument: str, values: Sequence[T], count: int) -> Sequence[T]:
    """Return a sequence with one element for each filter."""
    if len(values) != count:
        raise ValueError(f"{argument} has length {len(values)} for {count} filters")
    return values


def _not_a_constraint(value: object) -> TypeError:
    return TypeError(
        f"constraint={value!r}; expected a Language or a Constraint of genlm.constraints, such "
        f"as Automaton.regex(pattern)"
    )
