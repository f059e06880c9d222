"""Continuations of two prompts at once: a product of experts.

The target is the product of the two models' probabilities of the whole continuation. Particles
are drawn from the product of the next-token rows: the rows of one expert are the bias of the
draws from the other. The sum of the product multiplies the particle's weight, and resampling
removes particles on which the experts disagree. The experts may also be two models with one
vocabulary, or an adapter and its base model.
"""

import sys
from collections import Counter

import numpy as np

import genlm
from genlm.smc import normalised_weights, resampled


def intersect(first, second, *, max_tokens, end=-1, seed=0):
    """Continue two populations by the same tokens; return the first, and its log-weights.

    The mean weight is an unbiased estimate of the sum of the products over all continuations.
    """
    rng, log_weights = np.random.default_rng(seed), np.zeros(len(first))
    for _ in range(max_tokens):
        ancestors, log_weights = resampled(log_weights, rng.random())
        first, second = first[ancestors], second[ancestors]
        drawn = first.draw_sync(bias=second.next_token_logprobs_sync(), seed=seed)
        log_weights = log_weights + drawn.log_mass.double().numpy()
        first = first.extend(drawn.token_ids).finish(drawn.token_ids == end)
        second = second.extend(drawn.token_ids)
    return first, log_weights


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        prompts = llm.encode("This class represents"), llm.encode("This module defines")
        experts = [llm.population(prompt, 50) for prompt in prompts]
        end = -1 if llm.vocabulary.eos_token_id is None else llm.vocabulary.eos_token_id
        particles, log_weights = intersect(*experts, max_tokens=8, end=end)
        totals = Counter()
        for particle, weight in zip(particles, normalised_weights(log_weights)):
            totals[llm.decode(particle.token_ids[len(prompts[0]) :])] += weight
        for text, total in totals.most_common(5):
            print(f"{total:.3f} {text!r}")
