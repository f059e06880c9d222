"""Sequential Monte Carlo under a hard constraint on bytes, short enough to copy.

Particles continue a prompt with tokens drawn from what the constraint allows; the mass that
this has in the model's row multiplies the particle's weight. `exp(log_evidence)` estimates
without bias the probability that the model by itself keeps to the constraint.
"""

import asyncio
import sys
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from genlm import AsyncLM, load_model
from genlm.smc import steer


@dataclass(frozen=True)
class MaxWordLength:
    """Words of at most `len(table) - 2` letters; the last state of the table is dead."""

    table: np.ndarray  # [state, token] -> state
    masks: np.ndarray  # [state, token] -> whether the token is allowed
    mask_index: np.ndarray  # the state of each particle: letters so far in a word

    @classmethod
    def of(cls, limit: int, llm: AsyncLM, prompt: list[int], size: int) -> "MaxWordLength":
        """Return the rule of as many particles, all of which continue a prompt."""
        letters = np.array([byte > 127 or chr(byte).isalpha() for byte in range(256)])
        states = np.arange(limit + 2)[:, None]
        step = np.where(letters | (states > limit), np.minimum(states + 1, limit + 1), 0)
        step = np.hstack([step, states])  # byte 256 fills the shorter tokens
        table = np.repeat(states, llm.vocab_size, axis=1)
        for column in zip_longest(*llm.byte_vocab, fillvalue=256):
            table = step[table, column]
        if llm.vocabulary.eos_token_id is not None:  # not every model ends its texts
            table[:, llm.vocabulary.eos_token_id] = states[:, 0]
        state = 0
        for token in prompt:
            state = table[state, token] % (limit + 1)  # a prompt may break the rule
        return cls(table, table <= limit, np.full(size, state))

    def advance(self, token_ids: np.ndarray) -> "MaxWordLength":
        """Return the rule after a token of each particle."""
        states = self.table[self.mask_index, token_ids]
        return replace(self, mask_index=np.where(token_ids < 0, self.mask_index, states))

    def __getitem__(self, ancestors: np.ndarray) -> "MaxWordLength":
        return replace(self, mask_index=self.mask_index[ancestors])


async def _main(*backend: str) -> None:
    with load_model("demo", *backend) as llm:
        print(llm)  # noqa: T201
        prompt, size = llm.encode("The"), 50
        rule = MaxWordLength.of(5, llm, prompt, size)
        steps = steer(llm, prompt, size, max_tokens=40, constraint=rule, seed=0)
        *_, particles = [each async for each in steps]
        for context, weight in zip(particles.population, particles.weights):
            print(f"{weight:.3f} {llm.decode(context.token_ids)!r}")  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:2]))  # an engine's name; by default the one installed
