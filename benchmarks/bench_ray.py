"""What is the throughput of replicas on Ray, and what is their overhead?

    python benchmarks/bench_ray.py [limit] [rows] [tokens] [populations] [front] [kill] [--save]

Each replica computes on one thread, on a machine with two cores that the driver shares. Half a
population takes more than half the time, so the limit is below twice the rows.

- `limit`: rows a second of hf in this process, without Ray, for populations of 64 and of 32.
  Twice the second is the limit of two replicas without the costs of the driver, Ray and the
  other replica.
- `rows`: rows a second of a population of 64 after a shared prompt of 256, two replicas of hf
  against one, and against two with round-robin routing.
- `tokens`: total number of computed tokens, with resampling every 4 steps. One replica
  computes each token once.
- `populations`: rows a second of populations of 64, 200 and 1,000 members with draws, resampled
  every 4 steps: on hf in this process, one replica, two of which one computes all members, and
  two among which they are divided.
- `front`: microseconds a request, of the wall clock and of the driver's threads, for draws on
  a no-op engine, 1,000 concurrent, as it is and after `gc.freeze()`.
- `kill`: time to complete 1,000 requests, with and without one of two replicas killed
  meanwhile; rows are compared with those of hf in this process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from particle_model import VOCAB_SIZE, prompt_of, save_model
from report import print_report

import genlm
from genlm.plugin import refresh
from genlm_ray import division
from genlm_ray.engine import RayEngine
from genlm_ray.router import RoutedQuery, Router
from genlm_ray.wire import row_count

POPULATION, PROMPT, STEPS, EVERY = 64, 256, 32, 4
CONCURRENT = 1000
POPULATION_STEPS = {64: 68, 200: 36, 1000: 20}
"""Numbers of steps by the size of a population."""

ROUNDS = 3
CLUSTER = {"num_cpus": 2, "object_store_memory": 500 * 2**20}

FREE = '''
"""An engine that costs nothing."""
import torch
from genlm.plugin import BackendSpec, BatchEngine, Token, Vocabulary, hookimpl

class FreeEngine(BatchEngine):
    def __init__(self, model):
        tokens = [Token(i, bytes([i])) for i in range(32)]
        self.vocabulary = Vocabulary(None, tokens, [str(i) for i in range(32)])
        self.row = torch.full((32,), 1 / 32).log()

    def evaluate(self, queries):
        return self.row.expand(len(queries), 32)

@hookimpl
def genlm_backends():
    yield BackendSpec("free", "engine", "genlm_free:FreeEngine")
'''


class RoundRobin(Router):
    """Deals queries out in turn, wherever their parents are."""

    def _choose(self, routed: RoutedQuery, siblings: int, room: Mapping[int, int]) -> int:
        del siblings, room
        routed.cost = row_count(routed.query)
        return list(self.work)[routed.query.query_id % len(self.work)]


class RoundRobinEngine(RayEngine):
    """Replicas that queries are dealt out to in turn."""

    make_router = RoundRobin


@contextmanager
def replicas(
    model: str, count: int, engine: str = "hf", *, kind: type[RayEngine] = RayEngine
) -> Iterator[Any]:
    llm = genlm.AsyncLM(
        lambda: kind(
            model,
            engine=engine,
            replicas=count,
            engine_opts=options_of(engine),
            ray_opts=CLUSTER,
        ),
        name="ray",
        output_cache=genlm.OutputCache(0),
    )
    with llm:
        yield llm


def options_of(engine: str) -> dict[str, Any]:
    if engine != "hf":
        return {}
    return {"device": "cpu", "dtype": "float32", "kv_budget_bytes": 2**30}


async def particles(llm: Any, seed: int, every: int, count: int = POPULATION) -> float:
    """Rows a second of a population on its way; steps after the first, which has the prompt."""
    generator = random.Random(seed)
    prompt = llm.context([generator.randrange(VOCAB_SIZE), *prompt_of(PROMPT)[1:]])
    await prompt.next_token_logprobs()
    population = [prompt.extend(i) for i in range(count)]
    rows, began = 0, 0.0
    for step in range(STEPS):
        if step == 2:
            began = time.perf_counter()
        await asyncio.gather(*(one.draw(seed=i) for i, one in enumerate(population)))
        rows += count if step >= 2 else 0
        if every and step % every == every - 1:
            weights = [generator.expovariate(1) for _ in population]
            chosen = sorted(generator.choices(range(count), weights, k=count))
            population = [population[i] for i in chosen]
        population = [one.extend(generator.randrange(VOCAB_SIZE)) for one in population]
    return rows / (time.perf_counter() - began)


async def population(llm: Any, seed: int, count: int) -> float:
    """Rows a second of the draws of a population after the first steps."""
    generator = np.random.default_rng(seed)
    prompt = [int(generator.integers(VOCAB_SIZE)), *prompt_of(PROMPT)[1:]]
    members, steps, rows = llm.population(prompt, count), POPULATION_STEPS[count], 0
    began = 0.0
    for step in range(steps):
        if step == 4:
            began = time.perf_counter()
        drawn = await members.draw(seed=seed)
        members = members.extend(drawn.token_ids)
        rows += count if step >= 4 else 0
        if step % EVERY == EVERY - 1:
            weights = generator.exponential(size=count)
            members = members[
                np.sort(generator.choice(count, count, p=weights / weights.sum()))
            ]
    return rows / (time.perf_counter() - began)


def bench_populations(model: str) -> None:
    """Rows a second of populations, in turn."""
    for count in POPULATION_STEPS:
        samples: dict[str, list[float]] = {}

        def measure(name: str, llm: Any, count: int = count, samples: Any = samples) -> None:
            for seed in range(ROUNDS + 1):
                speed = asyncio.run(population(llm, seed, count))
                if seed:  # the first round warms up
                    samples.setdefault(name, []).append(speed)

        options = options_of("hf")
        with genlm.load_model(model, "hf", output_cache=genlm.OutputCache(0), **options) as llm:
            measure("hf in this process", llm)
        with replicas(model, 1) as llm:
            measure("1 replica", llm)
        with replicas(model, 2) as llm:
            measure("2 replicas", llm)
            smallest, division.MIN_ROWS = division.MIN_ROWS, count
            measure("2 replicas, undivided", llm)
            division.MIN_ROWS = smallest
        base = sum(samples["1 replica"])
        print(f"\npopulation of {count}")
        print_report(
            "ray", samples, unit="rows/s",
            ratios={name: sum(values) / base for name, values in samples.items()},
            extra={"question": "populations", "population": count, "prompt": PROMPT},
        )  # fmt: skip


def computed(llm: Any) -> float:
    return float(llm.statistics().engine["tokens_computed"])


def contestants() -> dict[str, tuple[int, type[RayEngine]]]:
    return {
        "1 replica": (1, RayEngine),
        "2 replicas": (2, RayEngine),
        "2 replicas, round-robin": (2, RoundRobinEngine),
    }


def bench_population(model: str, every: int) -> None:
    """Rows a second and tokens computed of each contestant, in turn."""
    speeds: dict[str, list[float]] = {name: [] for name in contestants()}
    tokens: dict[str, list[float]] = {name: [] for name in contestants()}
    for name, (count, kind) in contestants().items():
        with replicas(model, count, kind=kind) as llm:
            for seed in range(ROUNDS + 1):
                before = computed(llm)
                speed = asyncio.run(particles(llm, seed, every))
                if seed:  # the first round warms up
                    speeds[name].append(speed)
                    tokens[name].append(computed(llm) - before)
    first = "1 replica"
    sizes = {"population": POPULATION, "prompt": PROMPT, "steps": STEPS, "every": every}
    kind_of = " resampled" * bool(every)
    for what, samples, unit in (("rows", speeds, "rows/s"), ("tokens", tokens, "tokens")):
        base = sum(samples[first])
        ratios = {name: sum(values) / base for name, values in samples.items()}
        print(f"\n{what}{kind_of}")
        print_report(
            "ray", samples, unit=unit, ratios=ratios,
            extra={"question": what + kind_of, **sizes},
        )  # fmt: skip


def bench_limit(model: str) -> None:
    """Rows a second of the engine alone, for the whole population and for half of it."""
    samples: dict[str, list[float]] = {}
    options = options_of("hf")
    with genlm.load_model(model, "hf", output_cache=genlm.OutputCache(0), **options) as llm:
        for seed in range(ROUNDS + 1):
            for count in (POPULATION, POPULATION // 2):
                speed = asyncio.run(particles(llm, seed, 0, count))
                if seed:  # the first round warms up
                    samples.setdefault(f"population of {count}", []).append(speed)
    whole, half = samples.values()
    ratios = {name: 2 * sum(half) / sum(whole) for name in [*samples][1:]}
    print("\nlimit of two replicas")
    print_report("ray", samples, unit="rows/s", ratios=ratios, extra={"question": "limit"})


@contextmanager
def free_engine() -> Iterator[None]:
    """Install an engine that costs nothing, for this process and replicas that it starts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "genlm_free.py").write_text(FREE)
        metadata = folder / "genlm_free-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: genlm-free\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text("[genlm]\nfree = genlm_free\n")
        sys.path.insert(0, name)
        path = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{name}{os.pathsep}{path}" if path else name
        refresh()
        yield


def measure_fronts(llm: Any, samples: dict[str, list[float]], name: str) -> None:
    """Measure as a program is, and after the `gc.freeze()` that the guide recommends."""
    asyncio.run(measure_front(llm, samples, name))
    with frozen():
        asyncio.run(measure_front(llm, samples, f"{name}, gc.freeze"))


def bench_front() -> None:
    """Microseconds a request on an engine that costs nothing."""
    samples: dict[str, list[float]] = {}
    with free_engine():
        with genlm.load_model("free", "free", output_cache=genlm.OutputCache(0)) as llm:
            measure_fronts(llm, samples, "in this process")
        for count in (1, 2):
            with replicas("free", count, "free") as llm:
                measure_fronts(llm, samples, f"{count} replicas")
    print("\nfront end")
    print_report("ray", samples, unit="us a request", extra={"question": "front"})


@contextmanager
def frozen() -> Iterator[None]:
    """Take what is loaded out of garbage collections."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def measure_front(llm: Any, samples: dict[str, list[float]], name: str) -> None:
    wall, cpu = (
        samples.setdefault(f"{name}, wall", []),
        samples.setdefault(f"{name}, driver", []),
    )
    contexts = [llm.context([i % 32, i // 32, 1, 2]) for i in range(CONCURRENT)]
    for step in range(30):
        contexts = [one.extend(step) for one in contexts]
        began, began_cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one.draw(seed=i) for i, one in enumerate(contexts)))
        if step >= 5:
            wall.append((time.perf_counter() - began) / CONCURRENT * 1e6)
            cpu.append((time.process_time() - began_cpu) / CONCURRENT * 1e6)


def bench_kill(model: str) -> None:
    """Seconds for 1,000 requests of 32 tokens, undisturbed and with a replica killed."""
    generator = random.Random(7)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(32)] for _ in range(CONCURRENT)]
    with genlm.load_model(model, "hf", **options_of("hf")) as llm:
        expected = torch.stack(
            [row.cpu() for row in llm.batch_next_token_logprobs_sync(prompts)]
        )
    samples: dict[str, list[float]] = {"undisturbed": [], "one of two killed": []}
    for _ in range(ROUNDS):
        for name, values in samples.items():
            with replicas(model, 2) as llm:
                llm.batch_next_token_logprobs_sync([[9, i] for i in range(8)])
                values.append(
                    asyncio.run(killed(llm, prompts, expected, name != "undisturbed"))
                )
    ratio = sum(samples["one of two killed"]) / sum(samples["undisturbed"])
    print("\nkill one of two")
    print_report(
        "ray", samples, unit="s", ratios={"one of two killed": ratio},
        extra={"question": "kill", "requests": CONCURRENT},
    )  # fmt: skip


async def killed(
    llm: Any, prompts: list[list[int]], expected: torch.Tensor, kill: bool
) -> float:
    began = time.perf_counter()
    tasks = [asyncio.ensure_future(llm.next_token_logprobs(ids)) for ids in prompts]
    if kill:
        await asyncio.sleep(0.2)  # both are computing their first batch
        os.kill(int(llm.statistics().engine["replica 0: pid"]), signal.SIGKILL)
    rows = torch.stack(await asyncio.gather(*tasks))
    seconds = time.perf_counter() - began
    assert float((rows - expected).abs().max()) < 1e-4
    assert llm.statistics().answered == len(prompts) + 8
    return seconds


def main() -> None:
    wanted = [each for each in sys.argv[1:] if not each.startswith("-")]
    wanted = wanted or ["limit", "rows", "tokens", "populations", "front", "kill"]
    if "front" in wanted:  # first: its engine must be known to the cluster when that starts
        bench_front()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), VOCAB_SIZE)
        if "limit" in wanted:
            bench_limit(folder)
        if "rows" in wanted:
            bench_population(folder, 0)
        if "tokens" in wanted:
            bench_population(folder, EVERY)
        if "populations" in wanted:
            bench_populations(folder)
        if "kill" in wanted:
            bench_kill(folder)


if __name__ == "__main__":
    main()
