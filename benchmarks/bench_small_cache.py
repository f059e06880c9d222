"""What do populations cost whose keys and values exceed the cache?

Populations with draws on `genlm-hf` or `genlm-vllm`, resampled every fourth step: at once, with
slots of tokens (hf) or KV blocks (vllm) for all of their tokens and for a part of them, and one
after the other. The figure is the CPU time of the process per member and step; the ratio is
that with enough slots by the contestant's.
Populations that do not fit together should cost about as much as one after the other, and a
single population that does not fit as much as the computation of the tokens that were evicted.
Model: a Llama of 31 million parameters with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from particle_model import VOCAB_SIZE, llama, save_model, tokenizer
from particle_population import CLOCKS, Clock
from report import in_turn, print_cases

from genlm import AsyncLM, OutputCache

CASES = {
    "hf": ("20/20/16/64:2400,1200", "1/100/64/64:2400,1800"),
    "vllm": ("10/20/48/64:246,160,80",),  # 320 are enough
}
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


def time_of(
    build: Callable[[], Any], case: tuple[int, ...], clock: Clock, *, at_once: bool
) -> float:
    """Microseconds per member and step."""
    count, members, steps, length = case

    async def run(lm: AsyncLM) -> float:
        prompts = [[(7 * i + 13 * j) % 200 + 1 for j in range(length)] for i in range(count)]
        await decode(lm, [1, 2], members=2, steps=2)  # libraries initialise themselves
        start = clock()
        filters = [decode(lm, prompt, members, steps) for prompt in prompts]
        if at_once:
            await asyncio.gather(*filters)
        else:
            for one in filters:
                await one
        return (clock() - start) / (count * members * steps) * 1e6

    with AsyncLM(build, output_cache=OutputCache(0)) as lm:
        return asyncio.run(run(lm))


def hf_engines() -> Callable[[int | None], Any]:
    """Return a function that builds an engine with so many slots, by default enough."""
    from genlm_hf.engine import HFEngine

    model = llama()

    def build(slots: int | None) -> Any:
        budget = None if slots is None else (slots + 1) * TOKEN_BYTES
        return HFEngine.from_model(model, tokenizer(), kv_budget_bytes=budget)

    return build


def vllm_engines(folder: Path) -> Callable[[int | None], Any]:
    """Return a function that builds an engine with so many KV blocks, by default enough."""
    from genlm_vllm.engine import VLLMEngine

    save_model(folder, VOCAB_SIZE)

    def build(blocks: int | None) -> Any:
        options = {
            "max_num_seqs": 1024,
            "max_model_len": 512,
            "num_gpu_blocks_override": 1 + (blocks or 20_000),  # vLLM reserves one
        }
        return VLLMEngine(folder, engine_opts=options)

    return build


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", nargs="?", choices=CASES, default="hf")
    parser.add_argument(
        "--cases", nargs="+", help="populations/members/steps/prompt:slots or blocks,..."
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    clock, found = CLOCKS[options.clock], {}
    with tempfile.TemporaryDirectory() as folder:
        is_hf = options.engine == "hf"
        engines = hf_engines() if is_hf else vllm_engines(Path(folder))
        unit = "slots" if is_hf else "blocks"
        for text in options.cases or CASES[options.engine]:
            sizes, _, limits = text.partition(":")
            case = tuple(map(int, sizes.split("/")))
            contestants = {
                name: functools.partial(
                    time_of, functools.partial(engines, limit), case, clock, at_once=at_once
                )
                for name, limit, at_once in (
                    ("enough", None, True),
                    ("one by one", None, False),
                    *((f"{limit} {unit}", int(limit), True) for limit in limits.split(",")),
                )
            }
            found[f"{options.engine} {sizes}"] = in_turn(contestants, options.rounds, sizes)
    print_cases(
        "small_cache",
        found,
        base="enough",
        unit="us a member and step",
        extra={"clock": options.clock},
    )


if __name__ == "__main__":
    main()
