"""genlm-backend's transformers model, measured in a separate interpreter.

For `bench_hf_particles.py`: reads a case per line, `PARTICLES PROMPT TAIL EVERY STEPS
cached|uncached`, and prints the milliseconds of a step, by the clock that its argument
names. For `bench_gpu.py` two more arguments name a shape of `gpu_model` and a device.
`cached` computes the prompt once with its `cache_kv`, which is what its
documentation advises. Runs in an environment with genlm-backend and no genlm-core.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from typing import Any

from particle_model import llama, tokenizer
from particle_population import CLOCKS, Clock, Population

from genlm.backend.llm import AsyncTransformer

warnings.simplefilter("ignore")


async def milliseconds_a_step(
    model: Any, population: Population, clock: Clock, *, cached: bool
) -> float:
    model.clear_cache()
    model.clear_kv_cache()
    if cached:
        model.cache_kv(population.prompt)
    particles = population.start()
    seconds = 0.0
    for step in range(population.steps):
        particles.grow()
        start = clock()
        rows = await asyncio.gather(*map(model.next_token_logprobs, particles.contexts))
        particles.resample(step)
        seconds += clock() - start
        assert len(rows) == population.count
    return seconds / population.steps * 1e3


def on_device() -> tuple[Any, Any, Clock] | None:
    """Model, tokenizer and clock of the shape and device that the command line names."""
    if len(sys.argv) == 2:
        return None
    from gpu_model import SHAPES, device_clock, random_llama

    shape, device = sys.argv[2:]
    model, vocabulary = random_llama(shape, device), tokenizer(SHAPES[shape]["vocab_size"])
    return model, vocabulary, device_clock(device)


def main() -> None:
    hf_model, hf_tokenizer, clock = on_device() or (llama(), tokenizer(), CLOCKS[sys.argv[1]])
    for line in sys.stdin:
        *sizes, mode = line.split()
        population = Population(*map(int, sizes))
        # A batch leaves when it is full: it never waits for the timer.
        model = AsyncTransformer(hf_model, hf_tokenizer, batch_size=population.count)
        figure = asyncio.run(
            milliseconds_a_step(model, population, clock, cached=mode == "cached")
        )
        print(figure, flush=True)


if __name__ == "__main__":
    main()
