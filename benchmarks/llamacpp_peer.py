"""llama-cpp-python's `Llama.eval`, measured in a separate interpreter.

For `bench_llamacpp.py`: reads a case per line, `PARTICLES PROMPT TAIL EVERY STEPS UNEVEN`, and
prints the milliseconds of a step, by the clock that its second argument names; the first is the
GGUF file. It computes one sequence at a time; the common prefix with the previous context is
cached.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from llama_cpp import Llama
from particle_population import CLOCKS, Clock, Population


def milliseconds_a_step(model: Any, population: Population, clock: Clock) -> float:
    particles = population.start()
    model.reset()
    model.eval(population.prompt)
    held = list(population.prompt)
    seconds = 0.0
    for step in range(population.steps):
        particles.grow()
        start = clock()
        for context in particles.contexts:
            pairs = zip(held, context, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(held))
            model.n_tokens = min(same, len(context) - 1)
            model.eval(context[model.n_tokens :])
            torch.from_numpy(model.scores[len(context) - 1]).log_softmax(-1)
            held = list(context)
        particles.resample(step)
        seconds += clock() - start
    return seconds / population.steps * 1e3


def main() -> None:
    model = Llama(
        sys.argv[1],
        n_ctx=1024,
        n_threads=torch.get_num_threads(),
        n_threads_batch=torch.get_num_threads(),
        logits_all=True,  # without it no row is stored
        type_k=0,
        type_v=0,
        verbose=False,
    )
    clock = CLOCKS[sys.argv[2]]
    for line in sys.stdin:
        population = Population(*map(int, line.split()))
        print(milliseconds_a_step(model, population, clock), flush=True)


if __name__ == "__main__":
    main()
