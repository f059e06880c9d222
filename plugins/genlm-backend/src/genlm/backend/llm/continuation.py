"""Continuations of models that users write, which have rows and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch

from genlm.plugin import draw_tokens, stream_uniform

__all__ = ["sampled_continuation"]


async def sampled_continuation(
    next_token_logprobs: Callable[[list[int]], Awaitable[torch.Tensor]],
    prompt: tuple[int, ...],
    max_tokens: int,
    temperature: float,
    stop_ids: frozenset[int],
    seed: int,
) -> list[int]:
    """Continue a sequence token by token from its rows, until a stop id or `max_tokens`.

    Returns:
        The drawn ids without the stop id.
    """
    sequence = list(prompt)
    for position in range(max_tokens):
        row = await next_token_logprobs(sequence)
        uniform = stream_uniform(seed, position)
        token_id = int(draw_tokens(row[None], [temperature], [uniform]))
        if token_id in stop_ids:
            break
        sequence.append(token_id)
    return sequence[len(prompt) :]
