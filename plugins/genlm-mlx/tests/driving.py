"""Asks engines, and says how far their rows are from an oracle's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from genlm import Query, rows_from_logits
from genlm_mlx.engine import MLXEngine

Ids = tuple[int, ...]
Oracle = Callable[[Sequence[int]], torch.Tensor]


def rows_of(engine: MLXEngine, sequences: Sequence[Ids], adapter: str | None = None) -> Any:
    """Rows by one `evaluate`, which does not try again with each sequence alone."""
    queries = [Query(i, ids, adapter) for i, ids in enumerate(sequences)]
    return rows_from_logits(engine.evaluate(queries).values, engine.vocabulary)


def largest_error(engine: MLXEngine, sequences: Sequence[Ids], oracle: Oracle) -> float:
    rows = rows_of(engine, sequences).double()
    expected = torch.stack([oracle(ids).double() for ids in sequences])
    return float((rows - expected).abs().max())


def used(engine: MLXEngine, name: str) -> int:
    return int(engine.statistics()[name])


def population(seed: int, steps: int, count: int = 6) -> Iterator[list[Ids]]:
    """Particles that grow, fork, are forgotten and start again."""
    program = random.Random(seed)
    start = tuple(program.randrange(3, 300) for _ in range(7))
    particles = [start[: program.randint(1, 7)] for _ in range(count)]
    for step in range(steps):
        particles = [
            (*program.choice(particles), *program.choices(range(3, 300), k=growth))
            for growth in program.choices([1, 1, 1, 2, 5], k=count)
        ]
        if step % 6 == 5:
            particles = [ids[: program.randint(1, 9)] for ids in particles]
        yield list(dict.fromkeys(particles))
