"""What do reductions and scores save when vLLM computes in a process of its own?

The limit is the model: its forward pass and its logits have to be computed whatever is asked,
and a draw needs one pass over its row. What can be saved is everything that moves the row.

*Particles*: one step of 50 contexts that stay in vLLM, each longer by a token:

- rows: `llm.next_token_logprobs`, which moves 4 bytes for each id of the vocabulary;
- rows and draws: the same, and the draws computed from them by the caller, all at once;
- draws: `llm.draw` under masks of half of the vocabulary, with the same seeds.

*Texts*: all log-probabilities of 16 texts of 200 tokens:

- prompt_logprobs=0: vLLM's own, as its users get them;
- batch_score: `llm.batch_score`;

and the same of the last 50 tokens of texts that share their first 150, which are in the prefix
cache; vLLM's own computes them again.

Time is that of the clock: vLLM's processes spin while they wait, so their CPU time says
nothing. Time outside the model is what remains without the model's forward and logits, measured
in vLLM's worker: a reduction of the benchmark's own asks for it there. Bytes are those of rows
and results that arrive, and of reductions that are sent. Ratios are those of time outside the
model for particles, and of all time for texts, where logits are most of the work. Model: the
particles' Llama of 8 layers x 512, random weights, float32.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
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
import vllm
from particle_model import save_model
from report import print_report
from vllm.inputs import tokens_input

from genlm import AsyncLM, OutputCache, Reduction
from genlm.core.masks import Mask
from genlm.core.reductions import Draw
from genlm.core.sampling import stream_uniform
from genlm_vllm import requests
from genlm_vllm.engine import VLLMEngine

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the processes share the cores

PARTICLES, PREFIX = 50, 64
TEXTS, LENGTH, SHARED = 16, 200, 150

Ids = tuple[int, ...]


_calls_s: list[float] = []
"""In vLLM's worker: how long each call of the model took, once it is timed."""


@dataclass(frozen=True)
class ModelTime(Reduction):
    """Seconds in the model so far, without those of this request's own step."""

    is_reproducible = False

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
        setattr(LlamaForCausalLM, name, _timed(getattr(LlamaForCausalLM, name)))


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            _calls_s.append(time.perf_counter() - start)

    return timed


class Bench:
    """One model in a process of vLLM's own, and the contestants that use it."""

    def __init__(self, vocab_size: int, folder: Path) -> None:
        self.vocab_size = vocab_size
        self.engine: Any = None
        save_model(folder, vocab_size)

        def build() -> Any:
            options = {"max_num_seqs": 64, "kv_cache_memory_bytes": 2**28}
            self.engine = VLLMEngine(folder, engine_opts=options, multiprocess=True)
            return self.engine

        self.llm = AsyncLM(build, name="vllm", output_cache=OutputCache(0))
        self.vllm = self.engine.llm_engine
        self.generator = random.Random(0)
        self.names = itertools.count()
        self.contexts: list[Ids] = []
        self.masks = [self._mask(seed) for seed in range(PARTICLES)]
        self.bytes = 0
        self._count_bytes()

    def _mask(self, seed: int) -> Mask:
        allowed = np.random.default_rng(seed).random(self.vocab_size) < 0.5
        return Mask(allowed, self.vocab_size)

    def _random(self, length: int) -> Ids:
        return tuple(self.generator.randrange(self.vocab_size) for _ in range(length))

    def _count_bytes(self) -> None:
        call, pack = requests.call_workers, requests.pack_outputs

        def counted_call(engine: Any, method: str, *arguments: Any) -> list[Any]:
            replies = call(engine, method, *arguments)
            if method == "genlm_take_bytes":
                for _, rows, packed, scores, _ in replies:
                    values = [value for _, each in packed for value in each]
                    values += [part for _, each in scores for part in each]
                    self.bytes += len(rows) + sum(map(len, values))
            return replies

        def counted_pack(outputs: Any) -> Any:
            packed = pack(outputs)
            self.bytes += sum(len(each or b"") for each in packed)
            return packed

        requests.call_workers, requests.pack_outputs = counted_call, counted_pack

    def model_s(self) -> float:
        """Seconds that the model has computed."""
        found: float = self.llm.reduce_sync((5,), ModelTime())
        return found

    # -- particles --------------------------------------------------------------------

    def begin(self) -> None:
        prefix = self._random(PREFIX)
        self.llm.cache_kv(prefix)
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

    # -- texts ------------------------------------------------------------------------

    def texts(self, *, shared: bool) -> list[Ids]:
        if not shared:
            return [self._random(LENGTH) for _ in range(TEXTS)]
        prompt = self._random(SHARED)
        self.llm.cache_kv(prompt)
        return [(*prompt, *self._random(LENGTH - SHARED)) for _ in range(TEXTS)]

    def batch_score(self, texts: Sequence[Ids], start: int) -> list[list[float]]:
        found = asyncio.run(self.llm.batch_score(texts, start))
        return [each.tolist() for each in found]

    def prompt_logprobs(self, texts: Sequence[Ids], start: int) -> list[list[float]]:
        def work(_engine: Any) -> list[list[float]]:
            params = vllm.SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0
            )
            names = [f"plain-{next(self.names)}" for _ in texts]
            for name, ids in zip(names, texts, strict=True):
                self.vllm.add_request(name, tokens_input(list(ids)), params)
            found: dict[str, Any] = {}
            while len(found) < len(names):
                done = [output for output in self.vllm.step() if output.finished]
                found |= {output.request_id: output.prompt_logprobs for output in done}
            return [
                [found[name][place][ids[place]].logprob for place in range(start, len(ids))]
                for name, ids in zip(names, texts, strict=True)
            ]

        return self.llm._scheduler.run(work)  # noqa: SLF001 - the engine's own thread


class Samples:
    """Milliseconds of each contestant, all of it and outside the model, and bytes."""

    def __init__(self) -> None:
        self.total: dict[str, list[float]] = {}
        self.outside: dict[str, list[float]] = {}
        self.bytes: dict[str, list[float]] = {}

    def add(self, bench: Bench, name: str, run: Callable[[], Any]) -> Any:
        model_s = bench.model_s()
        bench.bytes, start = 0, time.perf_counter()
        result = run()
        whole, moved = time.perf_counter() - start, bench.bytes
        model = bench.model_s() - model_s
        row = f"{bench.vocab_size} {name}"
        self.total.setdefault(row, []).append(whole * 1e3)
        self.outside.setdefault(row, []).append((whole - model) * 1e3)
        self.bytes.setdefault(row, []).append(moved)
        return result


def measure_particles(bench: Bench, rounds: int, samples: Samples) -> None:
    bench.begin()
    contestants = [
        ("rows", bench.rows),
        ("rows and draws", bench.rows_and_draws),
        ("draws", bench.draws),
    ]
    for number in range(rounds + 1):
        for name, run in contestants[number % 3 :] + contestants[: number % 3]:
            bench.grow()
            if number:  # the first round is a warm-up
                samples.add(bench, name, run)
            else:
                run()


def measure_texts(bench: Bench, rounds: int, samples: Samples) -> None:
    for shared, start in ((False, 1), (True, SHARED)):
        kind = "shared" if shared else "fresh"
        for number in range(rounds + 1):
            texts = bench.texts(shared=shared)
            pairs: list[tuple[str, Callable[..., Any]]] = [
                (f"{kind} prompt_logprobs=0", bench.prompt_logprobs),
                (f"{kind} batch_score", bench.batch_score),
            ]
            pairs = pairs[:: 1 if number % 2 else -1]
            found = []
            for name, run in pairs:
                work = functools.partial(run, texts, start)
                found.append(samples.add(bench, name, work) if number else work())
                bench.llm.clear_kv_cache()  # the other one would find the texts there
                if shared:
                    bench.llm.cache_kv(texts[0][:SHARED])
            error = np.abs(np.array(found[0]) - np.array(found[1])).max()
            assert error <= 1e-4, error


@contextmanager
def served(vocab_size: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(vocab_size, Path(folder))
        try:
            yield bench
        finally:
            bench.llm.close()


def ratios(values: dict[str, list[float]]) -> dict[str, float]:
    """Medians over rounds of ratios within a round: to rows, and to prompt_logprobs=0."""
    found = {}
    for row, own in values.items():
        size, *words = row.split()
        base = "rows" if words[0] in {"rows", "draws"} else f"{words[0]} prompt_logprobs=0"
        pairs = zip(values[f"{size} {base}"], own, strict=True)
        found[row] = round(statistics.median(b / a if a else 0.0 for a, b in pairs), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[8000, 128_000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--text-rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    samples = Samples()
    for vocab_size in options.vocab_sizes:
        with served(vocab_size) as bench:
            measure_particles(bench, options.rounds, samples)
            measure_texts(bench, options.text_rounds, samples)
    extra = {
        "particles": PARTICLES,
        "texts": [TEXTS, LENGTH, SHARED],
        "vllm": vllm.__version__,
        "outside_model_ms": {
            row: round(statistics.median(each), 2) for row, each in samples.outside.items()
        },
        "bytes_ratios": ratios(
            {k: v for k, v in samples.bytes.items() if "score" not in k and "prompt" not in k}
        ),
        "bytes": {row: int(statistics.median(each)) for row, each in samples.bytes.items()},
    }
    outside = ratios(samples.outside)
    whole = ratios(samples.total)
    particles = {row for row in whole if row.split()[1] in {"rows", "draws"}}
    print_report(
        "vllm_reductions",
        samples.total,
        unit="ms",
        ratios={row: outside[row] if row in particles else whole[row] for row in whole},
        extra=extra,
    )


if __name__ == "__main__":
    main()
