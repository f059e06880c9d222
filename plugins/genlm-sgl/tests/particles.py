"""The tiny model with adapters, and what is free when no population is kept."""

from __future__ import annotations

import gc
from typing import Any

import genlm
from genlm_sgl.conformance import TinyLlama
from genlm_sgl.exclusive import ExclusiveEngine


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
