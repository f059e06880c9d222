"""`examples/awrs_json.py` written for genlm-control, run by an interpreter with genlm-backend.

Reads `PARTICLES SEED` per line and prints seconds and the log-evidence of one run.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
import warnings
from itertools import pairwise

import numpy as np
import torch
from genlm.control import AWRS, SMC, JsonSchema, Potential, PromptedLLM

from genlm.backend import load_model_by_name

warnings.simplefilter("ignore")
MODEL = sys.argv[1]
PROMPT_IDS, SCHEMA, MAX_TOKENS = map(eval, sys.argv[2:])


class Ascending(Potential):
    """Whether each number of a list is larger than the one before."""

    async def prefix(self, context: list[int]) -> float:
        digits = re.findall(rb"\d", bytes(context))
        return 0.0 if all(a < b for a, b in pairwise(digits)) else -np.inf

    async def complete(self, context: list[int]) -> float:
        return await self.prefix(context)


async def run(llm: PromptedLLM, particles: int, seed: int) -> tuple[float, float]:
    np.random.seed(seed)
    torch.manual_seed(seed)
    llm.model.clear_cache()
    condition = JsonSchema(SCHEMA) * Ascending([*range(256)])
    condition = condition.coerce(llm, f=b"".join)
    begin = time.process_time()
    sampler = AWRS(llm, condition, seed=seed)
    found = await SMC(sampler)(n_particles=particles, ess_threshold=0.5, max_tokens=MAX_TOKENS)
    seconds = time.process_time() - begin
    await sampler.cleanup()
    return seconds, float(found.log_ml)


async def main() -> None:
    model = load_model_by_name(MODEL, backend="hf")
    llm = PromptedLLM(model, prompt_ids=PROMPT_IDS)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        particles, seed = map(int, line.split())
        print(*await run(llm, particles, seed), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
