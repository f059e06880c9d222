"""Continuations of models that users write, which have rows and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

import torch

from genlm.plugin import SamplingParams, draw_tokens, stream_uniform

__all__ = ["sampled_continuation"]


async def sampled_continuation(
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
