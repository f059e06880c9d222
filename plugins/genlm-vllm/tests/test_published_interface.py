"""`AsyncVirtualLM` of genlm-backend on vLLM, in this process as published."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from .traffic import largest_error

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 48,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**24,
}


def test_a_published_model_gives_the_unbatched_rows(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = pytest.importorskip("genlm.backend")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    sequences = [(3, 4, 5), (3, 4, 5, 6), (200,)]
    with backend.AsyncVirtualLM.from_name(
        str(tiny.path), engine_opts=OPTIONS, cache_size=2
    ) as llm:
        rows = asyncio.run(llm.batch_next_token_logprobs(sequences))
        again = llm.next_token_logprobs_sync(sequences[2])
        assert largest_error(tiny, list(rows), sequences) <= 1e-4
        assert torch.equal(again, rows[2])
        assert (llm.statistics().cache_hits, len(llm.cache)) == (1, 2)
        asyncio.run(llm.release_all())
        drawn = asyncio.run(llm.batch_sample([[3, 4]] * 8, 4, [], seed=1))
        assert len({tuple(tokens) for tokens in drawn}) > 1
        assert type(llm.underlying_model).__name__ == "LlamaForCausalLM"
