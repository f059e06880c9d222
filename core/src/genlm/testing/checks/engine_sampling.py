"""Checks of `sample` and `batch_sample`.

Samples follow the log-probabilities because each token is the one that a uniform random number
draws by inverting the cumulative distribution of the oracle's row.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from genlm.plugin import stream_seeds, stream_uniform
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture

TEMPERATURES = (0.0, 0.6, 1.0, 1.5)


@engine_check()
def samples_are_those_of_the_seed(fixture: EngineFixture) -> None:
    """The seed determines the tokens of a sample, as in `draw_tokens`, in any batch."""
    prompts = [prompt[:2] for prompt in fixture.some_sequences(6)]
    prompts.append(prompts[0])  # continued by another stream than the first
    length = max(1, min(6, fixture.max_length - 2))
    seeds = stream_seeds(fixture.seed, len(prompts))
    for temperature, count in itertools.product(TEMPERATURES, (len(prompts), 3, 1)):
        drawn = fixture.run(
            fixture.lm.batch_sample(
                prompts[:count], length, stop=(), temperature=temperature, seed=fixture.seed
            )
        )
        for prompt, seed, continuation in zip(prompts, seeds, drawn, strict=False):
            expect(len(continuation) == length, f"{length} tokens", continuation, prompt=prompt)
            fixture.expected_rows((*prompt, *continuation[:-1]), len(prompt))
            for position, token_id in enumerate(continuation):
                before = (*prompt, *continuation[:position])
                uniform = stream_uniform(seed, position)
                oracle = fixture.draw_oracle(before, temperature=temperature)
                oracle.check(token_id, uniform, before=before)
        fixture.lm.clear_output_cache()


@engine_check()
def sampling_stops(fixture: EngineFixture) -> None:
    """A continuation ends before a stop id, after `max_tokens`, or when the context is full."""
    prompt = fixture.some_sequences(1)[0][:2]
    length = max(1, min(5, fixture.max_length - 2))
    prompts = [prompt] * 16
    free = fixture.run(fixture.lm.batch_sample(prompts, length, stop=(), seed=fixture.seed))
    expect(
        {len(ids) for ids in free} == {length}, f"{length} tokens each", list(map(len, free))
    )
    longer = dict.fromkeys((*prompt, *ids, ids[0])[: fixture.max_length] for ids in free)
    fixture.check_batch(fixture.lm, list(longer), how="after sampling")
    by_frequency = [token_id for token_id, _ in Counter(itertools.chain(*free)).most_common()]
    for stop in (by_frequency[:1], by_frequency[:2], np.array(by_frequency[-1:])):
        stops = set(map(int, stop))
        request = fixture.lm.batch_sample(prompts, length, stop=stop, seed=fixture.seed)
        for stopped, unstopped in zip(fixture.run(request), free, strict=True):
            end = next((i for i, token_id in enumerate(unstopped) if token_id in stops), length)
            expected = unstopped[:end]
            expect(
                stopped == expected,
                f"{expected}: the continuation {unstopped} up to the first of {stops}",
                stopped,
                prompt=prompt,
            )
            fixture.saw("stopped early", len(expected) < length)
            fixture.saw("not stopped", len(expected) == length)
    limit = fixture.lm.max_context
    if limit is not None and limit <= fixture.target.max_length:
        full = fixture.run(fixture.lm.sample(prompt, limit + 5, stop=(), seed=fixture.seed))
        room = limit + 1 - len(prompt)
        expect(len(full) == room, f"{room} tokens until the context is full", len(full))
