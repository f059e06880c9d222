"""Sequential Monte Carlo under a hard constraint on bytes, short enough to copy.

Particles continue a prompt with tokens drawn from what the constraint allows; the mass that
this has in the model's row multiplies the particle's weight. `exp(log_evidence)` estimates
without bias the probability that the model by itself keeps to the constraint.
"""

import asyncio
import sys

import numpy as np

from genlm import load_model
from genlm.constraints import Automaton
from genlm.smc import steer


def max_word_length(limit: int) -> Automaton:
    """Return the texts with words of at most as many letters; states count them."""
    letters = np.array([byte > 127 or chr(byte).isalpha() for byte in range(256)])
    states = np.arange(limit + 1)[:, None]
    longer = np.where(states < limit, states + 1, -1)  # -1: no text continues so
    return Automaton(np.where(letters, longer, 0), np.ones(limit + 1, bool))


async def _main(*backend: str) -> None:
    with load_model("demo", *backend) as llm:
        print(llm)  # noqa: T201
        prompt, size = "The", 50
        rule = max_word_length(5).start(llm, size, text=prompt.encode())
        steps = steer(llm, llm.encode(prompt), size, max_tokens=40, constraint=rule, seed=0)
        *_, particles = [each async for each in steps]
        print(particles)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:2]))  # an engine's name; by default the one installed
