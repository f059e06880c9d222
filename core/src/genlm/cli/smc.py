"""Sequential Monte Carlo under a hard constraint on bytes, short enough to copy.

Particles continue a prompt with tokens drawn from what the constraint allows; the mass that
this has in the model's row multiplies the particle's weight. Masks go to the model and tokens
come back, no rows. When a few particles carry most of the weight, all are resampled.
`exp(log_evidence)` estimates without bias the probability that the model by itself keeps to
the constraint.
"""

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from itertools import zip_longest

import numpy as np

from genlm import AsyncLM, DrawnToken, Mask, load_model
from genlm.smc import effective_sample_size, normalised_weights, systematic_resampling


def max_word_length(limit: int, llm: AsyncLM) -> np.ndarray:
    """Table `[state, token] -> state`: letters so far in a word; the last state is dead."""
    letters = np.array([byte > 127 or chr(byte).isalpha() for byte in range(256)])
    states = np.arange(limit + 2)[:, None]
    step = np.where(letters | (states > limit), np.minimum(states + 1, limit + 1), 0)
    step = np.hstack([step, states])  # byte 256 fills the shorter tokens
    table = np.repeat(states, llm.vocab_size, axis=1)
    for column in zip_longest(*llm.byte_vocab, fillvalue=256):
        table = step[table, column]
    if llm.vocabulary.eos_token_id is not None:  # not every model ends its texts
        table[:, llm.vocabulary.eos_token_id] = states[:, 0]
    return table


async def steer(
    llm: AsyncLM, prompt: list[int], table: np.ndarray, *, size: int, steps: int, seed: int
) -> AsyncIterator[tuple[list[tuple[int, ...]], np.ndarray, float]]:
    """Yield the particles (prompt included), their weights and the log-evidence each step."""
    rng, log_evidence, state = np.random.default_rng(seed), 0.0, 0
    for token in prompt:
        state = table[state, token] % (len(table) - 1)  # a prompt may break the rule
    contexts, states = [llm.context(prompt)] * size, np.full(size, state)
    live, log_weights = np.full(size, True), np.full(size, -math.log(size))
    end, room = llm.vocabulary.eos_token_id, llm.max_context or math.inf
    allowed = [Mask(row < len(table) - 1, llm.vocab_size) for row in table]
    possible = np.array([bool(mask) for mask in allowed])

    async def drawn() -> list[DrawnToken]:
        places, seed = np.flatnonzero(live), int(rng.integers(2**63))
        masks = [allowed[states[i]] for i in places]
        return await llm.batch_draw([contexts[i] for i in places], masks, seed=seed)

    for _ in range(steps):
        log_weights[live & ~possible[states]] = -math.inf  # these cannot go on
        live &= possible[states]
        found = await drawn()
        log_weights[live] += [each.log_mass for each in found]
        spread = effective_sample_size(log_weights)  # an error if no particle can go on
        log_sum = np.logaddexp.reduce(log_weights)
        log_evidence, log_weights = log_evidence + log_sum, log_weights - log_sum
        if spread < size / 2:
            chosen = systematic_resampling(log_weights, rng.random())
            contexts, states, live = [contexts[i] for i in chosen], states[chosen], live[chosen]
            log_weights = np.full(size, -math.log(size))
            found = await drawn()  # again, so that copies of a particle differ
        for i, each in zip(np.flatnonzero(live), found):
            contexts[i] = contexts[i].extend(each.token_id)
            states[i] = table[states[i], each.token_id]
            live[i] = each.token_id != end and len(contexts[i]) <= room  # else nothing is asked
        texts = [each.token_ids for each in contexts]
        yield texts, normalised_weights(log_weights), float(log_evidence)
        if not live.any():
            return


async def _main(*backend: str) -> None:
    with load_model("demo", *backend) as llm:
        print(llm)  # noqa: T201
        prompt, table = llm.encode("The"), max_word_length(5, llm)
        drawn = steer(llm, prompt, table, size=50, steps=40, seed=0)
        *_, (texts, weights, _) = [population async for population in drawn]
        for text, weight in zip(texts, weights):
            print(f"{weight:.3f} {llm.decode(text)!r}")  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:2]))  # an engine's name; by default the one installed
