"""Checks of `sample` and `batch_sample`, whether the engine or the core draws.

A goodness-of-fit test with a fixed seed has one outcome for good; with a new seed a correct
sampler is unlucky with a probability below one in a million.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import numpy as np
import torch

from genlm import (
    Capability,
    EmptySequenceError,
    draw_tokens,
    stream_seeds,
    stream_uniform,
)
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import expect
from genlm.testing.sequences import TokenTuple

LEAST_P_VALUE = 1e-8
"""Three tests of fit a run, and so far out the exact distribution of `CELLS` squared cells has
a tail a few times heavier than chi-square's: still less than 1e-6 in all."""

CELLS = 5
"""Side of the square of cells; quick runs expect 16 draws in each, above the usual 5."""

DRAWN_TOGETHER = 100
"""Continuations waited for at once: the patience of a target is for a few answers."""

STREAMS = 8


@engine_check(cases=("several outcomes", "temperature below 1", "temperature above 1"))
def samples_follow_the_logprobs(trial: EngineTrial) -> None:
    """Pairs of drawn tokens occur as often as the log-probabilities say."""
    prompt = _least_certain(trial)
    temperatures = {
        "temperature 1": 1.0,
        "temperature below 1": 0.6,
        "temperature above 1": 1.5,
    }
    for case, temperature in temperatures.items():
        drawn = _drawn_pairs(trial, prompt, temperature)
        counts = Counter(map(tuple, drawn))
        wrong = [pair for pair in counts if len(pair) != 2]
        expect(not wrong, "two tokens in each continuation", wrong[:3], prompt=prompt)
        p_value = _p_value(trial, prompt, temperature, drawn)
        expect(
            p_value >= LEAST_P_VALUE,
            f"pairs as likely as the log-probabilities say (p >= {LEAST_P_VALUE:g})",
            f"p = {p_value:.3g}; most frequent: {counts.most_common(4)}",
            prompt=prompt,
            temperature=temperature,
        )
        trial.saw("several outcomes", len(counts) > 2)
        trial.saw(case)


def _least_certain(trial: EngineTrial) -> TokenTuple:
    """Of some prompts the one with the most even distribution, where faults show best."""
    prompts = [prompt[: max(1, trial.max_length - 2)] for prompt in trial.some_sequences(8)]
    return min(prompts, key=lambda prompt: float(trial.expected(prompt).max()))


def _drawn_pairs(trial: EngineTrial, prompt: TokenTuple, temperature: float) -> list[list[int]]:
    drawn: list[list[int]] = []
    while len(drawn) < trial.profile.draws:
        prompts = [prompt] * min(DRAWN_TOGETHER, trial.profile.draws - len(drawn))
        seed = trial.seed + len(drawn)  # streams of their own for each group
        drawn += trial.run(
            trial.lm.batch_sample(prompts, 2, temperature=temperature, seed=seed)
        )
    return drawn


def _p_value(
    trial: EngineTrial, prompt: TokenTuple, temperature: float, drawn: list[list[int]]
) -> float:
    """P-value of the chi-square test that pairs were drawn from the oracle's rows.

    Each token becomes a number that is uniform if it was: the mass of what is likelier,
    and a random part of its own. Pairs of these are counted in the cells of a square, so
    that a vocabulary of any size gives the same test.
    """
    generator = trial.generator()
    share = functools.cache(functools.partial(_share, trial, temperature))
    cells = np.zeros((CELLS, CELLS))
    for first, second in drawn:
        shares = share(prompt, first), share((*prompt, first), second)
        place = [likelier + generator.random() * own for likelier, own in shares]
        row, column = (min(int(u * CELLS), CELLS - 1) for u in place)
        cells[row, column] += 1
    expected = len(drawn) / cells.size
    distance = float(((cells - expected) ** 2).sum() / expected)
    half = torch.tensor([(cells.size - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))  # the distribution's upper tail


def _share(
    trial: EngineTrial, temperature: float, before: TokenTuple, token_id: int
) -> tuple[float, float]:
    """The mass of what is likelier than a token, and its own."""
    probabilities = (trial.expected(before) / temperature).softmax(-1)
    own = probabilities[token_id]
    ids = torch.arange(len(probabilities))
    likelier = (probabilities > own) | ((probabilities == own) & (ids < token_id))
    return float(probabilities[likelier].sum()), float(own)


@engine_check(cases=("same seed", "another seed", "no seed"))
def sampling_is_reproducible(trial: EngineTrial) -> None:
    """The same seed gives the same draws, whatever else is drawn; another seed gives others."""
    prompts = [prompt[:2] for prompt in trial.some_sequences(6)]
    length = max(1, min(6, trial.max_length - 2))

    def draw(count: int, seed: int | None) -> list[list[int]]:
        return trial.run(trial.lm.batch_sample(prompts[:count], length, seed=seed))

    first = draw(6, trial.seed)
    trial.lm.clear_cache()
    expect(draw(6, trial.seed) == first, "the same draws", "others", prompts=prompts)
    trial.saw("same seed")
    expect(
        draw(3, trial.seed) == first[:3],
        "the same first three draws in a smaller batch",
        "others",
        prompts=prompts,
    )
    alone = trial.run(trial.lm.sample(prompts[0], length, seed=trial.seed))
    expect(alone == first[0], f"{first[0]} from `sample` with the same seed", alone)
    expect(draw(6, trial.seed + 1) != first, "other draws with another seed", "the same")
    trial.saw("another seed")
    expect(draw(6, None) != draw(6, None), "other draws without a seed", "the same twice")
    trial.saw("no seed")


@engine_check(cases=("temperature 1", "temperature below 1", "temperature above 1"))
def equal_seeds_draw_equal_tokens(trial: EngineTrial) -> None:
    """From equal rows a seed draws the tokens that `genlm.draw_tokens` draws, on any engine."""
    prompts = [prompt[:2] for prompt in trial.some_sequences(6)]
    length = max(1, min(6, trial.max_length - 2))
    seeds = stream_seeds(trial.seed, len(prompts))
    temperatures = {
        "temperature 1": 1.0,
        "temperature below 1": 0.6,
        "temperature above 1": 1.5,
    }
    for case, temperature in temperatures.items():
        drawn = trial.run(
            trial.lm.batch_sample(prompts, length, temperature=temperature, seed=trial.seed)
        )
        for prompt, seed, continuation in zip(prompts, seeds, drawn, strict=True):
            for position, token_id in enumerate(continuation):
                before = (*prompt, *continuation[:position])
                uniform = stream_uniform(seed, position)
                _check_draw(trial, before, token_id, temperature, uniform)
                trial.saw(case)


def _check_draw(
    trial: EngineTrial, before: TokenTuple, token_id: int, temperature: float, uniform: float
) -> None:
    """Raise `CheckFailure` unless a uniform number draws a token, whatever the rounding.

    Where each log-probability is off by at most e, the cumulative distribution at temperature
    t is off by at most e / 2t: its logit moves by at most 2e / t, and no step of the logistic
    function is longer than a quarter of that of its argument.
    """
    row = trial.expected(before)
    rounding = trial.target.largest_error / (2 * temperature) + 1e-9
    cumulative = (row / temperature).softmax(-1).cumsum(-1)
    (expected,) = draw_tokens(row[None], [temperature], [uniform]).tolist()
    low, high = (
        float(cumulative[token_id - 1]) if token_id else 0.0,
        float(cumulative[token_id]),
    )
    expect(
        low - rounding <= uniform <= high + rounding,
        f"{expected}, the token that {uniform:.6f} draws",
        f"{token_id}, which numbers from {low:.6f} to {high:.6f} draw",
        before=before,
        temperature=temperature,
    )


@engine_check(cases=("equal prompts",))
def streams_are_distinct(trial: EngineTrial) -> None:
    """Equal prompts in a batch are continued independently of one another."""
    prompt = trial.some_sequences(1)[0][:2]
    length = max(1, min(8, trial.max_length - 2))
    drawn = trial.run(
        trial.lm.batch_sample([prompt] * STREAMS, length, temperature=2.0, seed=trial.seed)
    )
    distinct = len(set(map(tuple, drawn)))
    expect(
        distinct > STREAMS // 2,
        f"{STREAMS} independent continuations",
        f"{distinct} different ones: {drawn}",
        prompt=prompt,
    )
    trial.saw("equal prompts")


@engine_check(cases=("stopped early", "not stopped"))
def sampling_stops(trial: EngineTrial) -> None:
    """A continuation ends before a stop id, after `max_tokens`, or when the context is full."""
    prompt = trial.some_sequences(1)[0][:2]
    length = max(1, min(5, trial.max_length - 2))
    prompts = [prompt] * (2 * STREAMS)
    free = trial.run(trial.lm.batch_sample(prompts, length, seed=trial.seed))
    expect(
        {len(ids) for ids in free} == {length}, f"{length} tokens each", list(map(len, free))
    )
    by_frequency = [token_id for token_id, _ in Counter(itertools.chain(*free)).most_common()]
    for stop in (by_frequency[:1], by_frequency[:2], np.array(by_frequency[-1:])):
        stops = set(map(int, stop))
        stopped = trial.run(trial.lm.batch_sample(prompts, length, stop, seed=trial.seed))
        for found, whole in zip(stopped, free, strict=True):
            end = next((i for i, token_id in enumerate(whole) if token_id in stops), length)
            cut = whole[:end]
            expect(
                found == cut,
                f"{cut}: the continuation {whole} up to the first of {stops}",
                found,
                prompt=prompt,
            )
            trial.saw("stopped early" if len(cut) < length else "not stopped")
    nothing = trial.run(trial.lm.batch_sample(prompts[:2], 0))
    expect(nothing == [[], []], "no tokens with max_tokens=0", nothing)
    limit = trial.lm.max_context
    if limit is not None and limit <= trial.target.max_length:
        full = trial.run(trial.lm.sample(prompt, limit + 5, seed=trial.seed))
        room = limit + 1 - len(prompt)
        expect(len(full) == room, f"{room} tokens until the context is full", len(full))


@engine_check(cases=("drawn token",))
def temperature_zero_is_greedy(trial: EngineTrial) -> None:
    """At temperature 0 every drawn token is a most likely one."""
    prompts = [prompt[:3] for prompt in trial.some_sequences(4)]
    length = max(1, min(5, trial.max_length - 3))
    drawn = trial.run(trial.lm.batch_sample(prompts, length, temperature=0))
    for prompt, continuation in zip(prompts, drawn, strict=True):
        expect(len(continuation) == length, f"{length} tokens", continuation, prompt=prompt)
        for position, token_id in enumerate(continuation):
            before = (*prompt, *continuation[:position])
            row = trial.expected(before)
            gap = float(row.max() - row[token_id])
            expect(
                gap
                <= 2 * trial.target.largest_error,  # either of two that the engine cannot rank
                f"the most likely token after {before}, {int(row.argmax())}",
                f"{token_id}, less likely by {gap:.3g} nats",
            )
            trial.saw("drawn token")


@engine_check(cases=("refused",))
def wrong_sampling_requests_are_refused(trial: EngineTrial) -> None:
    """Impossible temperatures and lengths, and bad prompts, raise before anything is drawn."""
    prompt = trial.some_sequences(1)[0]
    for max_tokens, temperature in ((2, -1.0), (2, math.inf), (2, math.nan), (-1, 1.0)):
        draw = functools.partial(trial.lm.sample, prompt, max_tokens, temperature=temperature)
        arguments = {"max_tokens": max_tokens, "temperature": temperature}
        trial.expect_error(ValueError, draw, **arguments)
        trial.saw("refused")
    trial.expect_error(EmptySequenceError, lambda: trial.lm.batch_sample([prompt, []], 2))


@engine_check(needs=Capability.SAMPLE, cases=("drawn by the engine",))
def declared_sampling_is_native(trial: EngineTrial) -> None:
    """An engine that declares `sample` draws the continuations itself."""
    lm, probe = trial.load_probed()
    trial.run(lm.batch_sample(trial.some_sequences(2), 2, seed=trial.seed))
    native = [query for query in probe.submitted if query.sampling is not None]
    expect(len(native) == 2, "two queries with `sampling` in the engine", len(native))
    trial.saw("drawn by the engine")


@engine_check(unless=Capability.SAMPLE, cases=("drawn from rows",))
def undeclared_sampling_asks_for_rows(trial: EngineTrial) -> None:
    """An engine that does not declare `sample` is asked for rows only."""
    lm, probe = trial.load_probed()
    trial.run(lm.batch_sample(trial.some_sequences(2), 2, seed=trial.seed))
    native = [query for query in probe.submitted if query.sampling is not None]
    expect(not native, "no query with `sampling` in the engine", native)
    trial.saw("drawn from rows")
