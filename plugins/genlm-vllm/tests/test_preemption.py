"""Rows of requests that vLLM preempts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from genlm_vllm.conformance import TinyLlama

from .traffic import drawn, expected_draws, finish, largest_error, prompts, submit

BLOCK_BYTES = 2**15


@pytest.fixture(scope="module")
def engine(tiny: TinyLlama) -> Iterator[Any]:
    """An engine with ten blocks of 32 tokens, of which one context can need eight."""
    engine = tiny.engine(lora=False, kv_cache_memory_bytes=10 * BLOCK_BYTES)
    yield engine
    engine.close()


def test_preempted_continuations_draw_the_same_tokens(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    preempted = []

    def recorded(request: Any, *arguments: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *arguments, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", recorded)
    sequences = prompts(20, 60, 25, 33, 8)
    mixed = [submit(engine, ids) for ids in prompts(30, 40)]
    continuations = drawn(engine, sequences, 80, mixed)
    assert preempted
    assert continuations == [
        expected_draws(tiny, ids, 80, seed) for seed, ids in enumerate(sequences)
    ]


def test_more_contexts_than_the_cache_holds(engine: Any, tiny: Any) -> None:
    sequences = prompts(200, 240, 100, 255, 33, 180, 255)
    queries = [submit(engine, ids) for ids in sequences]
    assert largest_error(tiny, finish(engine, queries), sequences) <= 1e-4
