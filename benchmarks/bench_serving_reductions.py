"""How much time do reductions and scores save on the serving engines?

The limit is the model: its forward pass and logits are computed for every request,
and a draw needs one pass over its row. Reductions save the transfer of the row:
vLLM computes in a separate process, as it does with one GPU, and rows arrive through a
socket; SGLang's models run in this process, and rows are copied out of the batch.

*Particles*: one step of 50 contexts that stay in the engine, each longer by a token:

- rows: `llm.next_token_logprobs`, which moves 4 bytes for each id of the vocabulary;
- rows and draws: the same, and the draws computed from them by the caller, all at once;
- draws: `llm.draw` under masks of half of the vocabulary, with the same seeds;
- own greedy step, vLLM only: a step in which vLLM generates a token of each of 50
  requests, greedily, from the time of 32 such steps. Its time outside the model is that of
  vLLM's scheduler, processes and sampler, which rows and draws include.

*Texts*: all log-probabilities of 16 texts of 200 tokens:

- own: vLLM's `prompt_logprobs=0` and SGLang's `input_token_logprobs`, as their users get them;
- batch_score: `llm.batch_score`;

and the same of the last 50 tokens of texts that share their first 150, which are in the prefix
cache. vLLM's own computes them again; SGLang's does not.

Time on vLLM is wall-clock time, because its processes spin while they wait. On SGLang it is the
CPU time of the process. Time outside the model is what remains without the model's forward pass
and logits, measured where the model is: in vLLM's worker a reduction of the benchmark's own
requests it. Bytes are those of rows and results that arrive, and of reductions that are sent;
with SGLang nothing is sent. Ratios are those of time outside the model for particles, and of
all time for texts, where logits are most of the work. Model: the particles' Llama of 8 layers x
512, random weights, float32. Run with the engine's environment: `.venv/bin/python
benchmarks/bench_serving_reductions.py vllm`, `.venv-sgl/bin/python
benchmarks/bench_serving_reductions.py sgl`.
"""

from __future__ import annotations

import abc
import argparse
import asyncio
import functools
import itertools
import os
import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from particle_model import save_model
from report import print_report

from genlm import AsyncLM, OutputCache, Reduction
from genlm.core.rows.masks import Mask
from genlm.core.rows.reductions import Draw
from genlm.core.rows.sampling import stream_uniform

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the processes share the cores

PARTICLES, PREFIX = 50, 64
TEXTS, LENGTH, SHARED = 16, 200, 150
OWN_STEPS = 32

Ids = tuple[int, ...]


_calls_s: list[float] = []
"""In the model's process: how long each call of the model took, once it is timed."""


@dataclass(frozen=True)
class ModelTime(Reduction):
    """Seconds in the model so far, without those of this request's own step."""

    is_cacheable = False

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[ModelTime]) -> Sequence[float]:
        del rows
        if not _calls_s:
            _time_model()
        return [sum(_calls_s[:-2]) for _ in requests]


def _time_model() -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM

    _calls_s.append(0.0)
    for name in ("forward", "compute_logits"):
        method = getattr(LlamaForCausalLM, name)
        setattr(LlamaForCausalLM, name, _timed(method, time.perf_counter))


def _timed(method: Callable[..., Any], clock: Callable[[], float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        start = clock()
        try:
            return method(*arguments, **options)
        finally:
            _calls_s.append(clock() - start)

    return timed


class Bench(abc.ABC):
    """One model in one engine, and the contestants that use it."""

    version: str

    def __init__(self, vocab_size: int, folder: Path) -> None:
        self.vocab_size = vocab_size
        self.engine: Any = None
        save_model(folder, vocab_size)

        def build() -> Any:
            self.engine = self._build(folder)
            return self.engine

        self.llm = AsyncLM(build, output_cache=OutputCache(0))
        self.generator = random.Random(0)
        self.names = itertools.count()
        self.contexts: list[Ids] = []
        self.masks = [self._mask(seed) for seed in range(PARTICLES)]
        self.bytes = 0

    @abc.abstractmethod
    def _build(self, folder: Path) -> Any:
        """Build the engine, with room for 64 requests."""

    @abc.abstractmethod
    def clock(self) -> float:
        """Seconds, as they are measured with this engine."""

    @abc.abstractmethod
    def model_s(self) -> float:
        """Seconds that the model has computed."""

    @abc.abstractmethod
    def own(self, engine: Any, texts: Sequence[Ids], start: int) -> list[list[float]]:
        """Score texts as users of the engine do, on its own thread."""

    def _mask(self, seed: int) -> Mask:
        allowed = np.random.default_rng(seed).random(self.vocab_size) < 0.5
        return Mask(allowed, self.vocab_size)

    def _random(self, length: int) -> Ids:
        return tuple(self.generator.randrange(self.vocab_size) for _ in range(length))

    # -- particles --------------------------------------------------------------------

    def begin(self) -> None:
        prefix = self._random(PREFIX)
        self.llm.pin_prefix(prefix)
        self.contexts = [(*prefix, *self._random(1)) for _ in range(PARTICLES)]
        asyncio.run(self._gather(self.llm.next_token_logprobs))

    def grow(self) -> None:
        self.contexts = [(*context, *self._random(1)) for context in self.contexts]

    async def _gather(self, ask: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        asked = zip(self.contexts, *columns, strict=True)
        return await asyncio.gather(*(ask(*each) for each in asked))

    def rows(self) -> list[torch.Tensor]:
        return asyncio.run(self._gather(self.llm.next_token_logprobs))

    def rows_and_draws(self) -> None:
        rows = torch.stack(self.rows())
        draws = [
            Draw(stream_uniform(seed, len(context)), mask=mask)
            for seed, (context, mask) in enumerate(zip(self.contexts, self.masks, strict=True))
        ]
        Draw.compute(rows, draws)

    def draws(self) -> None:
        async def ask(context: Ids, mask: Mask, seed: int) -> Any:
            return await self.llm.draw(context, mask, seed=seed)

        asyncio.run(self._gather(ask, self.masks, range(PARTICLES)))

    def others(self) -> list[tuple[str, Callable[[], None], int]]:
        """Further contestants: names, what they run, and its number of steps."""
        return []

    # -- texts ------------------------------------------------------------------------

    def texts(self, *, shared: bool) -> list[Ids]:
        if not shared:
            return [self._random(LENGTH) for _ in range(TEXTS)]
        prompt = self._random(SHARED)
        self.llm.pin_prefix(prompt)
        return [(*prompt, *self._random(LENGTH - SHARED)) for _ in range(TEXTS)]

    def batch_score(self, texts: Sequence[Ids], start: int) -> list[list[float]]:
        found = asyncio.run(self.llm.batch_score(texts, start))
        return [each.tolist() for each in found]

    def own_scores(self, texts: Sequence[Ids], start: int) -> list[list[float]]:
        return self.llm._scheduler.run(lambda engine: self.own(engine, texts, start))  # noqa: SLF001


class VllmBench(Bench):
    """vLLM with a worker in another process."""

    def _build(self, folder: Path) -> Any:
        import vllm

        from genlm_vllm.engine import VLLMEngine

        self.version = vllm.__version__
        self._count_bytes()
        options = {"max_num_seqs": 64, "kv_cache_memory_bytes": 2**28}
        return VLLMEngine(folder, engine_opts=options, multiprocess=True)

    def clock(self) -> float:
        return time.perf_counter()

    def model_s(self) -> float:
        found: float = self.llm.reduce_sync((5,), ModelTime())
        return found

    def _count_bytes(self) -> None:
        from genlm_vllm import workers

        call = workers.call_workers

        def counted(engine: Any, method: str, *arguments: Any) -> list[Any]:
            replies = call(engine, method, *arguments)
            if method == "genlm_collect":
                self.bytes += len(pickle.dumps((arguments, replies)))
            return replies

        workers.call_workers = counted

    def others(self) -> list[tuple[str, Callable[[], None], int]]:
        def generate() -> None:
            options = {"max_tokens": OWN_STEPS, "ignore_eos": True}
            self.llm._scheduler.run(  # noqa: SLF001
                lambda engine: self._generate(engine, self.contexts, options)
            )

        return [("own greedy step", generate, OWN_STEPS)]

    def _generate(
        self, engine: Any, prompts: Sequence[Ids], options: dict[str, Any]
    ) -> list[Any]:
        """Have vLLM by itself finish requests for all prompts, and return its outputs."""
        import vllm
        from vllm.inputs import tokens_input

        params = vllm.SamplingParams(temperature=0.0, detokenize=False, **options)
        names = [f"plain-{next(self.names)}" for _ in prompts]
        for name, ids in zip(names, prompts, strict=True):
            engine.llm_engine.add_request(name, tokens_input(list(ids)), params)
        found: dict[str, Any] = {}
        while len(found) < len(names):
            done = [output for output in engine.llm_engine.step() if output.finished]
            found |= {output.request_id: output for output in done}
        return [found[name] for name in names]

    def own(self, engine: Any, texts: Sequence[Ids], start: int) -> list[list[float]]:
        outputs = self._generate(engine, texts, {"max_tokens": 1, "prompt_logprobs": 0})
        return [
            [found.prompt_logprobs[i][ids[i]].logprob for i in range(start, len(ids))]
            for found, ids in zip(outputs, texts, strict=True)
        ]


class SglBench(Bench):
    """SGLang's models in this process; its own scores by its scheduler, in a child process."""

    _own_s = 0.0

    def _build(self, folder: Path) -> Any:
        from sgl_scheduler import OwnScheduler

        from genlm_sgl.engine import SGLEngine

        options = {"max_running_requests": 64, "max_total_tokens": 20_000}
        self._scheduler = OwnScheduler(folder, options)
        engine = SGLEngine(folder, engine_opts=options)
        model = type(engine.model)
        model.forward = _timed(model.forward, time.process_time)  # computes the logits, too
        self.version = str(engine.statistics()["sglang"])
        return engine

    def clock(self) -> float:
        return time.process_time() + self._own_s

    def model_s(self) -> float:
        return sum(_calls_s)

    def own(
        self,
        engine: Any,  # noqa: ARG002 - the scheduler is in another process
        texts: Sequence[Ids],
        start: int,
    ) -> list[list[float]]:
        scores, seconds = self._scheduler.score(texts, start)
        self._own_s += seconds
        return scores


BENCHES: dict[str, type[Bench]] = {"vllm": VllmBench, "sgl": SglBench}


class Samples:
    """Milliseconds of each contestant, all of it and outside the model, and bytes."""

    def __init__(self) -> None:
        self.total: dict[str, list[float]] = {}
        self.outside: dict[str, list[float]] = {}
        self.bytes: dict[str, list[float]] = {}

    def add(self, bench: Bench, name: str, run: Callable[[], Any], steps: int = 1) -> Any:
        model_s = bench.model_s()
        bench.bytes, start = 0, bench.clock()
        result = run()
        whole, moved = bench.clock() - start, bench.bytes
        model = bench.model_s() - model_s
        row = f"{bench.vocab_size} {name}"
        self.total.setdefault(row, []).append(whole / steps * 1e3)
        self.outside.setdefault(row, []).append((whole - model) / steps * 1e3)
        self.bytes.setdefault(row, []).append(moved)
        return result


def measure_particles(bench: Bench, rounds: int, samples: Samples) -> None:
    bench.begin()
    contestants: list[tuple[str, Callable[[], Any], int]] = [
        ("rows", bench.rows, 1),
        ("rows and draws", bench.rows_and_draws, 1),
        ("draws", bench.draws, 1),
    ]
    for number in range(rounds + 1):
        in_turn = contestants[number % 3 :] + contestants[: number % 3]
        for name, run, steps in in_turn:
            bench.grow()
            if number:  # the first round is a warm-up
                samples.add(bench, name, run, steps)
            else:
                run()
    bench.llm.clear_kv_cache()  # contexts that stay would take places from the requests
    for _ in range(rounds):
        for name, run, steps in bench.others():
            samples.add(bench, name, run, steps)


def measure_texts(bench: Bench, rounds: int, samples: Samples) -> None:
    for shared, start in ((False, 1), (True, SHARED)) if rounds else ():
        kind = "shared" if shared else "fresh"
        for number in range(rounds + 1):
            texts = bench.texts(shared=shared)
            pairs: list[tuple[str, Callable[..., Any]]] = [
                (f"{kind} own", bench.own_scores),
                (f"{kind} batch_score", bench.batch_score),
            ]
            pairs = pairs[:: 1 if number % 2 else -1]
            found = []
            for name, run in pairs:
                work = functools.partial(run, texts, start)
                found.append(samples.add(bench, name, work) if number else work())
                bench.llm.clear_kv_cache()  # the other one would find the texts there
                if shared:
                    bench.llm.pin_prefix(texts[0][:SHARED])
            error = np.abs(np.array(found[0]) - np.array(found[1])).max()
            assert error <= 1e-4, error


@contextmanager
def served(name: str, vocab_size: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        bench = BENCHES[name](vocab_size, Path(folder))
        try:
            yield bench
        finally:
            bench.llm.close()


def ratios(values: dict[str, list[float]]) -> dict[str, float]:
    """Medians over rounds of ratios within a round: to rows, and to the engine's own."""
    found = {}
    for row, own in values.items():
        size, *words = row.split()
        base = f"{words[0]} own" if words[0] in {"fresh", "shared"} else "rows"
        pairs = zip(values[f"{size} {base}"], own, strict=True)
        found[row] = round(statistics.median(b / a if a else 0.0 for a, b in pairs), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=BENCHES)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[8000, 128_000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--text-rounds", type=int, default=5, help="0: no texts")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    samples = Samples()
    for vocab_size in options.vocab_sizes:
        with served(options.engine, vocab_size) as bench:
            measure_particles(bench, options.rounds, samples)
            measure_texts(bench, options.text_rounds, samples)
            version = bench.version
    extra: dict[str, Any] = {
        "engine": options.engine,
        "particles": PARTICLES,
        "texts": [TEXTS, LENGTH, SHARED],
        options.engine: version,
        "outside_model_ms": {
            row: round(statistics.median(each), 2) for row, each in samples.outside.items()
        },
    }
    if any(any(each) for each in samples.bytes.values()):
        moved = {k: v for k, v in samples.bytes.items() if k.split()[1] in {"rows", "draws"}}
        extra["bytes_ratios"] = ratios(moved)
        extra["bytes"] = {k: int(statistics.median(v)) for k, v in samples.bytes.items()}
    outside = ratios(samples.outside)
    whole = ratios(samples.total)
    texts = {row for row in whole if row.split()[1] in {"fresh", "shared"}}
    print_report(
        "serving_reductions",
        samples.total,
        unit="ms",
        ratios={row: whole[row] if row in texts else outside[row] for row in whole},
        extra=extra,
    )


if __name__ == "__main__":
    main()
