"""How fast does `genlm-hf` serve a population, and how long does it take outside the model?

A `Population` is one request for all members, with arrays from the caller to the model. Two
questions:

- Outside the model (`host`): members are extended by a token of 64, rows are computed and
  reduced to a column, and every fourth step resampled, after a prompt of 512 tokens. The
  forward pass returns zeros. The figure is the time of the population, the scheduler, the
  block table and the plan of the pass, in microseconds per member and step. It should not
  depend on the number of members; the limit is a few passes over some arrays. The same number
  of members is also divided among populations of different prompts that are extended
  concurrently, as by programs for many prompts.
- With the model: a population whose members are extended by the tokens that are drawn for them,
  with a second copy of the weights (`prepack=True`) and without, against lockstep decoding, the
  model's `[N, 1]` forward pass with a cache for every member and whole rows, without draws,
  and against one coroutine per particle that requests whole rows. The limit is
  the time of the linear layers.

Figures are the CPU time of the whole process (`--clock wall` for elapsed time). All contestants
run in turn in every round; the ratio is lockstep's time by a contestant's in the same round,
the median over rounds. Model: a Llama of 31 million parameters with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from bench_hf_particles import genlm, lockstep
from particle_model import llama, tokenizer
from particle_population import CLOCKS, Clock, Population
from report import in_turn, print_cases

from genlm import AsyncLM, OutputCache
from genlm import Population as Members
from genlm.core.queries.query import GroupReduction
from genlm.prefix import ForwardResult, TokenBatch
from genlm_hf.engine import HFEngine
from genlm_hf.packed.attention import PackedForward
from genlm_hf.packed.plan import SharedLengths, plan_pass

SEED = 5
HOST_STEPS, HOST_PROMPT, HOST_TOKENS, HOST_VOCABULARY = 24, 512, 64, 300
RESAMPLE_EVERY = 4
MOST_CONCURRENT = 1000


class FirstColumn(GroupReduction):
    """The log-probability of token 0: what costs least."""

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        del members
        return (rows[:, 0][row_of],)


@contextmanager
def no_forward(results: int) -> Iterator[None]:
    """Let passes return zeros after they are planned."""
    zeros, shared_lengths = torch.zeros(results, HOST_VOCABULARY), SharedLengths()
    compute = PackedForward.__call__

    def plan(_self: PackedForward, batch: TokenBatch) -> ForwardResult:
        plan = plan_pass(batch, shared_lengths)
        return ForwardResult(zeros[: len(plan.results)], len(plan.tokens), forwards=1)

    PackedForward.__call__ = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        PackedForward.__call__ = compute  # type: ignore[method-assign]


def decode(
    lm: AsyncLM, case: Population, clock: Clock, *, tokens: int = 0, draws: bool = False
) -> float:
    """Seconds a step; the prompt is computed before.

    Members are extended by tokens below `tokens`, or by what is drawn for them.
    """

    async def run() -> float:
        random = np.random.default_rng(SEED)
        prompt = [token % lm.vocabulary.size for token in case.prompt]
        members = lm.population(prompt, case.count)
        await members.reduce(FirstColumn())
        if draws:  # allocates
            members = members.extend((await members.draw(seed=SEED)).token_ids)
        seconds = 0.0
        for step in range(case.steps):
            token_ids = None if draws else random.integers(0, tokens, case.count)
            parents = np.sort(random.integers(0, case.count, case.count))
            start = clock()
            if token_ids is None:
                members = members.extend((await members.draw(seed=SEED)).token_ids)
            else:
                members = members.extend(token_ids)
                await members.reduce(FirstColumn())
            if case.every and step % case.every == case.every - 1:
                members = members[parents]
            seconds += clock() - start
        return seconds / case.steps

    lm.clear_kv_cache()
    return asyncio.run(run())


def decode_concurrently(lm: AsyncLM, case: Population, clock: Clock, size: int) -> float:
    """Seconds a step of populations of `size` members with prompts that end differently."""
    random = np.random.default_rng(SEED)
    prompt = [token % lm.vocabulary.size for token in case.prompt[:-1]]

    async def run(members: Members) -> None:
        for step in range(case.steps):
            members = members.extend(random.integers(0, HOST_TOKENS, size))
            await members.reduce(FirstColumn())
            if case.every and step % case.every == case.every - 1:
                members = members[np.sort(random.integers(0, size, size))]

    async def all_of_them() -> float:
        populations = [
            lm.population([*prompt, number % lm.vocabulary.size], size)
            for number in range(case.count // size)
        ]
        await asyncio.gather(*(each.reduce(FirstColumn()) for each in populations))
        start = clock()
        await asyncio.gather(*map(run, populations))
        return (clock() - start) / case.steps

    lm.clear_kv_cache()
    return asyncio.run(all_of_them())


def host_costs(options: argparse.Namespace, clock: Clock) -> dict[str, dict[str, list[float]]]:
    """Microseconds a member and step beside the model."""
    found = {}
    for count in options.host:
        case = Population(count, HOST_PROMPT, 0, RESAMPLE_EVERY, HOST_STEPS)
        engine = functools.partial(
            HFEngine.from_model,
            llama(HOST_VOCABULARY),
            tokenizer(HOST_VOCABULARY),
            max_tokens_per_batch=count,
        )
        with AsyncLM(engine, output_cache=OutputCache(0)) as lm, no_forward(count):
            run = functools.partial(decode, lm, case, clock, tokens=HOST_TOKENS)
            contestants = {"population": lambda run=run, n=count: run() / n * 1e6}
            for size in options.sizes if count <= MOST_CONCURRENT else ():
                part = functools.partial(decode_concurrently, lm, case, clock, size)
                contestants[f"populations of {size}"] = lambda p=part, n=count: p() / n * 1e6
            found[f"host {case}"] = in_turn(contestants, options.rounds, f"host {case}")
    return found


def with_the_model(
    options: argparse.Namespace, clock: Clock
) -> dict[str, dict[str, list[float]]]:
    """Microseconds a member and step, the model included."""
    found = {}
    model = llama()

    def served(prepack: bool) -> AsyncLM:
        return AsyncLM(
            lambda: HFEngine.from_model(model, tokenizer(), prepack=prepack),
            output_cache=OutputCache(0),
        )

    with served(True) as lm, served(False) as unpacked:
        for text in options.cases:
            count, prompt, steps, every = map(int, text.split("/"))
            case = Population(count, prompt, 0, every, steps)
            contestants: dict[str, Callable[[], float]] = {
                "lockstep": lambda c=case: lockstep(model, c, clock, preallocated=False) * 1e3,
                "population": lambda c=case: decode(lm, c, clock, draws=True) * 1e6,
                "without prepack": lambda c=case: decode(unpacked, c, clock, draws=True) * 1e6,
            }
            if count <= options.most_coroutines:
                contestants["coroutines"] = lambda c=case: genlm(lm, c, clock) * 1e3
            each = {
                name: lambda run=run, n=count: run() / n for name, run in contestants.items()
            }
            name = f"{case} over {steps}"
            found[name] = in_turn(each, options.rounds, name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--sizes", type=int, nargs="*", default=[100, 10, 4])
    parser.add_argument(
        "--cases",
        nargs="*",
        default=[
            "50/64/24/0",
            "200/64/24/0",
            "1000/64/8/0",
            "200/512/6/0",
            "1000/512/2/0",
            "50/64/160/4",
        ],
        help="members/prompt/steps/resample every",
    )
    parser.add_argument("--most-coroutines", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    found = host_costs(options, clock)
    if options.cases:
        found |= with_the_model(options, clock)
    print_cases(
        "populations",
        found,
        base="lockstep",
        unit="us a member and step",
        extra={"seed": SEED, "clock": options.clock},
    )


if __name__ == "__main__":
    main()
