"""How long do full next-token rows from SGLang take, compared with SGLang itself?

The limit is SGLang's scheduler, which only computes the prompts
(`sgl_scheduler.py`). Contestants, all in every round:

- scheduler: that, in a child process;
- engine: `SGLEngine.submit` and `step`, as the core's scheduler calls them;
- genlm: `AsyncLM`, one coroutine a prompt, including the front end;
- Engine: `sglang.Engine`, the public interface, in separate processes, which returns the
  log-probabilities of all ids as lists (`sgl_peer.py`).

Two kinds of prompts, 50 at a time (10 where there are 128,000 ids): `fresh`, 64 tokens that
were never seen; `grown`, one token more than those, which are cached.

Milliseconds for all of them: of the process's CPU time for the first three, which other work
on the machine does not enter; of the wall for Engine, whose processes poll, and for genlm
again beside it. A ratio is the time as a multiple of the scheduler's (of genlm's on the wall
for Engine) in the same round, its median over rounds. Model: the particles' Llama of 8 layers x
512, random weights, float32, with 8,000 and 128,000 ids. Run with SGLang's environment:
`.venv-sgl/bin/python benchmarks/bench_sgl.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from particle_model import save_model
from report import print_report
from sgl_scheduler import OwnScheduler

from genlm import AsyncLM, OutputCache, Query
from genlm_sgl.engine import SGLEngine

LENGTH = 64
PROMPTS = {8_000: 50, 128_000: 10}
ENGINE_OPTS = {"device": "cpu", "max_total_tokens": 16_384}
PEER = Path(__file__).parent / "sgl_peer.py"

Prompts = Sequence[list[int]]
Seconds = tuple[float, float]
"""Seconds of CPU and wall-clock time."""


class Contestants:
    """Three ways to compute prompts."""

    def __init__(self, folder: Path) -> None:
        self._own = OwnScheduler(folder, ENGINE_OPTS)
        self._lm = AsyncLM(
            lambda: SGLEngine(folder, engine_opts=ENGINE_OPTS), output_cache=OutputCache(0)
        )
        self._engine: Any = self._lm.engine

    def scheduler(self, prompts: Prompts, *, fresh: bool) -> Seconds:
        """Compute prompts by SGLang's scheduler."""
        return self._own.compute(prompts, flush=fresh)

    def engine(self, prompts: Prompts, *, fresh: bool) -> Seconds:
        """Submit and step, without the front end."""
        if fresh:
            self._lm.clear_kv_cache()

        def rows() -> list[Any]:
            for i, prompt in enumerate(prompts):
                self._engine.submit(Query(i, tuple(prompt)))
            found: list[Any] = []
            while len(found) < len(prompts):
                found += [completion.result for completion in self._engine.step()]
            return found

        return clocked(rows)

    def genlm(self, prompts: Prompts, *, fresh: bool) -> Seconds:
        """Request rows as users do."""
        if fresh:
            self._lm.clear_kv_cache()

        async def rows() -> list[Any]:
            return await asyncio.gather(*map(self._lm.next_token_logprobs, prompts))

        return clocked(lambda: asyncio.run(rows()))

    def close(self) -> None:
        """End the engine and the child process."""
        self._lm.close()
        self._own.close()


def clocked(call: Callable[[], list[Any]]) -> Seconds:
    """Return the seconds of CPU and wall-clock time that a call takes."""
    start = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - start[0], time.perf_counter() - start[1]


def measure(vocab_size: int, rounds: int) -> dict[str, list[float]]:
    """One vocabulary's samples, by row."""
    generator = random.Random(5)
    count = PROMPTS[vocab_size]
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), vocab_size)
        contestants = Contestants(Path(name))
        ways = [contestants.scheduler, contestants.engine, contestants.genlm]
        for turn in range(rounds + 1):
            prompts = [
                [generator.randrange(vocab_size) for _ in range(LENGTH)] for _ in range(count)
            ]
            grown = [[*prompt, generator.randrange(vocab_size)] for prompt in prompts]
            for way in ways[turn % 3 :] + ways[: turn % 3]:
                for kind, asked in (("fresh", prompts), ("grown", grown)):
                    cpu, wall = way(asked, fresh=kind == "fresh")
                    if turn == 0:  # warms up
                        continue
                    row = f"{vocab_size // 1000}k {kind} {way.__name__}"
                    samples.setdefault(row, []).append(1e3 * cpu)
                    if way == contestants.genlm:
                        samples.setdefault(f"{row}, wall", []).append(1e3 * wall)
        contestants.close()
        peer = [sys.executable, str(PEER), name, str(vocab_size), str(count), str(rounds)]
        done = subprocess.run(peer, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"sgl_peer.py failed:\n{done.stderr[-4000:]}")
        for kind, times in json.loads(done.stdout.splitlines()[-1]).items():
            samples[f"{vocab_size // 1000}k {kind} Engine, wall"] = times
    return samples


def ratio(samples: dict[str, list[float]], row: str) -> float:
    """Median over rounds of the time as a multiple of the base's in the same round."""
    case = " ".join(row.split(" ")[:2])
    base = f"{case} genlm, wall" if row.endswith("wall") else f"{case} scheduler"
    return statistics.median(
        each / other for each, other in zip(samples[row], samples[base], strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[*PROMPTS])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    samples: dict[str, list[float]] = {}
    for vocab_size in options.vocabularies:
        samples |= measure(vocab_size, options.rounds)
    ratios = {row: ratio(samples, row) for row in samples}
    extra = {"seed": 5, "prompts": PROMPTS, "length": LENGTH}
    print_report("sgl", samples, unit="ms", ratios=ratios, extra=extra)


if __name__ == "__main__":
    main()
