"""Checks of `sample` and `batch_sample`.

Samples follow the log-probabilities because each token is the one that a uniform random number
draws by inverting the cumulative distribution of the oracle's row.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import numpy as np

from genlm import EmptySequenceError
from genlm.plugin import stream_seeds, stream_uniform
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture

STREAMS = 8


@engine_check(cases=("same seed", "another seed", "no seed"))
def sampling_is_reproducible(fixture: EngineFixture) -> None:
    """The same seed gives the same samples in any batch; another seed gives others."""
    prompts = [prompt[:2] for prompt in fixture.some_sequences(6)]
    length = max(1, min(6, fixture.max_length - 2))

    def draw(count: int, seed: int | None) -> list[list[int]]:
        asked = fixture.lm.batch_sample(prompts[:count], length, stop=(), seed=seed)
        return fixture.run(asked)

    first = draw(6, fixture.seed)
    fixture.lm.clear_output_cache()
    expect(draw(6, fixture.seed) == first, "the same draws", "others", prompts=prompts)
    fixture.saw("same seed")
    expect(
        draw(3, fixture.seed) == first[:3],
        "the same first three draws in a smaller batch",
        "others",
        prompts=prompts,
    )
    alone = fixture.run(fixture.lm.sample(prompts[0], length, stop=(), seed=fixture.seed))
    expect(alone == first[0], f"{first[0]} from `sample` with the same seed", alone)
    expect(draw(6, fixture.seed + 1) != first, "other draws with another seed", "the same")
    fixture.saw("another seed")
    expect(draw(6, None) != draw(6, None), "other draws without a seed", "the same twice")
    fixture.saw("no seed")


@engine_check(cases=("temperature 1", "temperature below 1", "temperature above 1"))
def equal_seeds_draw_equal_tokens(fixture: EngineFixture) -> None:
    """From equal rows a seed draws the tokens that `draw_tokens` draws, on any engine."""
    prompts = [prompt[:2] for prompt in fixture.some_sequences(6)]
    length = max(1, min(6, fixture.max_length - 2))
    seeds = stream_seeds(fixture.seed, len(prompts))
    temperatures = {
        "temperature 1": 1.0,
        "temperature below 1": 0.6,
        "temperature above 1": 1.5,
    }
    for case, temperature in temperatures.items():
        slack = fixture.target.largest_error / (2 * temperature) + 1e-9
        drawn = fixture.run(
            fixture.lm.batch_sample(prompts, length, temperature=temperature, seed=fixture.seed)
        )
        for prompt, seed, continuation in zip(prompts, seeds, drawn, strict=True):
            for position, token_id in enumerate(continuation):
                before = (*prompt, *continuation[:position])
                logits = fixture.expected(before) / temperature
                uniform = stream_uniform(seed, position)
                fixture.check_drawn(logits, token_id, uniform, slack, before=before)
                fixture.saw(case)


@engine_check(cases=("equal prompts",))
def streams_are_distinct(fixture: EngineFixture) -> None:
    """Equal prompts in a batch are continued independently of one another."""
    prompt = fixture.some_sequences(1)[0][:2]
    length = max(1, min(8, fixture.max_length - 2))
    drawn = fixture.run(
        fixture.lm.batch_sample([prompt] * STREAMS, length, temperature=2.0, seed=fixture.seed)
    )
    distinct = len(set(map(tuple, drawn)))
    expect(
        distinct > STREAMS // 2,
        f"{STREAMS} independent continuations",
        f"{distinct} different ones: {drawn}",
        prompt=prompt,
    )
    fixture.saw("equal prompts")


@engine_check(cases=("stopped early", "not stopped"))
def sampling_stops(fixture: EngineFixture) -> None:
    """A continuation ends before a stop id, after `max_tokens`, or when the context is full."""
    prompt = fixture.some_sequences(1)[0][:2]
    length = max(1, min(5, fixture.max_length - 2))
    prompts = [prompt] * (2 * STREAMS)
    free = fixture.run(fixture.lm.batch_sample(prompts, length, stop=(), seed=fixture.seed))
    expect(
        {len(ids) for ids in free} == {length}, f"{length} tokens each", list(map(len, free))
    )
    by_frequency = [token_id for token_id, _ in Counter(itertools.chain(*free)).most_common()]
    for stop in (by_frequency[:1], by_frequency[:2], np.array(by_frequency[-1:])):
        stops = set(map(int, stop))
        asked = fixture.lm.batch_sample(prompts, length, stop=stop, seed=fixture.seed)
        stopped = fixture.run(asked)
        for found, whole in zip(stopped, free, strict=True):
            end = next((i for i, token_id in enumerate(whole) if token_id in stops), length)
            cut = whole[:end]
            expect(
                found == cut,
                f"{cut}: the continuation {whole} up to the first of {stops}",
                found,
                prompt=prompt,
            )
            fixture.saw("stopped early" if len(cut) < length else "not stopped")
    nothing = fixture.run(fixture.lm.batch_sample(prompts[:2], 0))
    expect(nothing == [[], []], "no tokens with max_tokens=0", nothing)
    limit = fixture.lm.max_context
    if limit is not None and limit <= fixture.target.max_length:
        full = fixture.run(fixture.lm.sample(prompt, limit + 5, stop=(), seed=fixture.seed))
        room = limit + 1 - len(prompt)
        expect(len(full) == room, f"{room} tokens until the context is full", len(full))


@engine_check(cases=("drawn token",))
def temperature_zero_is_greedy(fixture: EngineFixture) -> None:
    """At temperature 0 every sampled token is a most likely one."""
    prompts = [prompt[:3] for prompt in fixture.some_sequences(4)]
    length = max(1, min(5, fixture.max_length - 3))
    drawn = fixture.run(fixture.lm.batch_sample(prompts, length, stop=(), temperature=0))
    for prompt, continuation in zip(prompts, drawn, strict=True):
        expect(len(continuation) == length, f"{length} tokens", continuation, prompt=prompt)
        for position, token_id in enumerate(continuation):
            before = (*prompt, *continuation[:position])
            row = fixture.expected(before)
            gap = float(row.max() - row[token_id])
            expect(
                gap
                <= 2
                * fixture.target.largest_error,  # either of two tokens within the tolerance
                f"the most likely token after {before}, {int(row.argmax())}",
                f"{token_id}, less likely by {gap:.3g} nats",
            )
            fixture.saw("drawn token")


@engine_check(cases=("refused",))
def wrong_sampling_requests_are_refused(fixture: EngineFixture) -> None:
    """Invalid temperatures, lengths and prompts raise an error."""
    prompt = fixture.some_sequences(1)[0]
    for max_tokens, temperature in ((2, -1.0), (2, math.inf), (2, math.nan), (-1, 1.0)):
        draw = functools.partial(fixture.lm.sample, prompt, max_tokens, temperature=temperature)
        arguments = {"max_tokens": max_tokens, "temperature": temperature}
        fixture.expect_error(ValueError, draw, **arguments)
        fixture.saw("refused")
    fixture.expect_error(EmptySequenceError, lambda: fixture.lm.batch_sample([prompt, []], 2))
