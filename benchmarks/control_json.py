"""A genlm-control program that writes JSON, in a separate interpreter for `bench_control.py`.

The same lines run on the published genlm-backend and on this project's. Reads `SAMPLER
PARTICLES SEED` per line; prints the CPU time in milliseconds, the seconds, and the log-evidence
of one run. 0.3.1 runs on vLLM with the kernels of `vllm_second_runner.py`.
"""

# ruff: noqa: E402 - vLLM reads the environment when it is imported
from __future__ import annotations

import asyncio
import os
import sys
import time
import warnings
from importlib.metadata import version

OUTPUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs to the standard output

FOLDER, BACKEND, OPTIONS, PROMPT, SCHEMA, MAX_TOKENS = (
    sys.argv[1],
    sys.argv[2],
    *map(eval, sys.argv[3:]),
)

if BACKEND == "vllm" and version("genlm-backend").startswith("0."):
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that genlm-backend knows
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    import vllm_second_runner

    vllm_second_runner.install()

import numpy as np
import torch
from genlm.control import AWRS, SMC, JsonSchema, PromptedLLM, direct_token_sampler

from genlm.backend import load_model_by_name

warnings.simplefilter("ignore")


async def run(llm: PromptedLLM, kind: str, particles: int, seed: int) -> tuple[float, ...]:
    np.random.seed(seed)
    torch.manual_seed(seed)
    llm.model.clear_cache()
    if BACKEND == "vllm":
        await llm.model.release_all()
    schema = JsonSchema(SCHEMA).coerce(llm, f=b"".join)
    cpu, wall = time.process_time(), time.perf_counter()
    if kind == "awrs":
        sampler, critic = AWRS(llm, schema, seed=seed), None
    else:
        sampler, critic = direct_token_sampler(llm), schema
    smc = SMC(sampler, critic=critic)
    found = await smc(n_particles=particles, ess_threshold=0.5, max_tokens=MAX_TOKENS)
    figures = (time.process_time() - cpu) * 1e3, time.perf_counter() - wall, found.log_ml
    await sampler.cleanup()
    return tuple(map(float, figures))


async def main() -> None:
    model = load_model_by_name(FOLDER, backend=BACKEND, llm_opts=OPTIONS)
    llm = PromptedLLM(model, prompt_ids=model.tokenizer.encode(PROMPT))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        kind, particles, seed = line.split()
        figures = await run(llm, kind, int(particles), int(seed))
        print(*figures, file=OUTPUT, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
