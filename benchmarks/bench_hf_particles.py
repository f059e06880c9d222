"""How fast does `genlm-hf` serve a population of particles?

Particles share a prompt and grow by one token a step; with resampling, every fourth step
continues copies of some of them; with tails, the particles start with different
tokens. Each contestant returns the whole next-token distribution of every particle at every
step. The limit without shared prompts is lockstep decoding: the model's `[N, 1]` forward pass
with a cache of every particle's keys and values, without a front end.

- lockstep: with transformers' DynamicCache, which copies the cache as it grows;
- preallocated: with keys and values in tensors of full length, which are only copied by
  resampling;
- genlm: `AsyncLM` with one coroutine per particle, including the front end;
- genlm-backend 0.3.1, in a separate environment (`--peer PYTHON`, by default made in
  `.cache/`), with its `cache_kv` of the prompt ("cached") and without. It computes all or
  nearly all of every context at every step, so it only runs with small populations.

Only decoding is timed, after a prefill; every round runs all contestants in turn. A
ratio is the speed as a fraction of lockstep's in the same round, its median over rounds
reported; it can differ from the ratio of the medians. Model: a Llama of 8 layers x 512,
8 heads, 4 of keys and values, vocabulary 8,000, random weights, float32. Torch's threads
are what OMP_NUM_THREADS says. With `--clock cpu` a figure is the CPU time of the whole
process instead: comparable on a machine with other load.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from particle_model import cache_argument, llama, tokenizer
from particle_population import CLOCKS, Clock, Population, population_arguments
from peer import Peer, peer_python
from report import print_report

from genlm import AsyncLM, OutputCache
from genlm.core.base.statistics import Statistics
from genlm_hf.engine import HFEngine

STEPS, FEW_STEPS = 24, 6
LARGE = 100_000  # tokens in all contexts from which a step takes seconds
PEER_TOKENS = 6_000  # the most that genlm-backend is asked to compute in a step
RESAMPLE_EVERY = 4


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
def lockstep(model: Any, population: Population, clock: Clock, *, preallocated: bool) -> float:
    """Milliseconds a step of `[N, 1]` decoding."""
    particles = population.start()
    past = transformers.DynamicCache(config=model.config)
    cache = cache_argument(model, past)
    prompt = torch.tensor([population.prompt], device=model.device)
    model(prompt, **cache, use_cache=True, logits_to_keep=1)
    past.batch_repeat_interleave(population.count)
    if population.tail_length:
        tails = torch.tensor(particles.contexts, device=model.device)
        tails = tails[:, population.prompt_length :]
        model(tails, **cache, use_cache=True, logits_to_keep=1)
    if preallocated:
        for layer in past.layers:
            layer.__class__ = PreallocatedLayer
            layer.make_room(population.steps)
    seconds = 0.0
    for step in range(population.steps):
        particles.grow()
        last = torch.tensor([context[-1:] for context in particles.contexts])
        start = clock()
        logits = model(last.to(model.device), **cache, use_cache=True).logits[:, -1]
        rows = logits.float().log_softmax(-1)
        assert rows.shape == (population.count, model.config.vocab_size)
        particles.resample(step)
        if particles.parents is not None:
            past.reorder_cache(torch.tensor(particles.parents, device=model.device))
        seconds += clock() - start
    return seconds / population.steps * 1e3


def genlm(lm: AsyncLM, population: Population, clock: Clock) -> float:
    """Milliseconds a step of N concurrent coroutines, the start computed before."""

    async def run() -> float:
        particles = population.start()
        await asyncio.gather(*map(lm.next_token_logprobs, particles.contexts))
        seconds = 0.0
        for step in range(population.steps):
            particles.grow()
            start = clock()
            rows = await asyncio.gather(*map(lm.next_token_logprobs, particles.asked))
            assert len(rows) == len(particles.asked)
            particles.resample(step)
            seconds += clock() - start
        return seconds / population.steps * 1e3

    lm.clear_kv_cache()
    return asyncio.run(run())


def peer_contestants(peer: Peer, population: Population) -> dict[str, Callable[[], float]]:
    """genlm-backend's ways that finish within the patience of a benchmark."""
    p, contestants = population, {}
    computed = {  # tokens a step: all of a context after the cached prompt
        "cached": p.count * (p.tail_length + p.steps // 2),
        "uncached": p.count * (p.prompt_length + p.tail_length),
    }
    for mode, tokens in computed.items():
        if tokens <= PEER_TOKENS:
            steps = FEW_STEPS if tokens > PEER_TOKENS // 4 else p.steps
            line = f"{p.count} {p.prompt_length} {p.tail_length} {p.every} {steps} {mode}"
            contestants[f"genlm-backend {mode}"] = functools.partial(peer.measure, line)
    return contestants


def populations(options: argparse.Namespace) -> Iterator[Population]:
    for count in options.particles:
        for prompt in options.prompts:
            steps = FEW_STEPS if count * prompt > LARGE else STEPS
            yield Population(count, prompt, 0, 0, steps)
            if options.resample:
                yield Population(count, prompt, 0, RESAMPLE_EVERY, steps)
            for tail in options.tails:
                yield Population(count, prompt, tail, 0, steps)


class Samples:
    """Milliseconds a step of every contestant, case by case and round by round."""

    def __init__(self) -> None:
        self._cases: dict[str, dict[str, list[float]]] = {}

    def add(self, case: Population, contestant: str, milliseconds: float) -> None:
        """Record a measurement."""
        contestants = self._cases.setdefault(str(case), {})
        contestants.setdefault(contestant, []).append(milliseconds)

    def speed(self, case: str, contestant: str, base: str) -> float:
        """How many times faster than another: median over rounds of ratios within a round."""
        slow, fast = self._cases[case][base], self._cases[case][contestant]
        return statistics.median(s / f for s, f in zip(slow, fast, strict=True))

    def against_lockstep(self, case: str) -> dict[str, float]:
        """Every contestant's speed as a fraction of lockstep."""
        return {name: self.speed(case, name, "lockstep") for name in self._cases[case]}

    def against_peer(self) -> dict[str, dict[str, float]]:
        """How many times faster genlm is than each way of genlm-backend."""
        return {
            case: {
                name: round(self.speed(case, "genlm", name), 2)
                for name in contestants
                if name.startswith("genlm-backend")
            }
            for case, contestants in self._cases.items()
        }

    def rows(self) -> dict[str, list[float]]:
        """All measurements, by case and contestant."""
        return {
            f"{case} {name}": values
            for case, contestants in self._cases.items()
            for name, values in contestants.items()
        }

    def ratios(self) -> dict[str, float]:
        """What `rows` are as fractions of lockstep."""
        return {
            f"{case} {name}": speed
            for case in self._cases
            for name, speed in self.against_lockstep(case).items()
        }


def measure(options: argparse.Namespace, peer: Peer | None) -> tuple[Samples, dict[str, float]]:
    """All measurements, and the tokens computed for a token asked, by case."""
    samples, computed_per_asked = Samples(), {}
    model, clock = llama(), CLOCKS[options.clock]
    with AsyncLM(
        lambda: HFEngine.from_model(model, tokenizer(), prepack=True),
        output_cache=OutputCache(0),
    ) as lm:
        for case in populations(options):
            contestants: dict[str, Callable[[], float]] = {
                "lockstep": functools.partial(lockstep, model, case, clock, preallocated=False),
                "preallocated": functools.partial(
                    lockstep, model, case, clock, preallocated=True
                ),
                "genlm": functools.partial(genlm, lm, case, clock),
            }
            if peer is not None:
                contestants |= peer_contestants(peer, case)
            before = lm.statistics()
            for _ in range(options.rounds):
                for name, run in contestants.items():
                    samples.add(case, name, run())
            after = lm.statistics()
            asked = after.tokens_requested - before.tokens_requested
            computed = _computed(after) - _computed(before)
            computed_per_asked[str(case)] = round(computed / asked, 5)
            speeds = samples.against_lockstep(str(case)).items()
            print(case, {name: round(speed, 3) for name, speed in speeds}, flush=True)
    return samples, computed_per_asked


def _computed(figures: Statistics) -> int:
    return int(figures.engine["tokens_computed"])


def main() -> None:
    parser = population_arguments(
        __doc__,
        particles=[1, 10, 50, 200],
        prompts=[64, 512, 2048],
        tails=[160],
        peer="genlm-backend 0.3.1",
    )
    parser.add_argument("--no-resample", dest="resample", action="store_false")
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    peer = None
    if not options.no_peer:
        peer = Peer(options.peer or peer_python(), "particle_peer.py", options.clock)
    samples, computed_per_asked = measure(options, peer)
    if peer is not None:
        peer.close()
    print("tokens computed for a token asked:", computed_per_asked)
    print("times faster than genlm-backend:", samples.against_peer())
    extra = {
        "seed": 3,
        "clock": options.clock,
        "tokens_computed_per_token_asked": computed_per_asked,
        "times_faster_than_genlm_backend": samples.against_peer(),
    }
    print_report(
        "hf_particles",
        samples.rows(),
        unit="ms a step",
        ratios=samples.ratios(),
        extra=extra,
    )


if __name__ == "__main__":
    main()
