"""How fast does `genlm-hf` serve a population of particles?

Particles share a prompt and grow by one token a step; with resampling, every fourth
step continues copies of some of them. Each contestant gives the whole next-token
distribution of every particle at every step. The limit of what can be had without
sharing prompts is lockstep decoding: the model's own `[N, 1]` forward pass with a
cache that holds every particle's keys and values, no front end, no other work.

- lockstep: with transformers' DynamicCache, which copies the cache as it grows;
- preallocated: with keys and values written into tensors of full length, which copies
  nothing but what resampling reorders;
- genlm: `AsyncLM` with one coroutine per particle, the whole front end included;

Only decoding is timed, after a prefill; every round runs all contestants in turn. A
ratio is the speed as a fraction of lockstep's in the same round, its median over rounds
reported; it can differ from the ratio of the medians. Model: a Llama of 8 layers x 512,
8 heads, 4 of keys and values, vocabulary 8,000, random weights, float32. Torch's threads
are what OMP_NUM_THREADS says.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from particle_model import STEPS, VOCAB_SIZE, llama, prompt_of, tokenizer
from report import print_report

from genlm import AsyncLM, OutputCache
from genlm.core.statistics import Statistics
from genlm_hf.engine import HFEngine

RESAMPLE_EVERY = 4


@dataclass(frozen=True)
class Case:
    """A population: how many particles, their prompt, how often they are resampled."""

    count: int
    prompt: list[int]
    every: int | None

    def __str__(self) -> str:
        resampled = " resampled" if self.every else ""
        return f"{self.count}/{len(self.prompt)}{resampled}"

    def members(self) -> range:
        return range(self.count)

    def parents(self, step: int, generator: random.Random) -> list[int] | None:
        """Which particle each one continues after a step, None for itself."""
        if self.every is None or step % self.every != self.every - 1:
            return None
        return sorted(generator.choices(self.members(), k=self.count))


class PreallocatedLayer(transformers.cache_utils.DynamicLayer):
    """Keys and values of a layer in tensors of full length."""

    def make_room(self, tokens: int) -> None:
        """Move what the layer holds into tensors with room for that many tokens more."""
        self.length = self.keys.shape[2]
        shape = (*self.keys.shape[:2], self.length + tokens, self.keys.shape[3])
        self.all_keys, self.all_values = (
            self.keys.new_empty(shape),
            self.values.new_empty(shape),
        )
        self.all_keys[:, :, : self.length] = self.keys
        self.all_values[:, :, : self.length] = self.values

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> Any:
        start, self.length = self.length, self.length + keys.shape[2]
        self.all_keys[:, :, start : self.length] = keys
        self.all_values[:, :, start : self.length] = values
        self.keys = self.all_keys[:, :, : self.length]
        self.values = self.all_values[:, :, : self.length]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.all_keys = self.all_keys.index_select(0, beam_idx)
        self.all_values = self.all_values.index_select(0, beam_idx)


@torch.inference_mode()
def lockstep(model: Any, population: Case, *, preallocated: bool) -> float:
    """Seconds for all steps of `[N, 1]` decoding."""
    past = transformers.DynamicCache(config=model.config)
    prompt = torch.tensor([population.prompt])
    model(prompt, past_key_values=past, use_cache=True, logits_to_keep=1)
    past.batch_repeat_interleave(population.count)
    if preallocated:
        for layer in past.layers:
            layer.__class__ = PreallocatedLayer
            layer.make_room(STEPS)
    generator = random.Random(3)
    seconds = 0.0
    for step in range(STEPS):
        last = torch.tensor([[generator.randrange(VOCAB_SIZE)] for _ in population.members()])
        start = time.perf_counter()
        logits = model(last, past_key_values=past, use_cache=True).logits[:, -1]
        rows = logits.float().log_softmax(-1)
        assert rows.shape == (population.count, VOCAB_SIZE)
        parents = population.parents(step, generator)
        if parents is not None:
            past.reorder_cache(torch.tensor(parents))
        seconds += time.perf_counter() - start
    return seconds


def genlm(lm: AsyncLM, population: Case) -> float:
    """Seconds for all steps of N concurrent coroutines, the prompt computed before."""

    async def run() -> float:
        generator = random.Random(3)
        contexts = [list(population.prompt) for _ in population.members()]
        await lm.next_token_logprobs(population.prompt)
        seconds = 0.0
        for step in range(STEPS):
            for context in contexts:
                context.append(generator.randrange(VOCAB_SIZE))
            start = time.perf_counter()
            rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
            assert len(rows) == population.count
            parents = population.parents(step, generator)
            if parents is not None:
                contexts = [list(contexts[parent]) for parent in parents]
            seconds += time.perf_counter() - start
        return seconds

    lm.clear_kv_cache()
    return asyncio.run(run())


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for count in options.particles:
        for length in options.prompts:
            yield Case(count, prompt_of(length), None)
            if options.resample:
                yield Case(count, prompt_of(length), RESAMPLE_EVERY)


def measure(
    options: argparse.Namespace,
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Milliseconds a step of every contestant and case; tokens computed and asked."""
    samples: dict[str, list[float]] = {}
    work: dict[str, dict[str, float]] = {}
    model = llama()
    with AsyncLM(
        lambda: HFEngine.from_model(model, tokenizer()), output_cache=OutputCache(0)
    ) as lm:
        contestants: dict[str, Callable[[Case], float]] = {
            "lockstep": lambda case: lockstep(model, case, preallocated=False),
            "preallocated": lambda case: lockstep(model, case, preallocated=True),
            "genlm": lambda case: genlm(lm, case),
        }
        for case in cases(options):
            before = lm.statistics()
            for _ in range(options.rounds):
                for name, run in contestants.items():
                    milliseconds = run(case) / STEPS * 1e3
                    samples.setdefault(f"{case} {name}", []).append(milliseconds)
            after = lm.statistics()
            asked = after.tokens_asked - before.tokens_asked
            computed = _computed(after) - _computed(before)
            work[str(case)] = {"computed_per_asked": round(computed / asked, 5)}
            shown = {name: f"{ratio(samples, f'{case} {name}'):.2f}" for name in contestants}
            print(case, shown, f"tokens computed per token asked {computed / asked:.4f}")
    return samples, work


def ratio(samples: dict[str, list[float]], row: str) -> float:
    """Speed as a fraction of lockstep: median over rounds of ratios within a round."""
    base = samples[row.rsplit(" ", 1)[0] + " lockstep"]
    return statistics.median(b / v for b, v in zip(base, samples[row], strict=True))


def _computed(figures: Statistics) -> int:
    return int(figures.engine["tokens_computed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--particles", type=int, nargs="+", default=[1, 10, 50, 200])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-resample", dest="resample", action="store_false")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    samples, work = measure(options)
    ratios = {row: ratio(samples, row) for row in samples}
    extra = {"steps": STEPS, "seed": 3, "tokens": work}
    print_report("hf_particles", samples, unit="ms a step", ratios=ratios, extra=extra)


if __name__ == "__main__":
    main()
