"""How fast is genlm on a GPU, compared with other implementations of the same loops?

`python scripts/gpu.py` runs each line of this benchmark in a separate process. Models are
Llamas of real shapes with random weights in bfloat16 (`gpu_model`) with 128,000 ids:

- particles: the loop of `bench_hf_particles.py`. lockstep decodes `[N, 1]` with transformers'
  DynamicCache; static does so with a StaticCache whose step is replayed as one CUDA graph; in
  compiled, `torch.compile` captures this graph. genlm runs
  with `cuda_graphs=True` (graphs) and without. All contestants
  give float32 log-probabilities of the whole vocabulary for every particle, and the rows after
  the last step are compared;
- population: a `Population` whose members are extended by the tokens that are drawn for them,
  and one that is resampled after every fourth step too. The peer is static with
  `torch.multinomial` on its rows; resampling selects its cache by member;
- concurrent: 20 populations of 50 members with different prompts, in 20 coroutines, against the
  same populations one after the other, and against one population of 1,000;
- constraints: a population under each constraint of `bench_constraints.py`, against the same
  population without one, in wall time, with the masks of the next draw;
- outside: the share of a step that is not the model's forward pass, by CUDA events around it;
- beams: the program `beam_search` against `generate(num_beams=...)` of transformers;
- scores: `batch_score` of 16 texts against one padded forward pass with log-softmax and gather;
- trie: sums over 415,907 prefixes as a share of the bandwidth of a copy of as many bytes as any
  method must move;
- draws: a token under a mask for each of 1,000 rows: as a population draws, masks shared and
  distinct, in main memory and on the device; and as 1,000 separate requests of one batch;
- peer: genlm-backend 0.3.1 on the loop of particles, in a separate process;
- vllm, vllm-first: populations on vLLM, by its default model runner and by its first, against
  vLLM's own greedy generation of as many sequences by the same engine. Steps are replayed from
  CUDA graphs and nothing is compiled. Each sequence begins with a different token after a
  cached prompt, and the step in which its request begins is not measured. vLLM's asynchronous
  scheduling, with which each row would come one step later, is off for both.

The limit of a step is reading the weights once, which is also printed. Every figure is a
time between two synchronisations of the device. `--device cpu --tiny` runs every line with
small sizes and without graphs, to test the program.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_hf_particles import genlm, lockstep
from bench_populations import decode
from bench_programs import generated, program
from bench_trie_cuda import captured
from gpu_model import SHAPES, device_clock, random_llama
from particle_model import cache_argument, prompt_of, tokenizer
from particle_population import Clock, Particles, Population
from peer import Peer
from trie_traffic import floor_bytes
from trie_vocabulary import words

from genlm import AsyncLM, Mask, OutputCache, Token, load_model
from genlm.core.rows.draws import batch_draw
from genlm.core.rows.outputs import reduce_rows
from genlm.core.rows.reductions import Draw
from genlm.core.rows.row_weights import RowWeights
from genlm.plugin import draw_tokens
from genlm_hf.engine import HFEngine
from genlm_trie_cuda.plan import TreePlan
from genlm_trie_cuda.trie import DeviceTrie

STEPS = 12
CASES = ((50, 64), (50, 512), (200, 512), (1000, 512))
Step = Callable[[], Awaitable[object]]
Way = Callable[[AsyncLM, Particles], Step]
"""Returns what a step awaits, of particles that grow between steps."""

FLUSHED = 2**28
"""Bytes that are overwritten between rounds of the trie: more than any cache holds."""


@dataclass
class Line:
    """Options of one line, and what it found.

    Attributes:
        device: A torch device.
        tiny: Whether sizes are those of a test.
        rounds: How often everything is measured.
        samples: Measurements by row.
        values: Figures that goals are compared with, by the goal's name.
        notes: Why a row is absent, and other facts, by row.
    """

    device: str
    tiny: bool
    rounds: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether graphs and events exist."""
        return self.device != "cpu"

    def shape(self, name: str) -> str:
        """The shape to build."""
        return "tiny" if self.tiny else name

    def cases(self) -> list[Population]:
        """The populations of particles."""
        if self.tiny:
            return [Population(3, 8, 0, 0, 4)]
        return [Population(count, prompt, 0, 0, STEPS) for count, prompt in CASES]

    def measure(self, contestants: dict[str, Callable[[], float]], case: str) -> None:
        """Run all in turn, each round; one that does not fit or fails is noted, not hidden."""
        broken: set[str] = set()
        for _ in range(self.rounds + 1):  # the first round compiles and allocates
            for name in [name for name in contestants if name not in broken]:
                try:
                    figure = contestants[name]()
                except Exception as error:  # noqa: BLE001 - a peer's failure is a result
                    broken.add(name)
                    self.notes[f"{case} {name}"] = f"{type(error).__name__}: {error}"[:300]
                else:
                    self.samples.setdefault(f"{case} {name}", []).append(figure)
                    print(f"{case} {name}: {figure:.3f} ms", flush=True)
                release()
        for name in contestants:
            figures = self.samples.get(f"{case} {name}", [])
            del figures[:1]

    def median(self, row: str) -> float | None:
        """The median of a row; None if it was not measured."""
        return statistics.median(self.samples[row]) if self.samples.get(row) else None

    def ratio(self, goal: str, slow: str, fast: str) -> None:
        """Record how many times faster one row is than another: the median over rounds."""
        pairs = list(zip(self.samples.get(slow, ()), self.samples.get(fast, ()), strict=False))
        if pairs:
            self.values[goal] = statistics.median(s / f for s, f in pairs)

    def report(self) -> str:
        """What was found so far, as a line of JSON."""
        rows = {
            row: {"median": statistics.median(f), "min": min(f), "max": max(f)}
            for row, f in self.samples.items()
            if f
        }
        shapes = {name: SHAPES[name] for name in ("tiny",) if self.tiny} or SHAPES
        found = {"unit": "ms", "rows": rows, "values": self.values, "notes": self.notes}
        return json.dumps({**found, "rounds": self.rounds, "seed": 0, "shapes": shapes})


def release() -> None:
    """Give memory of the last contestant back, so that the next one has all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- particles ------------------------------------------------------------------------


class StaticLockstep:
    """`[N, 1]` decoding with a StaticCache; on a GPU a step is one replayed graph.

    Args:
        model: A Llama.
        population: What is decoded.
        way: `"graph"`, `"compile"` or `"eager"`.
        draws: Whether the next token of each member is drawn from its row, and members are
            resampled where the population says so; else tokens are given.
    """

    @torch.inference_mode()
    def __init__(
        self, model: Any, population: Population, way: str, *, draws: bool = False
    ) -> None:
        self._model, self._population, self._draws = model, population, draws
        count, device = population.count, model.device
        dynamic = transformers.DynamicCache(config=model.config)
        prompt = torch.tensor([population.prompt], device=device)
        model(prompt, **cache_argument(model, dynamic), use_cache=True, logits_to_keep=1)
        length = population.prompt_length + population.steps
        self._past = transformers.StaticCache(config=model.config, max_cache_len=length)
        self._ids = torch.zeros((count, 1), dtype=torch.long, device=device)
        self._place = torch.zeros((1, 1), dtype=torch.long, device=device)
        past = cache_argument(model, self._past)
        self._forward = functools.partial(model, **past, use_cache=True)
        if way == "compile":
            compiled = torch.compile(model.forward, mode="reduce-overhead")
            self._forward = functools.partial(compiled, **past)
        self.rows = self._step()  # makes the cache's tensors
        self._replay: Callable[[], object] | None = None
        if way == "graph":
            self._rewind()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.rows = self._step()
            self._replay = graph.replay
        # Last, because every step writes keys and values.
        for layer, filled in zip(self._past.layers, dynamic.layers, strict=True):
            layer.keys[:, :, : population.prompt_length] = filled.keys
            layer.values[:, :, : population.prompt_length] = filled.values

    def _step(self) -> torch.Tensor:
        logits = self._forward(input_ids=self._ids, position_ids=self._place).logits[:, -1]
        return logits.float().softmax(-1) if self._draws else logits.float().log_softmax(-1)

    def _rewind(self) -> None:
        for layer in self._past.layers:
            layer.cumulative_length.fill_(self._population.prompt_length)
        self._place.fill_(self._population.prompt_length)

    @torch.inference_mode()
    def __call__(self, clock: Clock) -> float:
        """Milliseconds a step; `rows` are those after the last one, or probabilities."""
        particles, seconds = self._population.start(), 0.0
        self._rewind()
        for step in range(self._population.steps):
            particles.grow()
            particles.resample(step)
            last = torch.tensor([context[-1:] for context in particles.contexts])
            start = clock()
            if not self._draws:
                self._ids.copy_(last)
            if self._replay is not None:
                self._replay()
            else:
                self.rows = self._step()
            self._place += 1
            if self._draws:
                self._draw(particles.parents)
            seconds += clock() - start
        return seconds / self._population.steps * 1e3

    def _draw(self, parents: list[int] | None) -> None:
        """Draw the next tokens, which a sampler reads, and resample the members."""
        drawn = torch.multinomial(self.rows, 1)
        drawn.cpu()
        if parents is not None:
            chosen = torch.tensor(parents, device=drawn.device)
            drawn = drawn[chosen]
            for layer in self._past.layers:
                for states in (layer.keys, layer.values):
                    states.copy_(states.index_select(0, chosen))
        self._ids.copy_(drawn)


def particles(line: Line, shape: str, way: str, cases: slice = slice(None)) -> None:
    """genlm, lockstep and one kind of static over the cases, from one model."""
    clock = device_clock(line.device)
    model = random_llama(line.shape(shape), line.device)
    line.notes["bytes of weights"] = sum(p.nbytes for p in model.parameters())

    with served(line, model, cuda_graphs=False) as lm, served(line, model) as graphed:
        line.notes["execution path"] = lm.statistics().engine["execution_path"]
        gc.freeze()  # as the guide recommends once models are loaded; for all contestants
        for case in line.cases()[cases]:
            label = f"{shape} {case}"
            found: dict[str, torch.Tensor] = {}

            made: dict[str, StaticLockstep] = {}

            def static(
                way: str, case: Population = case, rows: Any = found, made: Any = made
            ) -> float:
                if way not in made:  # captured or compiled once
                    made[way] = StaticLockstep(model, case, way if line.on_gpu else "eager")
                figure = made[way](clock)
                rows["static"] = made[way].rows[:8].clone()
                return figure

            contestants = {
                "lockstep": functools.partial(lockstep, model, case, clock, preallocated=False),
                f"static {way}": functools.partial(static, way),
                "genlm": functools.partial(genlm, lm, case, clock),
                "genlm batch": functools.partial(in_one_call, lm, case, clock, found),
                "genlm graphs": functools.partial(genlm, graphed, case, clock),
                "genlm graphs batch": functools.partial(in_one_call, graphed, case, clock, {}),
            }
            if not line.on_gpu:
                del contestants["genlm graphs"], contestants["genlm graphs batch"]
            line.measure(contestants, label)
            for peer in (f"static {way}", "lockstep"):
                for kind in ("", " batch", " graphs", " graphs batch"):
                    line.ratio(
                        f"{label}{kind} {peer}", f"{label} {peer}", f"{label} genlm{kind}"
                    )
            line.ratio(f"{label} graphs", f"{label} genlm", f"{label} genlm graphs")
            if why := why_without_graphs(graphed):
                for goal in ("graphs", f"graphs static {way}", "graphs lockstep"):
                    line.values.pop(f"{label} {goal}", None)
                    line.notes[f"{label} {goal}"] = why
            if len(found) == 2:
                difference = (found["genlm"] - found["static"]).abs().max()
                line.notes[f"{label} largest difference from static"] = float(difference)
            print(label, {k: round(v, 3) for k, v in line.values.items() if label in k})


def why_without_graphs(lm: AsyncLM) -> str:
    """Return why an engine with `cuda_graphs` replays no steps; empty if it does."""
    statistics = lm.statistics().engine
    if statistics.get("graphs_replayed"):
        return ""
    return str(statistics.get("graphs_refused") or "needs a CUDA device")


def in_one_call(
    lm: AsyncLM, population: Population, clock: Clock, found: dict[str, torch.Tensor]
) -> float:
    """Milliseconds a step when one call asks for the rows of all particles."""

    async def run() -> float:
        particles, seconds = population.start(), 0.0
        await lm.batch_next_token_logprobs(particles.contexts)
        for _ in range(population.steps):
            particles.grow()
            start = clock()
            rows = await lm.batch_next_token_logprobs(particles.asked)
            seconds += clock() - start
        found["genlm"] = rows[:8].clone()
        return seconds / population.steps * 1e3

    lm.clear_kv_cache()
    return asyncio.run(run())


def served(line: Line, model: Any, *, cuda_graphs: bool | None = None) -> AsyncLM:
    """Serve a model without an output cache, by default as one that is loaded by its name."""
    load = functools.partial(
        HFEngine.from_model,
        kv_budget_bytes=budget(line),
        cuda_graphs=line.on_gpu if cuda_graphs is None else cuda_graphs,
    )
    vocabulary = tokenizer(model.config.vocab_size)
    return AsyncLM(lambda: load(model, vocabulary), output_cache=OutputCache(0))


def budget(line: Line) -> int:
    """Bytes of keys and values: room for lockstep's caches beside them."""
    return 2**24 if line.tiny or not line.on_gpu else torch.cuda.mem_get_info()[0] // 4


# -- populations ----------------------------------------------------------------------


def populations(line: Line) -> None:
    """Populations that draw their tokens, with and without graphs and resampling."""
    clock = device_clock(line.device)
    model = random_llama(line.shape("1b"), line.device)

    with served(line, model, cuda_graphs=False) as lm, served(line, model) as graphed:
        gc.freeze()  # as the guide recommends
        for case in line.cases():
            for every in (0, 4):
                resampled = replace(case, every=every)
                label = f"population {resampled}"
                made: list[StaticLockstep] = []

                def static(case: Population = resampled, made: Any = made) -> float:
                    if not made:  # captured once
                        way = "graph" if line.on_gpu else "eager"
                        made.append(StaticLockstep(model, case, way, draws=True))
                    return made[0](clock)

                contestants = {
                    "static graph": static,
                    "genlm": functools.partial(drawn, lm, resampled, clock),
                    "genlm graphs": functools.partial(drawn, graphed, resampled, clock),
                }
                if not line.on_gpu:
                    del contestants["genlm graphs"]
                line.measure(contestants, label)
                for option in ("", " graphs"):
                    row = f"{label} genlm{option}"
                    line.ratio(f"{label}{option} static graph", f"{label} static graph", row)
                if why := why_without_graphs(graphed):
                    goal = f"{label} graphs static graph"
                    line.values.pop(goal, None)
                    line.notes[goal] = why


def drawn(lm: AsyncLM, case: Population, clock: Clock) -> float:
    """Milliseconds a step of a population that draws."""
    return decode(lm, case, clock, draws=True) * 1e3


def concurrent(line: Line) -> None:
    """Milliseconds in which all of several populations draw a token."""
    clock = device_clock(line.device)
    count, members, steps = (3, 4, 3) if line.tiny else (20, 50, STEPS)
    model = random_llama(line.shape("1b"), line.device)
    length = 8 if line.tiny else 64

    async def one(number: int, size: int) -> None:
        population = lm.population([number, *prompt_of(length)], size)
        for _ in range(steps):
            drawn = await population.draw(seed=number)
            population = population.extend(drawn.token_ids)

    async def together() -> None:
        await asyncio.gather(*(one(number, members) for number in range(count)))

    async def in_turn() -> None:
        for number in range(count):
            await one(number, members)

    def timed(run: Callable[[], Any]) -> float:
        lm.clear_kv_cache()
        start = clock()
        asyncio.run(run())
        return (clock() - start) / steps * 1e3

    with served(line, model) as lm:
        gc.freeze()  # as the guide recommends
        contestants = {
            "one after the other": functools.partial(timed, in_turn),
            "concurrently": functools.partial(timed, together),
            "one population": functools.partial(timed, lambda: one(0, count * members)),
        }
        line.measure(contestants, "populations")
        line.ratio("concurrent", "populations one after the other", "populations concurrently")


def constraints(line: Line) -> None:
    """A population under each constraint and without, their steps in turn."""
    from bench_constraints import LANGUAGES, Contestant  # need libraries of their own

    clock = device_clock(line.device)
    model = random_llama(line.shape("1b"), line.device)
    with served(line, model) as lm:
        gc.freeze()  # as the guide recommends
        for size in (50, 500):
            ways = {name: Contestant(lm, size, each) for name, each in LANGUAGES.items()}

            async def steps(ways: dict[str, Contestant] = ways, size: int = size) -> None:
                for number in range(STEPS * line.rounds + 3):
                    for name, way in ways.items():
                        start = clock()
                        await way.step()
                        if number >= 3:  # the first steps capture graphs
                            figures = line.samples.setdefault(f"constraints {size} {name}", [])
                            figures.append((clock() - start) * 1e3)

            asyncio.run(steps())
            for name in LANGUAGES.keys() - {"none"}:
                label = f"constraints {size} {name}"
                line.ratio(label, f"constraints {size} none", label)


# -- outside the forward pass ---------------------------------------------------------


class ForwardTime:
    """Milliseconds that the forward passes of a model take on its device."""

    def __init__(self, model: Any, *, on_gpu: bool) -> None:
        self._on_gpu, self._clock = on_gpu, device_clock("cpu")
        self._marks: list[Any] = []
        self._handles = [
            model.register_forward_pre_hook(self._mark),
            model.register_forward_hook(self._mark),
        ]

    def _mark(self, *_: Any) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(self._clock())

    def taken(self) -> float:
        """The sum since the last call; the device has computed everything."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        self._marks.clear()
        if self._on_gpu:
            return sum(begin.elapsed_time(end) for begin, end in pairs)
        return sum(end - begin for begin, end in pairs) * 1e3

    def remove(self) -> None:
        """End the measurement."""
        for handle in self._handles:
            handle.remove()


@contextmanager
def timed_forward(model: Any, *, on_gpu: bool) -> Iterator[ForwardTime]:
    """Measure a model's forward passes within this context."""
    timer = ForwardTime(model, on_gpu=on_gpu)
    try:
        yield timer
    finally:
        timer.remove()


def outside(line: Line) -> None:
    """Share of a step of 1,000 particles that is not the forward pass, by the way to ask."""
    clock = device_clock(line.device)
    model = random_llama(line.shape("1b"), line.device)
    case = line.cases()[-1]

    def each(lm: AsyncLM, particles: Particles) -> Step:
        return lambda: asyncio.gather(*map(lm.next_token_logprobs, particles.asked))

    def one_call(lm: AsyncLM, particles: Particles) -> Step:
        return lambda: lm.batch_next_token_logprobs(particles.asked)

    def a_population(lm: AsyncLM, _: Particles) -> Step:
        members = lm.population(case.prompt, case.count)

        async def step() -> None:
            nonlocal members
            members = members.extend((await members.draw(seed=0)).token_ids)

        return step

    async def run(lm: AsyncLM, timer: ForwardTime, way: Way) -> tuple[float, float]:
        particles, steps, forwards = case.start(), 0.0, 0.0
        step = way(lm, particles)
        await step()  # computes the prompt
        for _ in range(case.steps):
            particles.grow()
            start = clock()
            timer.taken()
            await step()
            steps += (clock() - start) * 1e3
            forwards += timer.taken()
        return steps / case.steps, forwards / case.steps

    with (
        timed_forward(model, on_gpu=line.on_gpu) as timer,
        served(line, model, cuda_graphs=False) as lm,  # hooks do not run in graphs
    ):
        gc.freeze()  # as the guide recommends
        ways = {
            "a coroutine each": each,
            "one call": one_call,
            "a population": a_population,
        }
        for name, way in ways.items():
            shares = []
            for number in range(line.rounds + 1):
                lm.clear_kv_cache()
                step, forward = asyncio.run(run(lm, timer, way))
                if number:
                    line.samples.setdefault(f"{case} {name}: step", []).append(step)
                    line.samples.setdefault(f"{case} {name}: forward", []).append(forward)
                    shares.append(1 - forward / step)
            line.values[f"outside {name}"] = statistics.median(shares)


# -- beams and scores -----------------------------------------------------------------


def beams(line: Line) -> None:
    """A search by each, of as many tokens; milliseconds a token."""
    clock, search = device_clock(line.device), program("beam_search")["beam_search"]
    tokens = 4 if line.tiny else 24
    model = random_llama(line.shape("1b"), line.device)
    with served(line, model) as lm:
        gc.freeze()  # as the guide recommends
        for width in (10, 100):
            found: dict[str, torch.Tensor] = {}

            def timed(
                name: str, run: Callable[[], torch.Tensor], found: dict[str, Any] = found
            ) -> float:
                start = clock()
                found[name] = run()
                return (clock() - start) / tokens * 1e3

            def own(width: int = width) -> torch.Tensor:
                lm.clear_kv_cache()
                scores: torch.Tensor = search(lm, prompt_of(64), width, max_tokens=tokens)[1]
                return scores

            by_transformers = functools.partial(generated, model, width, tokens)
            contestants = {
                "transformers": functools.partial(timed, "transformers", by_transformers),
                "genlm": functools.partial(timed, "genlm", own),
            }
            label = f"beams {width}"
            line.measure(contestants, label)
            line.ratio(label, f"{label} transformers", f"{label} genlm")
            if len(found) == 2:
                best = [float(scores[0]) for scores in found.values()]
                line.notes[f"{label} difference of the best scores"] = abs(best[0] - best[1])


def scores(line: Line) -> None:
    """Milliseconds for the log-probability of every token of 16 texts."""
    clock = device_clock(line.device)
    count, length = (2, 12) if line.tiny else (16, 512)
    model = random_llama(line.shape("1b"), line.device)
    with served(line, model) as lm:
        gc.freeze()  # as the guide recommends
        generator = torch.Generator().manual_seed(0)
        texts = torch.randint(0, 8000, (count, length), generator=generator)

        @torch.inference_mode()
        def padded() -> torch.Tensor:
            ids = texts.to(model.device)
            rows = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            return rows.gather(2, ids[:, 1:, None])[..., 0].cpu()

        def own() -> torch.Tensor:
            lm.clear_kv_cache()
            return torch.stack(list(lm.batch_score_sync(texts.tolist())))

        def timed(run: Callable[[], torch.Tensor]) -> float:
            start = clock()
            run()
            return (clock() - start) * 1e3

        contestants = {
            "padded": functools.partial(timed, padded),
            "genlm": functools.partial(timed, own),
        }
        line.measure(contestants, "scores")
        line.ratio("scores", "scores padded", "scores genlm")
        difference = (own() - padded()).abs().max()
        line.notes["scores, largest difference"] = float(difference)


# -- trie -----------------------------------------------------------------------------


def trie(line: Line) -> None:
    """Reductions of 32 and 512 rows beside a copy of the bytes that they must move."""
    random = np.random.default_rng(0)
    small = {random.bytes(int(length)) for length in random.integers(1, 6, 2000)}
    vocabulary = sorted(small) if line.tiny else words()
    tokens = [Token(position, word) for position, word in enumerate(vocabulary)]
    kernels = "triton" if line.on_gpu else "torch"
    built = DeviceTrie(tokens, device=line.device, kernels=kernels)
    plan = TreePlan.of_layout(built.layout)
    flush = torch.empty(2**20 if line.tiny else FLUSHED, dtype=torch.uint8, device=line.device)
    graph = captured if line.on_gpu else lambda run: run
    for count in (2, 4) if line.tiny else (32, 512):
        logits = torch.randn((count, len(tokens)), device=line.device)
        least = floor_bytes(plan, rows=count, weight_bytes=4, value_bytes=4)
        source = torch.empty(least // 2, dtype=torch.uint8, device=line.device)
        target = torch.empty_like(source)
        contestants = {"copy": graph(lambda t=target, s=source: t.copy_(s))}
        for operation in ("sum", "logsumexp"):
            ws = logits.log_softmax(-1) if operation == "logsumexp" else logits.softmax(-1)
            reduce = getattr(built, f"batch_weight_{operation}")
            call = functools.partial(reduce, ws, returns="torch")
            contestants |= {operation: call, f"{operation} as a graph": graph(call)}
        for number in range(10 * line.rounds + 3):
            for name, call in contestants.items():
                flush.zero_()
                elapsed = milliseconds(call, line)
                if number >= 3:  # the first rounds warm up
                    line.samples.setdefault(f"trie {count} {name}", []).append(elapsed)
        line.notes[f"bytes of {count} rows"] = least
        for name in contestants.keys() - {"copy"}:
            line.ratio(f"trie {count} {name}", f"trie {count} copy", f"trie {count} {name}")


def milliseconds(call: Callable[[], object], line: Line) -> float:
    """Time of one call, by events of the device or by the clock."""
    if not line.on_gpu:
        clock = device_clock("cpu")
        start = clock()
        call()
        return (clock() - start) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


# -- draws ----------------------------------------------------------------------------


def draws(line: Line) -> None:
    """A token for each row: without masks, with one for all, with one for each."""
    count, size = (8, 8000) if line.tiny else (1000, 128_000)
    rows = torch.randn((count, size), device=line.device).log_softmax(-1)
    random = np.random.default_rng(0)
    allowed = random.random((count, size)) < 0.5
    masks = [Mask(each, size) for each in allowed]
    packed = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little")).view(torch.int32)
    uniforms = random.random(count)
    numbers = torch.from_numpy(uniforms)
    clock = device_clock(line.device)

    def timed(draw: Callable[[], Sequence[int]], wanted: Any) -> float:
        draw()  # allocates, as the first step of a program
        start = clock()
        drawn = draw()
        elapsed = clock() - start
        assert wanted is None or all(wanted[i, token] for i, token in enumerate(drawn))
        return elapsed * 1e3

    def of_population(masks: Any) -> Sequence[int]:
        weights = RowWeights(rows.shape, masks)
        found: list[int] = batch_draw(rows, numbers, weights).token_ids.tolist()
        return found

    def of_requests() -> Sequence[int]:
        requests = [(Draw(u, mask=m),) for u, m in zip(uniforms.tolist(), masks, strict=True)]
        return [each.values[0].token_id for each in reduce_rows(rows, requests)]

    one = np.broadcast_to(allowed[0], allowed.shape)
    for name, draw, wanted in (
        ("no masks", functools.partial(of_population, None), None),
        ("one mask", functools.partial(of_population, masks[0]), one),
        ("a mask each", functools.partial(of_population, packed), allowed),
        ("masks on it", functools.partial(of_population, packed.to(line.device)), allowed),
        ("separate requests", of_requests, allowed),
    ):
        line.measure({name: functools.partial(timed, draw, wanted)}, "draws")
        if (median := line.median(f"draws {name}")) is not None:
            line.values[f"draws {name}"] = median


# -- peer -----------------------------------------------------------------------------


def published(line: Line) -> None:
    """genlm-backend 0.3.1 with its `cache_kv` and without, beside genlm."""
    path = os.environ.get("GENLM_PEER_PATH", "")
    if not Path(path, "genlm", "backend").is_dir():
        raise SystemExit(
            "genlm-backend 0.3.1 is missing: its wheel is not in the folder of wheels "
            "(docs/gpu.md says how to put it there)"
        )
    environment = os.environ | {"PYTHONPATH": path}
    clock = device_clock(line.device)
    case = line.cases()[0]
    shape = line.shape("1b")
    model = random_llama(shape, line.device)
    other = Peer(
        sys.executable, "particle_peer.py", "wall", shape, line.device, environment=environment
    )
    with served(line, model) as lm:
        contestants = {
            "genlm": functools.partial(genlm, lm, case, clock),
            **{
                f"genlm-backend {mode}": functools.partial(
                    other.measure, f"{case.count} {case.prompt_length} 0 0 {case.steps} {mode}"
                )
                for mode in ("cached", "uncached")
            },
        }
        line.measure(contestants, f"peer {case}")
    other.close()
    for mode in ("cached", "uncached"):
        label = f"peer {case} genlm"
        line.ratio(f"peer {mode}", f"peer {case} genlm-backend {mode}", label)


# -- vLLM -----------------------------------------------------------------------------


GRAPH_SIZES = (1, 40, 50, 144, 200, 672, 1000)
"""Requests of the captured steps: all of each case, or those that resampling leaves."""

RESAMPLE_EVERY = 4

VLLM_ROUNDS = 2
"""Loading takes most of a line's time."""


def vllm(line: Line, name: str) -> None:
    """Populations on vLLM against its own generation; milliseconds a step."""
    if name == "vllm-first" and line.on_gpu:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # read when vLLM is imported
    line.rounds = min(line.rounds, VLLM_ROUNDS)
    clock, begin = device_clock(line.device), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = random_llama(line.shape("1b"), line.device)
        model.save_pretrained(folder)
        tokenizer(model.config.vocab_size).save_pretrained(folder)
        del model
        release()
        lm = load_model(
            folder,
            "vllm",
            engine_opts=vllm_options(line),
            unverified="warn",
            output_cache=OutputCache(0),
        )
        with lm:
            runner = lm.engine.llm_engine.model_executor.driver_worker.worker.model_runner
            line.notes[f"{name} model runner"] = type(runner).__module__
            line.notes[f"{name} seconds to load"] = round(time.monotonic() - begin, 1)
            print(line.notes, flush=True)
            gc.freeze()  # as the guide recommends
            for case in [case for case in line.cases() if str(case) != "50/512"]:
                contestants = {
                    "raw": functools.partial(vllm_own, lm, case, clock),
                    "population": functools.partial(stepped, lm, case, clock),
                    "resampled": functools.partial(
                        stepped, lm, replace(case, every=RESAMPLE_EVERY), clock
                    ),
                    "sample": functools.partial(sampled, lm, case, clock),
                    "contexts": functools.partial(in_coroutines, lm, case, clock),
                }
                if case.count > 50:
                    del contestants["contexts"]
                label = f"{name} {case}"
                line.measure(contestants, label)
                for way in contestants.keys() - {"raw"}:
                    line.ratio(f"{label} {way}", f"{label} raw", f"{label} {way}")
                print(line.report(), flush=True)  # for a run that ends before the next case


def vllm_options(line: Line) -> dict[str, Any]:
    """Options of vLLM's engine, which has room for the largest case."""
    if not line.on_gpu:
        return {"dtype": "float32", "kv_cache_memory_bytes": 2**26}
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": list(GRAPH_SIZES),
    }
    return {
        "dtype": "bfloat16",
        "max_num_seqs": 1024,
        "kv_cache_memory_bytes": 20 * 2**30,  # 655,360 tokens
        "compilation_config": graphs,
        # The first round compiles the kernels that are used, in less time than all.
        "kernel_config": {"enable_jit_warmup": False},
    }


def cached_prompt(lm: AsyncLM, case: Population) -> tuple[list[int], list[int]]:
    """The prompt, the only one in the cache, and a different first token of each sequence."""
    lm.clear_kv_cache()
    lm.next_token_logprobs_sync(case.prompt)
    return case.prompt, list(range(case.count))


def vllm_own(lm: AsyncLM, case: Population, clock: Clock) -> float:
    """Milliseconds of a step in which vLLM generates a token of each request."""
    from vllm import SamplingParams

    prompt, first = cached_prompt(lm, case)
    length = case.steps + 2  # requests do not end in a measured step
    params = SamplingParams(
        max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False
    )

    def generate(engine: Any) -> float:
        own = engine.llm_engine
        for token_id in first:
            ids = {"prompt_token_ids": [*prompt, token_id]}
            own.add_request(f"own-{token_id}", ids, params)
        begun = len(own.step())
        start = clock()
        generated = sum(len(own.step()) for _ in range(case.steps))
        seconds = clock() - start
        if (begun, generated) != (case.count, case.count * case.steps):
            raise RuntimeError(f"vLLM generated {begun} and {generated} tokens")
        own.step()
        return seconds / case.steps * 1e3

    milliseconds: float = lm._scheduler.run(generate)  # noqa: SLF001
    return milliseconds


def stepped(lm: AsyncLM, case: Population, clock: Clock) -> float:
    """Milliseconds of a step of a population: a draw, new tokens, and resampling."""
    parents = np.random.default_rng(0).integers(0, case.count, (case.steps, case.count))

    async def run(prompt: list[int], first: list[int]) -> float:
        members = lm.population(prompt, case.count).extend(first)
        members = members.extend((await members.draw(seed=0)).token_ids)
        start = clock()
        for step in range(case.steps):
            members = members.extend((await members.draw(seed=step)).token_ids)
            if case.every and step % case.every == case.every - 1:
                members = members[np.sort(parents[step])]
        return (clock() - start) / case.steps * 1e3

    return asyncio.run(run(*cached_prompt(lm, case)))


def sampled(lm: AsyncLM, case: Population, clock: Clock) -> float:
    """Milliseconds of a step of a population whose tokens are drawn by one call."""

    async def run(prompt: list[int], first: list[int]) -> float:
        members = lm.population(prompt, case.count).extend(first)
        members = members.extend((await members.draw(seed=0)).token_ids)
        start = clock()
        await members.sample(case.steps, stop=(), seed=0)
        return (clock() - start) / case.steps * 1e3

    return asyncio.run(run(*cached_prompt(lm, case)))


def in_coroutines(lm: AsyncLM, case: Population, clock: Clock) -> float:
    """Milliseconds of a step of contexts, each with a coroutine that requests its row."""

    async def run(prompt: list[int], first: list[int]) -> float:
        parent = lm.context(prompt)
        contexts = [parent.extend(token_id) for token_id in first]
        start = 0.0
        for step in range(case.steps + 1):
            if step == 1:
                start = clock()
            rows = await asyncio.gather(*(each.next_token_logprobs() for each in contexts))
            uniforms = [(i + 0.5) / case.count for i in range(case.count)]
            tokens = draw_tokens(torch.stack(rows), [1.0] * case.count, uniforms).tolist()
            contexts = [
                each.extend(token) for each, token in zip(contexts, tokens, strict=True)
            ]
        return (clock() - start) / case.steps * 1e3

    return asyncio.run(run(*cached_prompt(lm, case)))


LINES: dict[str, Callable[[Line], None]] = {
    "trie": trie,
    "draws": draws,
    "particles-1b": functools.partial(particles, shape="1b", way="graph"),
    "population": populations,
    "concurrent": concurrent,
    "constraints": constraints,
    "outside": outside,
    "beams": beams,
    "scores": scores,
    "peer": published,
    "particles-8b": functools.partial(particles, shape="8b", way="graph"),
    "compile": functools.partial(particles, shape="1b", way="compile", cases=slice(1)),
    "vllm": functools.partial(vllm, name="vllm"),
    "vllm-first": functools.partial(vllm, name="vllm-first"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("line", choices=LINES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = 1 if options.tiny else options.rounds
    line = Line(options.device, options.tiny, rounds)
    LINES[options.line](line)
    for row, figures in line.samples.items():
        print(f"{row:50} {statistics.median(figures):12.3f} ms")
    print(line.report())


if __name__ == "__main__":
    main()
