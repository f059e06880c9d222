"""Beam search: the continuations that the model finds most likely, with their scores.

The beams are a population. A step requests the best tokens of each beam, keeps the best of all
extensions, and indexes the population by their parents. A finished beam remains a candidate
with its score.
"""

import math
import sys

import torch

import genlm


def beam_search(llm, prompt, width, *, max_tokens):
    """Return `width` continuations, the most likely first, and their log-probabilities."""
    end = llm.vocabulary.eos_token_id
    beams, scores = llm.population(prompt, 1), torch.zeros(1, dtype=torch.float64)
    for _ in range(max_tokens):
        top = beams.top_tokens_sync(min(width, llm.vocab_size))
        is_over = beams.finished[:, None]
        gains = top.logprobs.double().masked_fill(is_over, -math.inf)
        gains[:, :1] = gains[:, :1].masked_fill(is_over, 0)  # one candidate: itself
        token_ids = top.token_ids.masked_fill(is_over, -1)
        candidates = (scores[:, None] + gains).flatten()
        scores, places = candidates.topk(min(width, int((candidates > -math.inf).sum())))
        token_ids = token_ids.flatten()[places]
        beams = beams[places // gains.shape[1]].extend(token_ids)
        beams = beams.finish(token_ids == (-1 if end is None else end))
        if beams.finished.all():
            break
    return beams, scores


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        prompt = llm.encode("The function returns")
        beams, scores = beam_search(llm, prompt, 10, max_tokens=8)
        for beam, score in zip(beams, scores.tolist()):
            print(f"{score:8.3f} {llm.decode(beam.token_ids)!r}")
