"""Drives an engine as the scheduler does, and computes what it must answer."""

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
"""Measured: at most 2e-6 on all these prompts."""

MOST_STEPS = 2000


def prompts_of(*lengths: int, seed: int = 7) -> list[tuple[int, ...]]:
    """Random prompts of these lengths, always the same ones."""
    generator = np.random.default_rng(seed)
    return [
        tuple(generator.integers(0, TINY_VOCABULARY, length).tolist()) for length in lengths
    ]


def answers(
    engine: Any, contexts: Sequence[tuple[int, ...]], adapter: str | None = None
) -> list[Any]:
    """Return the row of each context, or its error."""
    for number, context in enumerate(contexts):
        engine.submit(Query(number, TokenSequence.of(context), adapter))
    return collected(engine, range(len(contexts)))


def collected(engine: Any, query_ids: Sequence[int]) -> list[Any]:
    """Step the engine until these queries are answered."""
    found: dict[int, Any] = {}
    for _ in range(MOST_STEPS):
        if len(found) == len(query_ids):
            break
        for completion in engine.step():
            assert completion.query_id not in found, "answered twice"
            error = completion.error
            found[completion.query_id] = completion.result if error is None else error
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


def check(engine: Any, tiny: TinyLlama, contexts: Sequence[tuple[int, ...]]) -> None:
    """Compare the rows of contexts with unbatched forward passes."""
    assert largest_error(tiny, contexts, answers(engine, contexts)) <= TOLERANCE
