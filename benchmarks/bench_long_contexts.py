"""How long does a request take without a model, and does it depend on the context?

Particles on a no-op engine: at each step every particle extends its context by a token and
requests its row, all concurrently. Contestants are contexts (`llm.context`, `extend`), lists
that a program appends to, and a trivial asyncio batcher that ignores its ids, which shows the
time of asyncio itself.

The last part creates, requests and drops contexts, and reports the memory growth.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import torch
from bench_scheduler import VOCAB_SIZE, FreeEngine, TrivialBatcher
from report import print_report

from genlm import AsyncLM, OutputCache

PARTICLES = 1000
LENGTHS = (16, 128, 512, 2048, 8192)
STEPS = 12
ROUNDS = 5
MADE = 100_000

Ask = Callable[[Any], Awaitable[torch.Tensor]]


def prompts(length: int) -> list[list[int]]:
    """Contexts that differ in their last tokens, as those of particles do."""
    generator = random.Random(length)
    shared = [generator.randrange(VOCAB_SIZE) for _ in range(length - 12)]
    return [
        shared + [generator.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(PARTICLES)
    ]


def tokens(step: int) -> list[int]:
    """What each particle draws."""
    generator = random.Random(step)
    return [generator.randrange(VOCAB_SIZE) for _ in range(PARTICLES)]


async def by_context(llm: AsyncLM, length: int) -> list[float]:
    contexts = [llm.context(ids) for ids in prompts(length)]
    times = []
    for step in range(STEPS):
        drawn = tokens(step)
        start = time.process_time()
        contexts = [c.extend(token) for c, token in zip(contexts, drawn, strict=True)]
        await asyncio.gather(*(context.next_token_logprobs() for context in contexts))
        times.append(time.process_time() - start)
    return times


async def by_list(ask: Ask, length: int) -> list[float]:
    lists = prompts(length)
    times = []
    for step in range(STEPS):
        drawn = tokens(step)
        start = time.process_time()
        for ids, token in zip(lists, drawn, strict=True):
            ids.append(token)
        await asyncio.gather(*(ask(ids) for ids in lists))
        times.append(time.process_time() - start)
    return times


def microseconds(times: list[float]) -> float:
    """Median time of a request; the first step, which checks the whole prompt, left out."""
    return statistics.median(times[1:]) / PARTICLES * 1e6


async def measure_time() -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    with AsyncLM(FreeEngine, output_cache=OutputCache(0)) as llm:
        for _ in range(ROUNDS):
            trivial = await by_list(TrivialBatcher().next_token_logprobs, LENGTHS[0])
            samples.setdefault("trivial asyncio batcher", []).append(microseconds(trivial))
            for length in LENGTHS:
                handles = await by_context(llm, length)
                samples.setdefault(f"contexts of {length}", []).append(microseconds(handles))
                lists = await by_list(llm.next_token_logprobs, length)
                samples.setdefault(f"lists of {length}", []).append(microseconds(lists))
    return samples


async def growth_mib() -> float:
    """Memory that stays after `MADE` contexts of 64 tokens were made, asked and dropped."""
    process = psutil.Process(os.getpid())

    async def make(llm: AsyncLM, count: int) -> None:
        for start in range(0, count, PARTICLES):
            prompt = llm.context([start % 32, start // 32 % 32] + [7] * 62)
            for first in range(PARTICLES // 32):
                contexts = [prompt.extend([first % 32, i]) for i in range(32)]
                await asyncio.gather(*(c.next_token_logprobs() for c in contexts))

    with AsyncLM(FreeEngine, output_cache=OutputCache(100)) as llm:
        await make(llm, MADE // 5)
        gc.collect()
        before = process.memory_info().rss
        await make(llm, MADE)
        gc.collect()
        return (process.memory_info().rss - before) / 2**20


def main() -> None:
    samples = asyncio.run(measure_time())
    base = {
        kind: statistics.median(samples[f"{kind} of {LENGTHS[0]}"])
        for kind in ("contexts", "lists")
    }
    ratios = {
        name: statistics.median(values) / base[name.split()[0]]
        for name, values in samples.items()
        if name.split()[0] in base
    }
    grown = asyncio.run(growth_mib())
    print(f"{MADE:,} contexts made, asked and dropped: {grown:+.1f} MiB")
    samples["MiB more after 100,000 contexts"] = [grown]
    print_report("long_contexts", samples, unit="us a request", ratios=ratios)


if __name__ == "__main__":
    main()
