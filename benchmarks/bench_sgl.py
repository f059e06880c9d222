"""What do full next-token rows from SGLang cost on top of SGLang itself?

The limit is SGLang's scheduler driven by hand in the same process: requests in, its loop
turned until they have ended, the logits of each normalised and copied, and nothing checked.
Contestants, in turn in every round, on the same scheduler:

- by hand: that;
- engine: `SGLEngine.submit` and `step`, as the core's scheduler calls them;
- genlm: `AsyncLM`, one coroutine a prompt, the whole front end included;
- Engine: `sglang.Engine`, the public interface, in processes of its own, asked for the
  log-probabilities of all ids, which travel as lists (`sgl_peer.py`).

Two kinds of prompts, 50 at a time (10 where there are 128,000 ids): `fresh`, 64 tokens that
were never seen; `grown`, one token more than those, which SGLang's radix cache holds.

Milliseconds for all of them: of the process's CPU time for the first three, which other work
on the machine does not enter; of the wall for Engine, whose processes poll, and for genlm
again beside it. A ratio is the time as a multiple of by hand's (of genlm's on the wall for
Engine) in the same round, its median over rounds. Model: the particles' Llama of 8 layers x
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from particle_model import save_model
from report import print_report

from genlm import AsyncLM, OutputCache, Query
from genlm_sgl.engine import SGLEngine

LENGTH = 64
PROMPTS = {8_000: 50, 128_000: 10}
ENGINE_OPTS = {"device": "cpu", "max_total_tokens": 16_384}
PEER = Path(__file__).parent / "sgl_peer.py"


class Contestants:
    """Three ways to the rows of prompts, on one scheduler."""

    def __init__(self, folder: Path) -> None:
        self._built: list[SGLEngine] = []
        self.lm = AsyncLM(lambda: self._build(folder), output_cache=OutputCache(0))
        self._engine = self._built[0]
        api = self._engine._api  # noqa: SLF001 - to drive by hand what it drives
        self._scheduler, self._enqueue = api._scheduler, api.enqueue  # noqa: SLF001
        self._hooks = vars(self._scheduler.tp_worker.model_runner)

    def _build(self, folder: Path) -> SGLEngine:
        engine = SGLEngine(folder, engine_opts=ENGINE_OPTS)
        self._built.append(engine)
        return engine

    @contextmanager
    def _unhooked(self) -> Iterator[None]:
        kept = {name: self._hooks.pop(name) for name in ("forward", "sample")}
        try:
            yield
        finally:
            self._hooks.update(kept)

    @torch.inference_mode()
    def by_hand(self, prompts: Sequence[list[int]]) -> list[Any]:
        """Drive the scheduler without the engine."""
        scheduler = self._scheduler
        found: dict[str, Any] = {}
        with self._unhooked():
            for i, prompt in enumerate(prompts):
                self._enqueue(f"{i}.", prompt, 0, ())
            while len(found) < len(prompts):
                plan = scheduler.get_next_batch_to_run(
                    running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
                )
                scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
                reqs = list(batch.reqs)
                result = scheduler.run_batch(batch)
                scheduler.process_batch_result(batch, result)
                logits = result.logits_output.next_token_logits
                rows = torch.log_softmax(logits.float(), -1)
                for req, row in zip(reqs, rows, strict=True):
                    if req.finished():
                        found[req.rid] = row.clone()
                scheduler.last_batch = batch
        return list(found.values())

    def engine(self, prompts: Sequence[list[int]]) -> list[Any]:
        """Submit and step, without the front end."""
        for i, prompt in enumerate(prompts):
            self._engine.submit(Query(i, tuple(prompt)))
        found: list[Any] = []
        while len(found) < len(prompts):
            found += [completion.result for completion in self._engine.step()]
        return found

    def genlm(self, prompts: Sequence[list[int]]) -> list[Any]:
        """Ask as users do."""

        async def ask() -> list[Any]:
            return await asyncio.gather(*map(self.lm.next_token_logprobs, prompts))

        return asyncio.run(ask())

    def fresh(self) -> None:
        """Empty the radix cache."""
        self.lm.clear_kv_cache()


def clocked(call: Callable[[], list[Any]], count: int) -> tuple[float, float]:
    """Milliseconds of CPU and of the wall that a call takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    rows = call()
    spent = 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)
    assert len(rows) == count
    return spent


def measure(vocab_size: int, rounds: int) -> dict[str, list[float]]:
    """One vocabulary's samples, by row."""
    generator = random.Random(5)
    count = PROMPTS[vocab_size]
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), vocab_size)
        contestants = Contestants(Path(name))
        ways = [contestants.by_hand, contestants.engine, contestants.genlm]
        for turn in range(rounds + 1):
            prompts = [
                [generator.randrange(vocab_size) for _ in range(LENGTH)] for _ in range(count)
            ]
            grown = [[*prompt, generator.randrange(vocab_size)] for prompt in prompts]
            for way in ways[turn % 3 :] + ways[: turn % 3]:
                contestants.fresh()
                for kind, asked in (("fresh", prompts), ("grown", grown)):
                    cpu, wall = clocked(lambda: way(asked), count)  # noqa: B023 - called here
                    if turn == 0:  # warms up
                        continue
                    row = f"{vocab_size // 1000}k {kind} {way.__name__.replace('_', ' ')}"
                    samples.setdefault(row, []).append(cpu)
                    if way == contestants.genlm:
                        samples.setdefault(f"{row}, wall", []).append(wall)
        contestants.lm.close()
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
    base = f"{case} genlm, wall" if row.endswith("wall") else f"{case} by hand"
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
