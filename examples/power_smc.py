"""Samples of whole texts from the model's distribution to the power alpha: Power-SMC.

A power above 1 prefers texts that the model finds likely as a whole. A low temperature sharpens
each step separately instead. Here particles are drawn at temperature 1 / alpha, and
their weights correct for the difference. arXiv 2602.10273.
"""

import sys
from collections import Counter

import numpy as np

import genlm
from genlm.smc import normalised_weights, resampled


def power_smc(llm, prompt, size, *, alpha, max_tokens, block=1, seed=0):
    """Continue a prompt; return the particles and their log-weights.

    The mean weight is an unbiased estimate of the sum of the model's probabilities to the
    power alpha over all continuations of at most `max_tokens` tokens.
    """
    rng = np.random.default_rng(seed)
    particles, log_weights = llm.population(prompt, size), np.zeros(size)
    for begin in range(0, max_tokens, block):
        ancestors, log_weights = resampled(log_weights, rng.random())
        drawn = particles[ancestors].sample_sync(
            min(block, max_tokens - begin), temperature=1 / alpha, seed=seed
        )
        gains = alpha * drawn.logprobs.double() - drawn.draw_logprob.double()
        log_weights = log_weights + gains.sum(1).numpy()
        particles = drawn.population
    return particles, log_weights


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        prompt = llm.encode("The function returns")
        particles, log_weights = power_smc(llm, prompt, 32, alpha=4, max_tokens=12)
        totals = Counter()
        for particle, weight in zip(particles, normalised_weights(log_weights)):
            totals[llm.decode(particle.token_ids)] += weight
        for text, total in totals.most_common(5):
            print(f"{total:.3f} {text!r}")
