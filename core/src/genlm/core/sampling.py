"""Drawing tokens from rows, with a reproducible stream of randomness per sequence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import torch

from genlm.core.query import SamplingParams

__all__ = ["draw_token", "draw_tokens", "stream_seeds"]


def stream_seeds(seed: int | None, count: int) -> list[int]:
    """Derive one seed per sequence, distinct and independent, from one seed.

    Args:
        seed: None takes fresh entropy from the operating system.
        count: How many; the first n are the same whatever the count.
    """
    return [
        int(child.generate_state(1, np.uint64)[0]) >> 1  # engines take signed 64 bits
        for child in np.random.SeedSequence(seed).spawn(count)
    ]


def draw_token(
    logprobs: torch.Tensor, temperature: float, generator: np.random.Generator
) -> int:
    """Draw an id with probability proportional to `exp(logprobs / temperature)`.

    Inversion of the cumulative distribution in float64, on the row's device, or on the CPU
    for Apple's GPUs, which have no float64. At temperature 0 the most likely id (the lowest
    of equals), without drawing.

    Args:
        logprobs: Shape `(vocab_size,)`, not necessarily normalised; not changed.
        temperature: Finite and not negative, however small.
        generator: Gives one uniform number, whatever the row.
    """
    if temperature == 0:
        return int(torch.argmax(logprobs))
    logits = (logprobs.cpu() if logprobs.device.type == "mps" else logprobs).double()
    # The largest becomes 0 before the division, which could take all of them to -inf.
    logits = (logits - logits.max()) / temperature
    cumulative = torch.softmax(logits, dim=-1).cumsum(-1)
    threshold = cumulative[-1:] * generator.random()
    return int(torch.searchsorted(cumulative, threshold, right=True))


async def draw_tokens(
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
    generator = np.random.default_rng(params.seed)
    sequence = list(prompt)
    while len(sequence) - len(prompt) < params.max_tokens:
        if max_context is not None and len(sequence) > max_context:
            break
        row = await next_token_logprobs(sequence)
        token_id = draw_token(row, params.temperature, generator)
        if token_id in params.stop_token_ids:
            break
        sequence.append(token_id)
    return sequence[len(prompt) :]
