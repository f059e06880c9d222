"""How much faster are the execution paths of `genlm-hf` that use a cache?

A population of particles shares a prompt and grows by one token a step, every fourth
step continuing copies of some. Each path serves the same particles of the same model:

- padded: every context recomputed, no cache (the ratios' baseline);
- slot_cache: each token once, the past gathered for every particle at every step;
- packed: each token once, the shared past read once, if the model supports it;
- lockstep: the model's `[N, 1]` pass with transformers' DynamicCache, without a front end,
  which copies every past at every step like slot_cache.

Only decoding is timed, after a prefill; every round runs all of them. Models: 8
layers x 512, 8 heads, vocabulary 8,000, random weights, float32. OMP_NUM_THREADS sets
torch's threads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers
from bench_hf_particles import RESAMPLE_EVERY, genlm, lockstep
from particle_model import VOCAB_SIZE, llama, tokenizer
from particle_population import CLOCKS, Population
from report import print_report

from genlm import AsyncLM, ModelLoadError, OutputCache
from genlm_hf.engine import HFEngine

SIZES = {"vocab_size": VOCAB_SIZE, "n_layer": 8, "n_head": 8, "bos_token_id": 1}
PATHS = ("padded", "slot_cache", "packed")


def gptj() -> Any:
    return random_model(
        transformers.GPTJConfig(**SIZES, n_embd=512, rotary_dim=32, eos_token_id=2)
    )


def bloom() -> Any:
    return random_model(transformers.BloomConfig(**SIZES, hidden_size=512, eos_token_id=2))


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


MODELS: dict[str, Callable[[], Any]] = {"gptj": gptj, "bloom": bloom, "llama": llama}


def measure(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds a step of every model and path; how each compares with `padded`."""
    samples: dict[str, list[float]] = {}
    population = Population(options.particles, options.prompt, 0, RESAMPLE_EVERY, options.steps)
    clock = CLOCKS[options.clock]
    for name in options.models:
        model = MODELS[name]()
        engines = {path: lm for path in PATHS if (lm := served(model, path)) is not None}
        for _ in range(options.rounds):
            past = lockstep(model, population, clock, preallocated=False)
            samples.setdefault(f"{name} lockstep", []).append(past)
            for path, lm in engines.items():
                samples.setdefault(f"{name} {path}", []).append(genlm(lm, population, clock))
        for lm in engines.values():
            lm.close()
    return samples, {row: ratio(samples, row) for row in samples}


class Uncached(AsyncLM):
    """A front end for a path that keeps nothing."""

    def clear_kv_cache(self) -> None:
        """There is nothing to clear."""


def served(model: Any, path: str) -> AsyncLM | None:
    """The front end over an execution path, None if it cannot serve the model."""
    try:
        front_end = Uncached if path == "padded" else AsyncLM
        return front_end(
            lambda: HFEngine.from_model(model, tokenizer(), execution_path=path),
            output_cache=OutputCache(0),
        )
    except ModelLoadError as unsupported:
        print(unsupported)
        return None


def ratio(samples: dict[str, list[float]], row: str) -> float:
    """Speed as a multiple of the padded path's: median over rounds of ratios in a round."""
    base = samples[row.split(" ", 1)[0] + " padded"]
    ratios = sorted(b / v for b, v in zip(base, samples[row], strict=True))
    return ratios[len(ratios) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--particles", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    samples, ratios = measure(options)
    extra = {
        "particles": options.particles,
        "prompt": options.prompt,
        "steps": options.steps,
        "clock": options.clock,
    }
    print_report("hf_execution_paths", samples, unit="ms a step", ratios=ratios, extra=extra)


if __name__ == "__main__":
    main()
