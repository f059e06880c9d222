"""Continuations of two prompts at once: a product of experts, short enough to copy.

The target is the product of the two models' probabilities of the whole continuation. It
cannot be sampled token by token, so particles sample from the product of the two next-token
rows: all of their entries, so it asks for whole rows, not for reductions. The sum of that
product multiplies the particle's weight, and resampling removes particles on which the experts
disagree. `exp(log_evidence)` is an unbiased estimate of the sum of the products over all
continuations.

Each particle is a coroutine; `genlm` batches their requests. The experts may also be two
models with one vocabulary, or an adapter and its base model.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch

import genlm
from genlm.smc import effective_sample_size, normalised_weights, systematic_resampling

Expert = Callable[[list[int]], Awaitable[torch.Tensor]]
"""From a continuation to the log-probabilities of its next token."""


def after(llm: genlm.AsyncLM, prompt: str) -> Expert:
    """The model after a prompt."""
    token_ids = llm.encode(prompt)
    return lambda continuation: llm.next_token_logprobs(token_ids + continuation)


async def extended(
    particle: list[int], experts: Sequence[Expert], eos: int, uniform: float
) -> tuple[list[int], float]:
    """Add a token in proportion to the experts' product; also the log of its sum."""
    if particle[-1:] == [eos]:
        return particle, 0.0
    rows = await asyncio.gather(*(expert(particle) for expert in experts))
    product = sum(row.cpu().double() for row in rows).numpy()
    top = product.max()
    mass = np.cumsum(np.exp(product - top))
    token = np.searchsorted(mass, uniform * mass[-1], side="right")
    return [*particle, int(token)], float(top + np.log(mass[-1]))


async def intersect(
    experts: Sequence[Expert], eos: int, *, size: int, steps: int, seed: int
) -> tuple[list[list[int]], np.ndarray, float]:
    """Draw continuations of at most `steps` tokens; also their weights, log-evidence."""
    rng, log_evidence = np.random.default_rng(seed), 0.0
    particles: list[list[int]] = [[] for _ in range(size)]
    log_weights = np.full(size, -math.log(size))
    for _ in range(steps):
        if effective_sample_size(log_weights) < size / 2:
            chosen = systematic_resampling(log_weights, rng.random())
            particles = [particles[i] for i in chosen]
            log_weights = np.full(size, -math.log(size))
        uniforms = rng.random(size)  # before the requests, whose order of completion may vary
        steps_of_all = (
            extended(particle, experts, eos, uniform)
            for particle, uniform in zip(particles, uniforms)
        )
        grown = await asyncio.gather(*steps_of_all)
        particles = [particle for particle, _ in grown]
        log_weights += [log_sum for _, log_sum in grown]
        total = float(np.logaddexp.reduce(log_weights))
        log_evidence, log_weights = log_evidence + total, log_weights - total
    return particles, normalised_weights(log_weights), log_evidence


async def _main() -> None:
    with genlm.load_model("demo", "hf") as llm:
        experts = after(llm, "This class represents"), after(llm, "This module defines")
        eos = llm.tokenizer.eos_token_id
        found = await intersect(experts, eos, size=50, steps=8, seed=0)
        particles, weights, log_evidence = found
        totals: Counter[str] = Counter()
        for particle, weight in zip(particles, weights):
            totals[llm.decode(particle)] += weight
        for text, total in totals.most_common(5):
            print(f"{total:.3f} {text!r}")
        print(f"log-evidence {log_evidence:.3f}, {llm.statistics().batches} batches")


if __name__ == "__main__":
    asyncio.run(_main())
