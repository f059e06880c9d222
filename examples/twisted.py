"""Twisted SMC: a bias looks ahead to a condition on the finished text.

The texts have an exact number of spaces after a given number of tokens. The twist is the
estimated log-probability that a text satisfies this; it is added to the log-probabilities as
`bias=` at every step. The weights correct its errors. arXiv 2404.17546.
"""

import sys

import numpy as np

import genlm
from genlm.smc import resampled


def lookahead(shares, wanted, steps):
    """Log-probability that so many independent tokens have 0, 1, ..., `wanted` spaces."""
    rows = [np.eye(1, wanted + 1)[0]]
    for _ in range(steps):
        rows.append(np.convolve(rows[-1], shares)[: wanted + 1])
    with np.errstate(divide="ignore"):
        return np.log(np.pad(rows, ((0, 0), (0, wanted + 1))))  # indices below 0: too many


def twisted(llm, prompt, size, *, spaces, max_tokens, seed=0):
    """Continue a prompt; the mean weight estimates the probability of so many spaces."""
    rng, end = np.random.default_rng(seed), llm.vocabulary.eos_token_id
    particles, needed = llm.population(prompt, size), np.full(size, spaces)
    counts = np.array([min(bytes(token).count(b" "), spaces + 1) for token in llm.byte_vocab])
    if end is not None:
        counts[end] = spaces + 1  # no text ends early
    row = particles[0].next_token_logprobs_sync().double().exp().cpu()
    table = lookahead(np.bincount(counts, row)[: spaces + 1], spaces, max_tokens)
    log_weights = table[max_tokens, needed]
    for left in reversed(range(max_tokens)):
        ancestors, log_weights = resampled(log_weights, rng.random())
        particles, needed = particles[ancestors], needed[ancestors]
        bias = table[left, needed[:, None] - counts] - table[left + 1, needed][:, None]
        drawn = particles.draw_sync(bias=bias, seed=seed)
        log_weights = log_weights + drawn.log_mass.double().numpy()
        particles, needed = particles.extend(drawn.token_ids), needed - counts[drawn.token_ids]
    return particles, log_weights


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        particles = twisted(llm, llm.encode("The function"), 20, spaces=3, max_tokens=8)
        for particle, log_weight in zip(*particles):
            print(f"{log_weight:8.3f} {llm.decode(particle.token_ids)!r}")
