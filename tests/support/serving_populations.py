"""Rows of populations on a tiny model against its oracle, and statistics of its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import genlm
from genlm.testing import TinyModel

PROMPT = [5, 6, 7, 8] * 10

TOLERANCE = 1e-4
"""With adapters; without, the largest error is 4e-6."""


def figures(llm: genlm.AsyncLM, *names: str) -> Callable[[], tuple[int, ...]]:
    """Return a function that tells by how much counts of the engine have grown since."""
    before = llm.statistics()
    return lambda: tuple((llm.statistics() - before).engine[name] for name in names)


def check(
    tiny: TinyModel, population: genlm.Population, rows: torch.Tensor, adapter: Any = None
) -> None:
    """Compare rows with an unbatched forward pass."""
    known: dict[tuple[int, ...], torch.Tensor] = {}
    for context, row in zip(population, rows.cpu(), strict=True):
        ids = tuple(context.token_ids)
        if ids not in known:
            known[ids] = tiny.logprobs(ids, adapter)
        assert float((row - known[ids]).abs().max()) <= TOLERANCE
