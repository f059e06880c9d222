"""What do populations cost whose keys and values exceed the cache?

Populations with draws on `genlm-hf`, resampled every fourth step: at once, with slots for all
of their tokens and for a part of them, and one after the other. The figure is the CPU time of
the process per member and step; the ratio is that with enough slots by the contestant's.
Populations that do not fit together should cost about as much as one after the other, and a
single population that does not fit as much as the computation of the tokens that were evicted.
Model: a Llama of 31 million parameters with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import torch
from particle_model import llama, tokenizer
from particle_population import CLOCKS, Clock
from report import in_turn, print_cases

from genlm import AsyncLM, OutputCache
from genlm_hf.engine import HFEngine

RESAMPLE_EVERY = 4
TOKEN_BYTES = 8 * 2 * 4 * 64 * 4  # layers, keys and values, heads, width, float32


async def decode(lm: AsyncLM, prompt: Sequence[int], members: int, steps: int) -> None:
    """A particle filter in which every second member is a copy of its neighbour."""
    population = lm.population(prompt, members)
    for step in range(steps):
        drawn = await population.draw(seed=step)
        population = population.extend(drawn.token_ids)
        if step % RESAMPLE_EVERY == RESAMPLE_EVERY - 1:
            population = population[torch.arange(members) // 2 * 2]


def time_of(lm: AsyncLM, case: tuple[int, ...], clock: Clock, *, at_once: bool) -> float:
    """Microseconds per member and step."""
    count, members, steps, length = case

    async def run() -> float:
        prompts = [[(7 * i + 13 * j) % 200 + 1 for j in range(length)] for i in range(count)]
        start = clock()
        filters = [decode(lm, prompt, members, steps) for prompt in prompts]
        if at_once:
            await asyncio.gather(*filters)
        else:
            for one in filters:
                await one
        return (clock() - start) / (count * members * steps) * 1e6

    lm.clear_kv_cache()
    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["20/20/16/64:2400,1200", "1/100/64/64:2400,1800"],
        help="populations/members/steps/prompt:slots,...",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    clock, model = CLOCKS[options.clock], llama()

    def served(slots: int | None) -> AsyncLM:
        budget = None if slots is None else (slots + 1) * TOKEN_BYTES
        return AsyncLM(
            lambda: HFEngine.from_model(model, tokenizer(), kv_budget_bytes=budget),
            output_cache=OutputCache(0),
        )

    found = {}
    for text in options.cases:
        sizes, _, limits = text.partition(":")
        case = tuple(map(int, sizes.split("/")))
        models = {f"{slots} slots": served(int(slots)) for slots in limits.split(",")}
        with served(None) as enough:
            contestants = {
                "enough slots": lambda lm=enough, c=case: time_of(lm, c, clock, at_once=True),
                "one by one": lambda lm=enough, c=case: time_of(lm, c, clock, at_once=False),
            } | {
                name: lambda lm=lm, c=case: time_of(lm, c, clock, at_once=True)
                for name, lm in models.items()
            }
            found[sizes] = in_turn(contestants, options.rounds, sizes)
        for lm in models.values():
            lm.close()
    print_cases(
        "small_cache",
        found,
        base="enough slots",
        unit="us a member and step",
        extra={"clock": options.clock},
    )


if __name__ == "__main__":
    main()
