"""Texts of a base model that another model proposes: importance draws.

An adapter, a smaller model with the same vocabulary or, as here, the same model after another
prompt proposes tokens, so that texts occur which the base model rarely samples. The weights
correct for the difference, so that weighted averages are those of the base model. It is a
learned proposal in the terms of twisted SMC, arXiv 2404.17546.
"""

import sys
from collections import Counter

import numpy as np

import genlm
from genlm.smc import normalised_weights, resampled


def importance(base, proposal, *, max_tokens, end=-1, seed=0):
    """Continue two populations by the tokens of `proposal`; return `base` and log-weights."""
    rng, log_weights = np.random.default_rng(seed), np.zeros(len(base))
    for _ in range(max_tokens):
        ancestors, log_weights = resampled(log_weights, rng.random())
        base, proposal = base[ancestors], proposal[ancestors]
        drawn = proposal.draw_sync(seed=seed)
        logprobs = base.token_logprobs_sync(drawn.token_ids)
        log_weights = log_weights + (logprobs - drawn.draw_logprob).double().numpy()
        base = base.extend(drawn.token_ids)
        proposal = proposal.extend(drawn.token_ids).finish(drawn.token_ids == end)
    return base, log_weights


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        prompts = llm.encode("The method"), llm.encode("If there is an error, the method")
        base, proposal = (llm.population(prompt, 100) for prompt in prompts)
        end = -1 if llm.vocabulary.eos_token_id is None else llm.vocabulary.eos_token_id
        particles, log_weights = importance(base, proposal, max_tokens=4, end=end)
        totals = Counter()
        for particle, weight in zip(particles, normalised_weights(log_weights)):
            totals[llm.decode(particle.token_ids)] += weight
        for text, total in totals.most_common(5):
            print(f"{total:.3f} {text!r}")
