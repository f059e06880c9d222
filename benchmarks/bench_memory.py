"""Does memory grow with the number of requests?

It must not: keys and values and the output cache have budgets in bytes, and no other state
of a request may remain. Each engine, in a separate process, computes 200,000 requests of a
population that grows, forks, restarts, repeats requests and cancels. After a quarter of
them, when all caches are full, the process's memory is sampled; growth is the median of the
last five samples less that of the first five. More than 4 MiB, 28 bytes a request, or a
budget exceeded once, is a failure.

Models are tiny, so that requests and not weights fill the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from report import print_report

from genlm import AsyncLM, Engine, OutputCache
from genlm.core.reference.engine import ReferenceEngine
from genlm_hf.engine import HFEngine

PARTICLES, SAMPLES, SEED = 50, 40, 5
RESTART_EVERY, RESAMPLE_EVERY = 24, 4
KV_BUDGET_BYTES = 2**20
CACHE_BYTES = 2**21
MOST_GROWTH_MIB = 4.0
SIZES = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}


def bytes_only() -> Any:
    """A tokenizer of one token for each byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, [])
    )
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe)


def hf(config: Any, path: str) -> Engine:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return HFEngine.from_model(
        model, bytes_only(), execution_path=path, kv_budget_bytes=KV_BUDGET_BYTES
    )


def packed() -> Engine:
    llama = transformers.LlamaConfig(
        **SIZES,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return hf(llama, "packed")


def slot_cache() -> Engine:
    return hf(
        transformers.GPTJConfig(**SIZES, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
        "slot_cache",
    )


def mlx() -> Engine:
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    from genlm_mlx.engine import MLXEngine

    mx.random.seed(0)
    settings = {"model_type": "llama", "rms_norm_eps": 1e-6, "vocab_size": 256}
    settings |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = Model(ModelArgs(**settings, num_attention_heads=4, num_key_value_heads=2))
    mx.eval(model.parameters())
    return MLXEngine.from_model(model, bytes_only(), kv_budget_bytes=KV_BUDGET_BYTES)


ENGINES: dict[str, Callable[[], Engine]] = {
    "hf packed": packed,
    "hf slot_cache": slot_cache,
    "mlx": mlx,
    "reference": lambda: ReferenceEngine("demo"),
}


class Program:
    """A population that never ends.

    Attributes:
        requests: How many were made.
    """

    def __init__(self, lm: AsyncLM) -> None:
        self._lm = lm
        self._random = random.Random(SEED)
        self._contexts: list[list[int]] = []
        self._steps = 0
        self.requests = 0

    async def step(self) -> None:
        """Continue all particles by a token; cancel a few requests, repeat a few."""
        repeated = self._random.choices(self._contexts or [self._tokens(3)], k=5)
        if self._steps % RESTART_EVERY == 0:
            self._contexts = [self._tokens(self._random.randrange(4, 20))] * PARTICLES
        self._contexts = [context + self._tokens(1) for context in self._contexts]
        if self._steps % RESAMPLE_EVERY == 0:
            self._contexts = self._random.choices(self._contexts, k=PARTICLES)
        asked = [*self._contexts, *repeated]
        tasks = [asyncio.ensure_future(self._lm.next_token_logprobs(ids)) for ids in asked]
        await asyncio.sleep(0)
        for task in self._random.choices(tasks, k=2):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._steps += 1
        self.requests += len(asked)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, self._lm.vocab_size) for _ in range(count)]


def resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def check_budgets(lm: AsyncLM) -> None:
    figures = lm.statistics()
    kept = int(figures.engine.get("kv_bytes_used", 0))
    if kept > KV_BUDGET_BYTES or figures.cache_bytes > CACHE_BYTES:
        raise SystemExit(f"a budget is exceeded: {kept} and {figures.cache_bytes} bytes")


def measure(name: str, requests: int) -> tuple[list[float], dict[str, Any]]:
    """Memory in MiB after every fortieth of the requests, and what was done."""
    samples: list[float] = []
    cache = OutputCache(10_000, max_bytes=CACHE_BYTES)
    with AsyncLM(ENGINES[name], output_cache=cache) as lm:

        async def run() -> None:
            program = Program(lm)
            for sample in range(1, SAMPLES + 1):
                while program.requests < requests * sample // SAMPLES:
                    await program.step()
                    check_budgets(lm)
                samples.append(resident_mib())

        asyncio.run(run())
        figures = lm.statistics()
        done = {
            "requests": figures.requests,
            "cache_hits": figures.cache_hits,
            "cache_bytes": figures.cache_bytes,
            **{k: v for k, v in figures.engine.items() if isinstance(v, int)},
        }
    return samples, done


def growth(samples: list[float]) -> float:
    settled = samples[SAMPLES // 4 :]
    return statistics.median(settled[-5:]) - statistics.median(settled[:5])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    samples, done = {}, {}
    for name in options.engines:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            found = process.submit(measure, name, options.requests).result()
        samples[name], done[name] = found[0][SAMPLES // 4 :], found[1]
        done[name]["growth_mib"] = round(growth(found[0]), 2)
        print(name, done[name])
    extra = {"seed": SEED, "kv_budget_bytes": KV_BUDGET_BYTES, "cache_bytes": CACHE_BYTES}
    print_report("memory", samples, unit="MiB resident", extra=extra | {"work": done})
    if any(work["growth_mib"] > MOST_GROWTH_MIB for work in done.values()):
        sys.exit("memory grows")


if __name__ == "__main__":
    main()
