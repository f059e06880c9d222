"""genlm-backend's MLX model, measured in a separate interpreter.

For `bench_mlx.py`: reads a case per line, `PARTICLES PROMPT TAIL EVERY STEPS
UNEVEN`, and prints
the milliseconds of a step, by the clock that its second argument names; the first is the
model's folder. Runs in an environment with genlm-backend, mlx-lm and no genlm-core.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from typing import Any

import mlx_lm
from particle_population import CLOCKS, Clock, Population

from genlm.backend.llm import AsyncMlxLM

warnings.simplefilter("ignore")


async def milliseconds_a_step(model: Any, population: Population, clock: Clock) -> float:
    particles = population.start()
    await asyncio.gather(*map(model.next_token_logprobs, particles.contexts))
    seconds = 0.0
    for step in range(population.steps):
        particles.grow()
        start = clock()
        rows = await asyncio.gather(*map(model.next_token_logprobs, particles.asked))
        particles.resample(step)
        seconds += clock() - start
        assert len(rows) == len(particles.asked)
    return seconds / population.steps * 1e3


def main() -> None:
    mlx_model, tokenizer = mlx_lm.load(sys.argv[1])
    clock = CLOCKS[sys.argv[2]]
    for line in sys.stdin:
        population = Population(*map(int, line.split()))
        model = AsyncMlxLM(mlx_model, tokenizer)
        print(asyncio.run(milliseconds_a_step(model, population, clock)), flush=True)


if __name__ == "__main__":
    main()
