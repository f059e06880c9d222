"""Functions that run an engine like the scheduler, and the expected results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genlm import Query
from genlm.plugin import TokenSequence
from genlm.testing import TINY_VOCABULARY
from genlm_sgl.conformance import TinyLlama

TOLERANCE = 1e-5
"""Maximum error of a log-probability; the largest measured error is 2e-6."""

MAX_STEPS = 2000


def prompts_of(*lengths: int, seed: int = 7) -> list[tuple[int, ...]]:
    """Return random prompts of these lengths; equal arguments return equal prompts."""
    generator = np.random.default_rng(seed)
    return [
        tuple(generator.integers(0, TINY_VOCABULARY, length).tolist()) for length in lengths
    ]


def answers(
    engine: Any, contexts: Sequence[tuple[int, ...]], adapter: str | None = None
) -> list[Any]:
    """Return the rows or errors of contexts."""
    for number, context in enumerate(contexts):
        engine.submit(Query(number, TokenSequence.of(context), adapter))
    return collected(engine, range(len(contexts)))


def collected(engine: Any, query_ids: Sequence[int]) -> list[Any]:
    """Step the engine until queries are complete and return their results or errors."""
    results: dict[int, Any] = {}
    for _ in range(MAX_STEPS):
        if len(results) == len(query_ids):
            break
        for completion in engine.step():
            assert completion.query_id not in results, "answered twice"
            error = completion.error
            results[completion.query_id] = completion.result if error is None else error
    assert sorted(results) == sorted(query_ids)
    return [results[query_id] for query_id in query_ids]


def largest_error(
    tiny: TinyLlama, prompts: Sequence[tuple[int, ...]], rows: Sequence[Any]
) -> float:
    """Return the largest error of rows against unbatched float32 forward passes."""
    for row in rows:
        assert isinstance(row, torch.Tensor), row
    return max(
        float((row - tiny.logprobs(prompt)).abs().max())
        for prompt, row in zip(prompts, rows, strict=True)
    )


def check(engine: Any, tiny: TinyLlama, contexts: Sequence[tuple[int, ...]]) -> None:
    """Compare the rows of contexts with unbatched forward passes."""
    assert largest_error(tiny, contexts, answers(engine, contexts)) <= TOLERANCE
