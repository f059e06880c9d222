"""How fast do the serving engines serve a population of particles?

A particle loop requests the row of every context, draws a token from each and appends it. The
limit is the engine's generation of as many tokens, without this library. Contestants, all in
every round, on the same engine:

- own: the engine's generation with its sampler at temperature 1, of as many sequences
  as each step has requests; vLLM's in this process, SGLang's by its own scheduler in a child
  process;
- raw: the same, greedy;
- one request a step: rows by `AsyncLM.next_token_logprobs` of lists, one coroutine per row, the
  engine keeping no contexts (`keeps_contexts = False`);
- lists: the same, contexts kept between steps;
- contexts: the same by `llm.context` and `extend`;
- population: `llm.population`, rows drawn by its own `draw`, extended and resampled as arrays;
- blocks: the same by `sample`, 16 tokens at once, between two resamplings;
- genlm-backend, genlm-backend's own: with `--published PYTHON`, the loop of lists on
  genlm-backend 0.3.1 and its vLLM 0.26 or SGLang 0.5.17, and that engine's own generation; see
  `vllm_peer.py` and `sgl_published.py`.

The time includes drawing, by the same function, and appending. The prompt is computed
before, and every particle begins with a different token, so that no contestant computes more
than one token per row.
Three kinds of populations: *plain*; *resampled* every 4 steps, by random weights that leave
about half of the particles; *waiting*, a random half of them at each step, compared with the
generation of half as many sequences.

Figures are microseconds of CPU time a token, of all threads and, with `--multiprocess`, all
processes of vLLM, which other work on the machine affects little; rows that end in "wall" are
microseconds of wall-clock time. A ratio is the speed as a fraction of the baseline's in the
same round, its median over rounds. Only raw generation is greedy. The error is the largest
difference of a log-probability of the last rows from an unbatched float32 forward pass of
transformers. Model: the particles' Llama of 8 layers x 512, 8,000 ids, random weights, float32,
or with `--tiny` one layer x 64, which shows the cost of the engine; options are the plugins'
defaults on the CPU, except for room for 256 requests (vLLM: 512). With `--second-runner`, vLLM
uses its second model runner, whose Triton kernels are replaced by loops that numba compiles;
see `vllm_second_runner.py`. Run with the engine's environment: `.venv/bin/python
benchmarks/bench_serving_particles.py vllm`, `.venv-sgl/bin/python
benchmarks/bench_serving_particles.py sgl`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from particle_model import VOCAB_SIZE, save_model
from peer import Peer
from report import print_report

from genlm import AsyncLM, OutputCache
from genlm.plugin import draw_tokens

CELLS = ("10/64/32", "50/64/32", "50/512/32", "200/64/16")
KINDS = ("plain", "resampled", "waiting")
PUBLISHED = ("genlm-backend", "genlm-backend's own")
CONTESTANTS = ("own", "raw", "one request a step", "lists", "contexts", "population", "blocks")
RESAMPLE_EVERY, BLOCK = 4, 16
SGL_OPTS = {"max_running_requests": 256, "max_total_tokens": 65_536}
CHECKED = 3
"""Contexts of a run whose rows are compared with transformers."""


@dataclass(frozen=True)
class Population:
    """Particles that share a prompt and grow by one token a step.

    Attributes:
        count: How many.
        prompt_length: Tokens that all of them share.
        steps: How many are measured.
        kind: One of `KINDS`.
    """

    count: int
    prompt_length: int
    steps: int
    kind: str

    def __str__(self) -> str:
        return f"{self.count}/{self.prompt_length} {self.kind}"

    @property
    def asked(self) -> int:
        """Particles that are asked at a step."""
        return max(1, self.count // 2) if self.kind == "waiting" else self.count


@dataclass(frozen=True)
class Measurement:
    """Seconds of CPU and wall-clock time of a run, and its last rows by their contexts."""

    seconds: Any
    rows: Sequence[tuple[tuple[int, ...], torch.Tensor]] = ()


class Bench:
    """One engine, and the contestants that use it."""

    def __init__(
        self, build: Callable[[], Any], folder: Path, *, processes: bool, scheduler: Any = None
    ) -> None:
        self._scheduler = scheduler
        self.lm = AsyncLM(build, output_cache=OutputCache(0))
        cpu = _clock_of_all_processes if processes else time.process_time
        self._clock = lambda: np.array([cpu(), time.perf_counter()])
        self._seeds = itertools.count()
        self._reference = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def contestants(self) -> list[str]:
        """Those that this engine and this core have."""
        has = {
            "own": True,
            "raw": True,
            "one request a step": hasattr(self.lm.engine, "keeps_contexts"),
            "lists": True,
            "contexts": hasattr(self.lm, "context"),
            "population": True,
            "blocks": True,
        }
        return [name for name in CONTESTANTS if has[name]]

    def measure(self, contestant: str, population: Population) -> Measurement:
        """Run a contestant once, from a prompt that no other run has."""
        generator = random.Random(next(self._seeds))
        prompt = [generator.randrange(VOCAB_SIZE) for _ in range(population.prompt_length)]
        first = generator.sample(range(VOCAB_SIZE), population.count)
        keeps = contestant != "one request a step"
        self.lm._scheduler.run(lambda _: _keep_contexts(self.lm.engine, keeps=keeps))  # noqa: SLF001
        self.lm.clear_kv_cache()
        self.lm.next_token_logprobs_sync(prompt)
        starts = [[*prompt, token] for token in first]
        if contestant in {"own", "raw"}:
            temperature = 1.0 if contestant == "own" else 0.0
            return self._own(starts[: population.asked], population.steps, temperature)
        if contestant in {"population", "blocks"}:
            return asyncio.run(self._population(contestant, starts, population, generator))
        if contestant == "contexts":
            parent = self.lm.context(prompt)
            starts = [parent.extend(token) for token in first]
        return asyncio.run(self._particles(starts, population, generator))

    def _own(self, prompts: list[list[int]], steps: int, temperature: float) -> Measurement:
        if self._scheduler is not None:
            return Measurement(np.array(self._scheduler.decode(prompts, steps, temperature)))
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=steps, temperature=temperature, ignore_eos=True, detokenize=False
        )

        def generate(engine: Any) -> None:
            for i, token_ids in enumerate(prompts):
                engine.llm_engine.add_request(str(i), {"prompt_token_ids": token_ids}, params)
            while engine.llm_engine.has_unfinished_requests():
                engine.llm_engine.step()

        start = self._clock()
        self.lm._scheduler.run(generate)  # noqa: SLF001
        return Measurement(self._clock() - start)

    async def _particles(
        self, contexts: list[Any], population: Population, generator: random.Random
    ) -> Measurement:
        members = range(population.count)
        asked, seconds, final = list(members), np.zeros(2), []
        for step in range(population.steps):
            if population.kind == "waiting":
                asked = generator.sample(members, population.asked)
            start = self._clock()
            rows = await asyncio.gather(
                *(self.lm.next_token_logprobs(contexts[i]) for i in asked)
            )
            uniforms = [generator.random() for _ in asked]
            tokens = draw_tokens(torch.stack(rows), [1.0] * len(asked), uniforms)
            if step == population.steps - 1:
                final = [(_ids(contexts[i]), row) for i, row in zip(asked, rows, strict=True)]
            for i, token in zip(asked, tokens.tolist(), strict=True):
                contexts[i] = _extended(contexts[i], token)
            if population.kind == "resampled" and step % RESAMPLE_EVERY == RESAMPLE_EVERY - 1:
                weights = [generator.random() ** 3 for _ in members]
                parents = generator.choices(members, weights, k=population.count)
                contexts = [contexts[parent] for parent in parents]
            seconds += self._clock() - start
        return Measurement(seconds, final[:CHECKED])

    async def _population(
        self,
        contestant: str,
        starts: list[list[int]],
        population: Population,
        generator: random.Random,
    ) -> Measurement:
        """Draw and resample as arrays; "waiting" members are left out by an index."""
        members, seconds = np.arange(population.count), np.zeros(2)
        particles = self.lm.population(starts[0][:-1], population.count)
        particles = particles.extend([start[-1] for start in starts])
        block = BLOCK if contestant == "blocks" else 1
        resample_every = max(block, RESAMPLE_EVERY)
        for step in range(0, population.steps, block):
            asked = members
            if population.kind == "waiting":
                asked = np.array(
                    sorted(generator.sample(range(len(members)), population.asked))
                )
            start = self._clock()
            if contestant == "blocks":
                sampled = await particles.sample(block, stop=(), seed=next(self._seeds))
                particles = sampled.population
            else:
                drawn = await particles[asked].draw(seed=next(self._seeds))
                new = np.full(len(members), -1)
                new[asked] = drawn.token_ids.numpy()
                particles = particles.extend(new)
            last = step + block
            if population.kind == "resampled" and last % resample_every == 0:
                weights = [generator.random() ** 3 for _ in members]
                parents = generator.choices(range(len(members)), weights, k=len(members))
                particles = particles[np.array(parents)]
            seconds += self._clock() - start
        final = particles[:CHECKED]
        rows = await final.next_token_logprobs()
        sequences = [context.token_ids for context in final]
        return Measurement(seconds, list(zip(sequences, rows, strict=True)))

    @torch.inference_mode()
    def error(self, rows: Sequence[tuple[tuple[int, ...], torch.Tensor]]) -> float:
        """Largest difference of rows from an unbatched forward pass."""
        largest = 0.0
        for ids, row in rows:
            logits = self._reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
            expected = logits[:VOCAB_SIZE].log_softmax(-1)
            largest = max(largest, float((expected - row.cpu()).abs().max()))
        return largest


def _keep_contexts(engine: Any, *, keeps: bool) -> None:
    if hasattr(engine, "keeps_contexts"):
        engine.keeps_contexts = keeps


def _extended(context: Any, token: int) -> Any:
    return [*context, token] if isinstance(context, list) else context.extend(token)


def _ids(context: Any) -> tuple[int, ...]:
    return tuple(context if isinstance(context, list) else context.token_ids)


def _clock_of_all_processes() -> float:
    import psutil

    seconds = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        seconds += times.user + times.system
    return seconds


def populations(options: argparse.Namespace) -> Iterator[Population]:
    for cell in options.cells:
        for kind in options.kinds:
            yield Population(*map(int, cell.split("/")), kind)


def published(peer: Peer, population: Population) -> dict[str, list[float]]:
    """Microseconds a token of genlm-backend's contestants, by CPU and wall-clock time."""
    sizes = f"{population.count} {population.prompt_length} {population.steps}"
    figures = [float(word) for word in peer.ask(f"{sizes} {population.kind}").split()]
    return dict(zip(PUBLISHED, (figures[:2], figures[2:]), strict=True))


def measure(
    bench: Bench, options: argparse.Namespace, peer: Peer | None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Microseconds a token by row, and the largest error of each contestant."""
    samples: dict[str, list[float]] = {}
    errors: dict[str, float] = {}
    chosen = [name for name in bench.contestants() if name in options.contestants]
    for population in populations(options):
        is_waiting = population.kind == "waiting"
        names = [name for name in chosen if not (is_waiting and name == "blocks")]
        tokens = population.asked * population.steps
        for turn in range(options.rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                found = bench.measure(name, population)
                errors[name] = max(errors.get(name, 0.0), bench.error(found.rows))
                if turn:  # the first round warms up
                    row = f"{population} {name}"
                    for suffix, figure in zip(("", " wall"), found.seconds, strict=True):
                        figures = samples.setdefault(row + suffix, [])
                        figures.append(float(figure) / tokens * 1e6)
            if peer is not None and not is_waiting:
                for name, both in published(peer, population).items():
                    for suffix, figure in zip(("", " wall"), both, strict=True):
                        if turn:
                            samples.setdefault(f"{population} {name}{suffix}", []).append(
                                figure
                            )
        if peer is not None and not is_waiting:
            names = [*names, *PUBLISHED]
        speeds = {name: round(ratio(samples, f"{population} {name}"), 2) for name in names}
        print(population, speeds, flush=True)
    return samples, errors


def ratio(samples: dict[str, list[float]], row: str) -> float:
    """Speed as a fraction of own generation's: median over rounds of ratios in a round."""
    base = " ".join(row.split()[:2]) + " own"
    pairs = zip(samples[base + " wall" * row.endswith(" wall")], samples[row], strict=True)
    return statistics.median(limit / each for limit, each in pairs)


def engine_of(name: str, folder: Path, options: argparse.Namespace) -> Callable[[], Any]:
    """Return what builds an engine with room for 256 requests, vLLM for 512."""
    if name == "vllm":
        from genlm_vllm.engine import VLLMEngine

        engine_opts = {"max_num_seqs": 512, "kv_cache_memory_bytes": 2**30}
        return lambda: VLLMEngine(
            folder, engine_opts=engine_opts, multiprocess=options.multiprocess
        )
    from genlm_sgl.engine import SGLEngine

    return lambda: SGLEngine(folder, engine_opts=SGL_OPTS)


def scheduler_of(name: str, folder: Path) -> Any:
    """Return SGLang's scheduler, whose generation is the limit; vLLM generates by itself."""
    if name != "sgl":
        return None
    from sgl_scheduler import OwnScheduler

    return OwnScheduler(folder, SGL_OPTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("vllm", "sgl"))
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="N/PROMPT/STEPS")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--multiprocess", action="store_true", help="vLLM's own processes")
    parser.add_argument("--second-runner", action="store_true", help="vLLM's other runner")
    parser.add_argument("--published", type=Path, help="a Python with genlm-backend 0.3.1")
    parser.add_argument("--tiny", action="store_true", help="a model that costs nearly nothing")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.second_runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        import vllm_second_runner

        vllm_second_runner.install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, VOCAB_SIZE, tiny=options.tiny)
        build = engine_of(options.engine, folder, options)
        scheduler = scheduler_of(options.engine, folder)
        bench = Bench(build, folder, processes=options.multiprocess, scheduler=scheduler)
        script = "vllm_peer.py" if options.engine == "vllm" else "sgl_published.py"
        peer = Peer(options.published, script, folder) if options.published else None
        try:
            samples, errors = measure(bench, options, peer)
        finally:
            bench.lm.close()
            if peer is not None:
                peer.close()
            if scheduler is not None:
                scheduler.close()
    extra = {
        "engine": options.engine,
        "multiprocess": options.multiprocess,
        "second_runner": options.second_runner,
        "errors": {name: float(f"{error:.1e}") for name, error in errors.items()},
        "resample_every": RESAMPLE_EVERY,
        "block": BLOCK,
        "model": "tiny" if options.tiny else "llama",
    }
    ratios = {row: ratio(samples, row) for row in samples}
    print_report(
        "serving_particles", samples, unit="us of CPU a token", ratios=ratios, extra=extra
    )


if __name__ == "__main__":
    main()
