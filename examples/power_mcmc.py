"""Samples of whole texts from the model's distribution to the power alpha, by Markov chains.

Each move draws the end of a text again, from a random position, at temperature 1 / alpha, and
accepts the new text with the probability of Metropolis and Hastings. arXiv 2510.14901.
"""

import sys
from collections import Counter

import numpy as np

import genlm


def power_mcmc(llm, prompt, chains, *, alpha, max_tokens, moves, seed=0):
    """Continue a prompt; return a text of each chain, and the share of accepted moves."""
    rng, members = np.random.default_rng(seed), np.arange(chains)

    def redrawn(texts, log_ratios, cuts, seed):
        drawn = texts.truncate(len(prompt) + cuts).sample_sync(
            max_tokens - cuts, temperature=1 / alpha, seed=seed
        )
        # Of each token: the target's log-probability minus that of the draw.
        new_ratios = alpha * drawn.logprobs.double() - drawn.draw_logprob.double()
        log_ratios = np.where(np.arange(max_tokens) < cuts[:, None], log_ratios, 0.0)
        member, place = np.nonzero(drawn.token_ids.numpy() >= 0)
        log_ratios[member, cuts[member] + place] = new_ratios[member, place]
        return drawn.population, log_ratios

    texts = llm.population(prompt, chains)
    texts, log_ratios = redrawn(texts, np.zeros((chains, max_tokens)), 0 * members, seed)
    accepted_moves = 0
    for move in range(1, moves + 1):
        cuts = rng.integers(0, max_tokens, chains)
        proposed, new_ratios = redrawn(texts, log_ratios, cuts, seed + move)
        accepted = np.log(rng.random(chains)) < (new_ratios - log_ratios).sum(1)
        both = genlm.Population.cat([texts, proposed])
        texts = both[np.where(accepted, chains + members, members)]
        log_ratios = np.where(accepted[:, None], new_ratios, log_ratios)
        accepted_moves += accepted.mean()
    return texts, accepted_moves / moves


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        prompt = llm.encode("The function returns")
        texts, share = power_mcmc(llm, prompt, 32, alpha=4, max_tokens=12, moves=20)
        for text, count in Counter(llm.batch_decode(texts)).most_common(5):
            print(f"{count} of 32 {text!r}")
        print(f"{share:.0%} of the moves were accepted")
