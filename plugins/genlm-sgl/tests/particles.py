"""The tiny model with adapters for tests of populations."""

from __future__ import annotations

import gc
from typing import Any

import genlm
from genlm.testing.shared_engine import SharedEngine
from genlm_sgl.conformance import TinyLlama


def served(tiny: TinyLlama, **options: Any) -> genlm.AsyncLM:
    """Load the model with both adapters; populations of two members are group queries."""
    SharedEngine.close_current()
    options = {"max_total_tokens": 4096, "enable_lora": True, "max_lora_rank": 8, **options}

    def build() -> Any:
        engine = tiny.engine(options)
        engine.smallest_group = 2
        return engine

    llm = genlm.AsyncLM(build, output_cache=genlm.OutputCache(0))
    for name, path in tiny.adapters.items():
        llm.load_lora(path, name)
    return llm


def slots_used(llm: genlm.AsyncLM) -> int:
    """Return the number of used slots of the KV cache after it is cleared."""
    gc.collect()
    llm.clear_kv_cache()
    used = llm.statistics().engine["kv_tokens"]
    assert isinstance(used, int)
    return used
