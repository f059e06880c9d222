"""How long does a full next-token row from vLLM take, compared with generating one token?

The limit is vLLM itself: `plain` generates one greedy token for each prompt, with the
engine of the contestants. Contestants, all in every round:

- engine: rows by `VLLMEngine.submit` and `step`, as the scheduler calls them;
- genlm: rows by `AsyncLM`, one coroutine a prompt, including the front end;
- logprobs=-1 flat, dict: all log-probabilities by vLLM itself, as lists and as objects.

Two kinds of prompts: `fresh`, 16 tokens that were never seen; `grown`, one token more than a
prefix of 64 that is in vLLM's cache, as requested by particles. Time outside the forward pass
is what remains of a contestant's time without the model's forward and logits.

Times are the process's CPU time, all threads together: it differs little from the wall's
on one OpenMP thread, and other work on the machine does not enter it.

A ratio is the time as a multiple of plain's in the same round, its median over rounds
reported. Model: the particles' Llama of 8 layers x 512, random weights, float32, with 8,000
and 128,000 ids. vLLM's options are this plugin's defaults on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vllm
from particle_model import save_model
from report import print_report
from vllm.inputs import tokens_input

from genlm import AsyncLM, OutputCache, Query
from genlm_vllm.engine import VLLMEngine

PREFIX, FRESH = 64, 16

Prompts = Sequence[tuple[int, ...]]


class Bench:
    """One model, served by one engine, and the contestants that use it."""

    def __init__(self, vocab_size: int, folder: Path) -> None:
        self.vocab_size = vocab_size
        options = {
            "max_num_seqs": 256,
            "max_logprobs": -1,
            "kv_cache_memory_bytes": 2**30,
        }
        self.engine: Any = None
        save_model(folder, vocab_size)

        def build() -> Any:
            self.engine = VLLMEngine(folder, engine_opts=options)
            return self.engine

        self.lm = AsyncLM(build, name="vllm", output_cache=OutputCache(0))
        self.vllm = self.engine._vllm  # noqa: SLF001 - the engine that plain has to share
        self.forward_s = 0.0
        runner = self.vllm.model_executor.driver_worker.worker.model_runner
        for method in ("forward", "compute_logits"):
            self._time(runner.model, method)
        self.ids = itertools.count()
        self.generator = random.Random(0)

    def _time(self, model: Any, name: str) -> None:
        inner = getattr(model, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return inner(*arguments, **options)
            finally:
                self.forward_s += time.process_time() - start

        setattr(model, name, timed)

    # -- prompts ----------------------------------------------------------------------

    def _random(self, length: int) -> tuple[int, ...]:
        return tuple(self.generator.randrange(self.vocab_size) for _ in range(length))

    def fresh(self, count: int) -> Prompts:
        return [self._random(FRESH) for _ in range(count)]

    def grown(self, count: int) -> Prompts:
        prefix = self._random(PREFIX)
        self.lm.pin_prefix(prefix)
        tokens = self.generator.sample(range(self.vocab_size), count)
        return [(*prefix, token) for token in tokens]

    # -- contestants: seconds for all prompts -----------------------------------------

    def on_thread(self, work: Callable[[Any], float]) -> float:
        """Run on the engine's own thread, where everything else of it runs."""
        return self.lm._scheduler.run(work)  # noqa: SLF001

    def generated(self, prompts: Prompts, **options: Any) -> float:
        def work(_engine: Any) -> float:
            start = time.process_time()
            for ids in prompts:
                params = vllm.SamplingParams(
                    max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, **options
                )
                name = f"plain-{next(self.ids)}"
                self.vllm.add_request(name, tokens_input(list(ids)), params)
            left = len(prompts)
            while left:
                left -= sum(output.finished for output in self.vllm.step())
            return time.process_time() - start

        return self.on_thread(work)

    def submitted(self, prompts: Prompts) -> float:
        def work(engine: Any) -> float:
            start = time.process_time()
            for ids in prompts:
                engine.submit(Query(-2 - next(self.ids), ids))
            left = len(prompts)
            while left:
                left -= len(engine.step())
            return time.process_time() - start

        return self.on_thread(work)

    def gathered(self, prompts: Prompts) -> float:
        async def ask() -> float:
            start = time.process_time()
            rows = await asyncio.gather(*map(self.lm.next_token_logprobs, prompts))
            assert len(rows) == len(prompts)
            return time.process_time() - start

        return asyncio.run(ask())

    def contestants(self) -> dict[str, Callable[[Prompts], float]]:
        return {
            "plain": self.generated,
            "engine": self.submitted,
            "genlm": self.gathered,
            "logprobs=-1 flat": lambda p: self.generated(p, logprobs=-1, flat_logprobs=True),
            "logprobs=-1 dict": lambda p: self.generated(p, logprobs=-1),
        }


def measure(
    bench: Bench, options: argparse.Namespace, outside: dict[str, list[float]]
) -> dict[str, list[float]]:
    """Microseconds a prompt of every contestant; fills those outside the forward pass."""
    samples: dict[str, list[float]] = {}
    counts = options.prompts[0] if bench.vocab_size < 50_000 else options.prompts[1]
    for kind in ("fresh", "grown"):
        for round_number in range(options.rounds):
            contestants = list(bench.contestants().items())
            for name, run in contestants[round_number % 3 :] + contestants[: round_number % 3]:
                vllms_own = name.startswith("logprobs")
                if vllms_own and round_number >= options.slow_rounds:
                    continue  # up to hundreds of times slower
                count = min(counts, options.slow_prompts) if vllms_own else counts
                prompts = getattr(bench, kind)(count)
                bench.forward_s = 0.0
                seconds = run(prompts)
                row = f"{bench.vocab_size} {kind} {name}"
                samples.setdefault(row, []).append(seconds / count * 1e6)
                outside.setdefault(row, []).append((seconds - bench.forward_s) / count * 1e6)
        # Small batches make forwards dearer, so vLLM's own ways have a plain of their own.
        for _ in range(options.slow_rounds):
            count = min(counts, options.slow_prompts)
            row = f"{bench.vocab_size} {kind} plain, {count} prompts"
            seconds = bench.generated(getattr(bench, kind)(count))
            samples.setdefault(row, []).append(seconds / count * 1e6)
    return samples


def ratio(samples: dict[str, list[float]], row: str, slow_prompts: int) -> float:
    """Time as a multiple of plain's: median over rounds of ratios within a round."""
    head = " ".join(row.split()[:2])
    own = f"{head} plain, {slow_prompts} prompts"
    base = samples[own] if "logprobs" in row and own in samples else samples[f"{head} plain"]
    return statistics.median(b / a for a, b in zip(base, samples[row], strict=False))


@contextmanager
def served(vocab_size: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(vocab_size, Path(folder))
        try:
            yield bench
        finally:
            bench.lm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[8000, 128_000])
    parser.add_argument("--prompts", type=int, nargs=2, default=[256, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slow-prompts", type=int, default=16)
    parser.add_argument("--slow-rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    samples: dict[str, list[float]] = {}
    outside: dict[str, list[float]] = {}
    for vocab_size in options.vocab_sizes:
        with served(vocab_size) as bench:
            for run in bench.contestants().values():
                run(bench.fresh(2))  # some compile on first use
            samples |= measure(bench, options, outside)
    ratios = {
        row: ratio(samples, row, options.slow_prompts)
        for row in samples
        if not row.endswith("prompts")
    }
    extra = {
        "prompts": options.prompts,
        "slow_prompts": options.slow_prompts,
        "vllm": vllm.__version__,
        "outside_forward_us": {
            row: round(statistics.median(values), 1) for row, values in outside.items()
        },
    }
    print_report("vllm", samples, unit="us a prompt", ratios=ratios, extra=extra)


if __name__ == "__main__":
    main()
