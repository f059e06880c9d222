"""Drawing tokens from rows, reproducibly on every engine and under any batching.

The token at a position of a continuation depends on the row, the temperature, the seed of the
continuation and the position, and on nothing else: no generator keeps a state. Chunked
prefills, preemption and other requests change nothing, every rank of a model that is split
over several devices draws the same token, and so does every engine with equal rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch

from genlm.core.query import SamplingParams

__all__ = ["draw_tokens", "sample_continuation", "stream_seeds", "stream_uniform"]

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def stream_seeds(seed: int | None, count: int) -> list[int]:
    """Derive one seed per sequence, distinct and independent, from one seed.

    Args:
        seed: None takes fresh entropy from the operating system.
        count: Number of seeds; the first n are the same for every count.

    Returns:
        Integers from 0 to 2**63 - 1.
    """
    return [
        int(child.generate_state(1, np.uint64)[0]) >> 1  # engines take signed 64 bits
        for child in np.random.SeedSequence(seed).spawn(count)
    ]


def stream_uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) at a position of a seed's stream.

    SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014),
    which computes any position directly.

    Args:
        seed: An integer, taken modulo 2**64.
        position: 0 for the first token of a continuation.

    Returns:
        A multiple of 2**-53.
    """
    state = (seed + (position + 1) * _GOLDEN_GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((state ^ (state >> 31)) >> 11) / 2**53


def draw_tokens(
    logprobs: torch.Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> torch.Tensor:
    """Draw one id per row, with probability proportional to `exp(logprobs / temperature)`.

    Inverts the cumulative distribution in float64, on the device of the rows, or on the CPU
    for Apple's GPUs, which lack float64. Each row is drawn from independently. At
    temperature 0 the result is the most likely id, the lowest of equals.

    Args:
        logprobs: Shape `(n, vocab_size)`, not necessarily normalised; not changed.
        temperatures: One per row, finite and not negative.
        uniforms: One number in [0, 1) per row: for reproducible draws, `stream_uniform` of
            the continuation's seed and the token's position in it.

    Returns:
        Ids, shape `(n,)`, int64, on the device of `logprobs`.
    """
    if not any(temperatures):
        return logprobs.argmax(-1)
    logits = (logprobs.cpu() if logprobs.device.type == "mps" else logprobs).double()
    divisors = logits.new_tensor([t or 1.0 for t in temperatures])[:, None]
    # The largest becomes 0 before the division, which could make all of them -inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / divisors
    cumulative = torch.softmax(logits, dim=-1).cumsum(-1)
    # A multiple of 2**-53 below 1 times the total is below the total, rounded too.
    thresholds = cumulative[:, -1:] * logits.new_tensor(uniforms)[:, None]
    drawn = torch.searchsorted(cumulative, thresholds, right=True)[:, 0].to(logprobs.device)
    if all(temperatures):
        return drawn
    is_greedy = torch.tensor([t == 0 for t in temperatures], device=logprobs.device)
    return torch.where(is_greedy, logprobs.argmax(-1), drawn)


async def sample_continuation(
    next_token_logprobs: Callable[[list[int]], Awaitable[torch.Tensor]],
    prompt: tuple[int, ...],
    params: SamplingParams,
    max_context: int | None,
) -> list[int]:
    """Continue a sequence token by token from its rows.

    Ends before a stop id, after `params.max_tokens`, or when the context is full.

    Returns:
        The drawn ids without the stop id.
    """
    seed = secrets.randbits(63) if params.seed is None else params.seed
    sequence = list(prompt)
    for position in range(params.max_tokens):
        if max_context is not None and len(sequence) > max_context:
            break
        row = await next_token_logprobs(sequence)
        uniform = stream_uniform(seed, position)
        token_id = int(draw_tokens(row[None], [params.temperature], [uniform]))
        if token_id in params.stop_token_ids:
            break
        sequence.append(token_id)
    return sequence[len(prompt) :]
