"""Sequential Monte Carlo under a hard constraint on bytes.

Particles continue a prompt with tokens drawn from the allowed ones. A particle's weight is
multiplied by the probability of the allowed tokens, and `exp(log_evidence)` is an unbiased
estimate of the probability that an unconstrained sample satisfies the constraint.
"""

import sys

import numpy as np

from genlm import load_model
from genlm.constraints import Automaton
from genlm.smc import steer_sync


def max_word_length(limit: int) -> Automaton:
    """Return the texts with words of at most as many letters; states count them."""
    letters = np.array([byte > 127 or chr(byte).isalpha() for byte in range(256)])
    states = np.arange(limit + 1)[:, None]
    longer = np.where(states < limit, states + 1, -1)  # -1: no text continues so
    return Automaton(np.where(letters, longer, 0), np.ones(limit + 1, bool))


if __name__ == "__main__":
    with load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        rule = max_word_length(5)
        *_, particles = steer_sync(
            llm, llm.encode("The"), 50, max_tokens=40, constraint=rule, text=b"The", seed=0
        )
        print(particles)  # noqa: T201
