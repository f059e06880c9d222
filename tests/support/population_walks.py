"""Random walks of populations on a tiny model, and on its adapter `red`, against its oracle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import genlm
from genlm.testing import TINY_VOCABULARY, TinyModel

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


def tokens(generator: random.Random, count: int, width: int) -> np.ndarray[Any, Any]:
    """Draw from few tokens, -1 among them: members become equal and differ again."""
    choices = [3, 4, generator.randrange(TINY_VOCABULARY), -1]
    found = [[generator.choice(choices) for _ in range(width)] for _ in range(count)]
    return np.array(found)[:, 0] if width == 1 else np.array(found)


def walk(llm: genlm.AsyncLM, tiny: TinyModel, seed: int, steps: int) -> None:
    """Grow, fork, rest and truncate two populations beside a context and continuations."""
    generator = random.Random(seed)
    populations: dict[str | None, genlm.Population] = {None: llm.population(PROMPT, 9)}
    if tiny.adapters:
        populations["red"] = llm.population(PROMPT[: 30 + seed], 5, lora_name="red")
    single = llm.context(PROMPT[:20])

    async def together(step: int) -> None:
        nonlocal single
        asked = {}
        for adapter, before in populations.items():
            members = np.array([generator.randrange(len(before)) for _ in range(len(before))])
            if step % 3:
                members = np.arange(len(before))
            width = generator.choice([1, 1, 1, 2, 5])
            now = before[members].extend(tokens(generator, len(members), width))
            if generator.random() < 0.2:
                lengths = [generator.randint(20, length) for length in now.lengths.tolist()]
                proposed = now.truncate(lengths).extend(tokens(generator, len(now), width))
                members = sorted(generator.choices(range(2 * len(now)), k=len(now)))
                now = genlm.Population.cat([now, proposed])[members]
            populations[adapter] = now
            if generator.random() < 0.8:  # others are asked as they are some steps later
                count = generator.randint(1, len(now))
                asked[adapter] = now[sorted(generator.sample(range(len(now)), count))]
        single = single.extend([generator.randrange(3, TINY_VOCABULARY)])
        row, drawn, *found = await asyncio.gather(
            single.next_token_logprobs(),
            llm.sample(PROMPT[:9], max_tokens=3, seed=step),
            *(population.next_token_logprobs() for population in asked.values()),
        )
        assert len(drawn) == 3
        assert (
            float((row.cpu() - tiny.logprobs(tuple(single.token_ids))).abs().max()) <= TOLERANCE
        )
        for (adapter, population), rows in zip(asked.items(), found, strict=True):
            check(tiny, population, rows, adapter)

    async def all_steps() -> None:
        for step in range(steps):
            await together(step)

    asyncio.run(all_steps())
