"""Drives an engine as the scheduler does, and computes what it must answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genlm import Query, SamplingParams
from genlm.plugin import stream_uniform
from genlm.testing import TINY_VOCABULARY
from genlm_sgl.conformance import TinyLlama

TOLERANCE = 1e-5
"""Measured: at most 2e-6 on all these prompts."""

MOST_STEPS = 2000


def prompts_of(*lengths: int, seed: int = 7) -> list[tuple[int, ...]]:
    """Random prompts of these lengths, always the same ones."""
    generator = np.random.default_rng(seed)
    return [
        tuple(generator.integers(0, TINY_VOCABULARY, length).tolist()) for length in lengths
    ]


def answers(engine: Any, asked: Sequence[Any]) -> list[Any]:
    """Put prompts, or pairs of prompt and sampling, through the engine.

    Returns:
        For each one a row, drawn tokens or an exception.
    """
    for number, each in enumerate(asked):
        prompt, sampling = each if isinstance(each[0], tuple) else (each, None)
        engine.submit(Query(number, prompt, None, sampling))
    return collected(engine, range(len(asked)))


def collected(engine: Any, query_ids: Sequence[int]) -> list[Any]:
    """Step the engine until these queries are answered."""
    found: dict[int, Any] = {}
    for _ in range(MOST_STEPS):
        for completion in engine.step():
            assert completion.query_id not in found, "answered twice"
            error = completion.error
            found[completion.query_id] = completion.result if error is None else error
        if len(found) == len(query_ids):
            break
    assert sorted(found) == sorted(query_ids)
    return [found[query_id] for query_id in query_ids]


def largest_error(
    tiny: TinyLlama, prompts: Sequence[tuple[int, ...]], rows: Sequence[Any]
) -> float:
    """Largest difference of a log-probability from an unbatched float32 forward."""
    for row in rows:
        assert isinstance(row, torch.Tensor), row
    return max(
        float((row - tiny.logprobs(prompt)).abs().max())
        for prompt, row in zip(prompts, rows, strict=True)
    )


def continuation(
    tiny: TinyLlama, prompt: tuple[int, ...], params: SamplingParams, adapter: str | None = None
) -> list[int]:
    """What must be drawn: token by token from the oracle's rows, by inversion."""
    drawn: list[int] = []
    while len(drawn) < params.max_tokens:
        row = tiny.logprobs((*prompt, *drawn), adapter)
        uniform = stream_uniform(params.seed, len(drawn))
        if params.temperature == 0:
            token = int(row.argmax())
        else:
            cumulative = torch.softmax(row / params.temperature, 0).cumsum(0)
            token = int((cumulative <= uniform * cumulative[-1]).sum())
        if token in params.stop_token_ids:
            break
        drawn.append(token)
    return drawn
