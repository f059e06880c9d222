"""Populations of the tiny model with adapters, their rows, and what is free without them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import genlm
from genlm_sgl.conformance import TinyLlama
from genlm_sgl.exclusive import ExclusiveEngine

PROMPT = [5, 6, 7, 8] * 10

TOLERANCE = 1e-4
"""With adapters; without, the largest error is 3e-6."""


def served(tiny: TinyLlama, **options: Any) -> genlm.AsyncLM:
    """The model with both adapters."""
    if ExclusiveEngine.active is not None:
        ExclusiveEngine.active.suspend()
    options = {"max_total_tokens": 4096, "enable_lora": True, "max_lora_rank": 8, **options}
    llm = genlm.AsyncLM(lambda: tiny.engine(options), output_cache=genlm.OutputCache(0))
    for name, path in tiny.adapters.items():
        llm.load_lora(path, name)
    return llm


def free_of(llm: genlm.AsyncLM) -> tuple[int, int]:
    """Free slots and rows, once nothing is kept."""
    gc.collect()
    llm.clear_kv_cache()
    engine: Any = llm.engine
    assert engine._populations.slots_used == 0
    assert engine.statistics()["contexts_resident"] == 0
    return engine.free_tokens, engine._api._scheduler.req_to_token_pool.available_size()


def figures(llm: genlm.AsyncLM, *names: str) -> Callable[[], tuple[int, ...]]:
    """A function: by how much statistics have grown since."""
    engine: Any = llm.engine
    before = engine.statistics()
    return lambda: tuple(engine.statistics()[name] - before[name] for name in names)


def check(
    tiny: TinyLlama, population: genlm.Population, rows: torch.Tensor, adapter: Any = None
) -> None:
    """Compare rows with an unbatched forward pass."""
    known: dict[tuple[int, ...], torch.Tensor] = {}
    for context, row in zip(population, rows, strict=True):
        ids = tuple(context.token_ids)
        if ids not in known:
            known[ids] = tiny.logprobs(ids, adapter)
        assert float((row - known[ids]).abs().max()) <= TOLERANCE
