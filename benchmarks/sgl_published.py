"""genlm-backend 0.3.1 on SGLang 0.5.17, measured by its own interpreter.

For `bench_serving_particles.py`: the argument is a model; reads `COUNT PROMPT STEPS KIND` per
line and prints microseconds of CPU and of wall-clock time a token, for its particles and for
SGLang's own generation at temperature 1. The loop is that of the benchmark's lists. Runs in an
environment with genlm-backend 0.3.1 and sglang 0.5.17, both without their requirements, with
the packages of genlm-sgl's `requirements-cpu.txt`, transformers 5.12.1, xgrammar 0.2.1, numba,
accelerate and protobuf. `genlm_sgl/cpu/stubs.py` is loaded from this repository.
"""

# ruff: noqa: E402 - SGLang reads the environment when it is imported
from __future__ import annotations

import asyncio
import atexit
import importlib.util
import os
import random
import sys
import time
import uuid
import warnings
from array import array
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

OUTPUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # SGLang logs to the standard output

import numpy as np
import torch
from transformers.utils import import_utils

warnings.simplefilter("ignore")


def provide_stubs() -> None:
    """Provide stubs for the packages of a GPU that SGLang imports, as genlm-sgl does."""
    source = (
        Path(__file__).resolve().parents[1] / "plugins/genlm-sgl/src/genlm_sgl/cpu/stubs.py"
    )
    spec = importlib.util.spec_from_file_location("stubs", source)
    assert spec is not None
    assert spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    context = stubs.stub_packages()
    context.__enter__()
    atexit.register(context.__exit__, None, None, None)
    # SGLang 0.5.17 registers image processors, which transformers lacks without torchvision.
    attribute_of = import_utils.DummyObject.__getattribute__
    import_utils.DummyObject.__getattribute__ = lambda cls, name: (
        (lambda *_, **__: None) if name == "register" else attribute_of(cls, name)
    )


provide_stubs()

from sglang.srt.sampling.sampling_params import SamplingParams

from genlm.backend.llm.sgl import AsyncSGLTransformer, Request

OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "max_total_tokens": 65_536,
    "max_running_requests": 256,
    "skip_server_warmup": True,
    "log_level": "error",
    "random_seed": 0,
}
RESAMPLE_EVERY = 4


def clock() -> np.ndarray[Any, Any]:
    return np.array([time.process_time(), time.perf_counter()])


class Bench:
    """One engine of genlm-backend."""

    def __init__(self, folder: str) -> None:
        self._lm = AsyncSGLTransformer.from_name(folder, engine_opts=OPTIONS)
        self._generator = random.Random(0)
        self._torch_generator = torch.Generator().manual_seed(0)

    def _starts(self, count: int, length: int) -> list[list[int]]:
        size = len(self._lm.byte_vocab)
        prompt = [self._generator.randrange(1, size) for _ in range(length)]
        return [[*prompt, token] for token in self._generator.sample(range(size), count)]

    async def particles(self, count: int, length: int, steps: int, kind: str) -> Any:
        """Seconds of particles that share a prompt, which is computed before."""
        contexts = self._starts(count, length)
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
        self._lm._task.cancel()  # noqa: SLF001 - belongs to this event loop
        return seconds

    def own(self, count: int, length: int, steps: int) -> Any:
        """Seconds of SGLang's generation of as many tokens, driven by its scheduler."""
        prompts = self._starts(count, length)
        self._lm.next_token_logprobs_sync(prompts[0][:-1])
        scheduler = self._lm.model
        begin = clock()
        scheduler.process_input_requests([_request(prompt, steps) for prompt in prompts])
        stream = scheduler.device_module.StreamContext(scheduler.schedule_stream)
        with stream, torch.inference_mode():
            while True:
                plan = scheduler.get_next_batch_to_run(
                    running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
                )
                scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
                scheduler.last_batch = batch
                if batch is None:
                    break
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        return clock() - begin


def _request(prompt: list[int], steps: int) -> Any:
    params = SamplingParams(max_new_tokens=steps, temperature=1.0, ignore_eos=True)
    params.normalize(None)
    absent = ("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
    return Request(
        **dict.fromkeys(absent),
        input_text="",
        input_ids=array("q", prompt),
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=False,
        rid=uuid.uuid4().hex,
    )


def main() -> None:
    torch.set_num_threads(1)
    bench = Bench(sys.argv[1])
    for line in sys.stdin:
        *sizes, kind = line.split()
        count, length, steps = map(int, sizes)
        bench._lm.clear_kv_cache()  # noqa: SLF001
        particles = asyncio.run(bench.particles(count, length, steps, kind))
        bench._lm.clear_kv_cache()  # noqa: SLF001
        seconds = [*particles, *bench.own(count, length, steps)]
        print(*(each / count / steps * 1e6 for each in seconds), file=OUTPUT, flush=True)


if __name__ == "__main__":
    main()
