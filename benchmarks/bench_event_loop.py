"""How long is the event loop delayed while a model runs?

The goal is at most 10 ms. A heartbeat sleeps 1 ms at a time and records the maximum
event-loop delay, while 50 particles are continued token by token. The limit
is the same particles on a no-op engine: delays by the program
itself, the interpreter's thread switches (5 ms) and the machine. The baseline runs the
same forward passes on the event loop's thread, as a program without an engine thread would.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from statistics import median

import torch
from bench_scheduler import FreeEngine
from report import print_report
from transformers import AutoModelForCausalLM

from genlm import AsyncLM, load_model

PARTICLES = 50
STEPS = 20
ROUNDS = 5
BEAT_S = 0.001
FLOOR = "engine that costs nothing"


async def latest_beat_ms(work: Coroutine[None, None, None]) -> float:
    task = asyncio.create_task(work)
    latest, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(BEAT_S)
        now = time.perf_counter()
        latest, last = max(latest, now - last - BEAT_S), now
    await task
    return latest * 1e3


async def particles(llm: AsyncLM, tokens: int) -> None:
    async def particle(i: int) -> None:
        ids = [i % tokens]
        for _ in range(STEPS):
            row = await llm.next_token_logprobs(ids)
            ids.append((int(row.argmax()) + i) % tokens)

    await asyncio.gather(*(particle(i) for i in range(PARTICLES)))


async def on_the_loop(model: torch.nn.Module) -> None:
    ids = torch.arange(1, PARTICLES + 1)[:, None]
    for _ in range(STEPS):
        with torch.inference_mode():
            best = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, best[:, None]], dim=1)
        await asyncio.sleep(0)


async def measure() -> dict[str, list[float]]:
    from genlm_hf import engine

    folder = f"{engine.__file__.rsplit('/', 1)[0]}/demo"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    samples: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with AsyncLM(FreeEngine) as free, load_model("demo", "hf") as llm:
            for name, work in {
                FLOOR: lambda: particles(free, free.vocab_size),
                "hf, demo model": lambda: particles(llm, llm.vocab_size),
                "demo model on the event loop's thread": lambda: on_the_loop(model),
            }.items():
                late = await latest_beat_ms(work())
                samples.setdefault(name, []).append(late)
    return samples


def main() -> None:
    samples = asyncio.run(measure())
    floor = median(samples[FLOOR])
    ratios = {name: median(values) / floor for name, values in samples.items()}
    print_report("event_loop", samples, unit="ms late, the latest beat", ratios=ratios)


if __name__ == "__main__":
    main()
