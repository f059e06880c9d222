"""Texts that a scorer prefers: blocks of tokens, reweighted by a reward and resampled.

The target is the model's probability of a text times the exponential of its reward. Particles
are sampled in blocks of tokens. After each block, a scorer computes the change of the reward,
and particles are resampled. The reward is the log-probability under a judge: a population of a
second model, an adapter or another prompt; any function of the tokens can replace it.
arXiv 2502.01618, 2604.16453.
"""

import sys
from collections import Counter

import numpy as np

import genlm
from genlm.smc import normalised_weights, resampled


def reward_smc(particles, judge, *, scale, blocks, block, stop=(), seed=0):
    """Continue a population by blocks of tokens; return it and its log-weights.

    The mean weight is an unbiased estimate of the sum over all continuations of the model's
    probability times the judge's to the power `scale`.
    """
    rng, size = np.random.default_rng(seed), len(particles)
    log_weights = np.zeros(size)
    for _ in range(blocks):
        ancestors, log_weights = resampled(log_weights, rng.random())
        judge = judge[ancestors]
        drawn = particles[ancestors].sample_sync(block, stop=stop, seed=seed)
        rewards = scale * judge.score_sync(drawn.token_ids).double().sum(1)
        log_weights = log_weights + rewards.numpy()
        particles, judge = drawn.population, judge.extend(drawn.token_ids)
    return particles, log_weights


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        particles = llm.population(llm.encode("The method"), 32)
        judge = llm.population(llm.encode("If the file cannot be opened, the method"), 32)
        particles, log_weights = reward_smc(particles, judge, scale=1, blocks=3, block=4)
        totals = Counter()
        for particle, weight in zip(particles, normalised_weights(log_weights)):
            totals[llm.decode(particle.token_ids)] += weight
        for text, total in totals.most_common(5):
            print(f"{total:.3f} {text!r}")
