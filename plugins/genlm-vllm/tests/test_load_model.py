"""End to end: `genlm.load_model(..., backend="vllm")`, many callers, cancellation, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import genlm
from genlm_vllm.conformance import TinyLlama
from genlm_vllm.engine import VLLMEngine

from .traffic import largest_error, prompts

OPTIONS = {"kv_cache_memory_bytes": 2**24, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture
def lm(tiny: TinyLlama) -> Iterator[genlm.AsyncLM]:
    cache = genlm.OutputCache(0)
    with genlm.load_model(tiny.path, "vllm", engine_opts=OPTIONS, output_cache=cache) as lm:
        yield lm


def test_concurrent_requests_equal_unbatched_forward_passes(lm: Any, tiny: Any) -> None:
    sequences = prompts(*range(1, 40), 200, 255)

    async def request() -> list[Any]:
        return await asyncio.gather(*map(lm.next_token_logprobs, sequences))

    assert largest_error(tiny, asyncio.run(request()), sequences) <= 1e-4
    assert lm.statistics().batches > 10  # four at a time


def test_cancelled_callers_do_not_affect_others(lm: Any, tiny: Any) -> None:
    sequences = prompts(200, 5, 250, 33, 90, 7)

    async def request() -> list[Any]:
        tasks = [asyncio.ensure_future(lm.next_token_logprobs(ids)) for ids in sequences]
        draws = [asyncio.ensure_future(lm.sample(ids, 30)) for ids in sequences[:3]]
        while lm.statistics().engine["steps"] < 3:
            await asyncio.sleep(0)
        for task in (*tasks[::2], *draws[1:]):
            task.cancel()
        await asyncio.gather(*tasks[::2], *draws, return_exceptions=True)
        return await asyncio.gather(*tasks[1::2])

    assert largest_error(tiny, asyncio.run(request()), sequences[1::2]) <= 1e-4
    assert lm.statistics().pending == 0


def test_threads_and_loops_share_the_engine(lm: Any, tiny: Any) -> None:
    sequences = prompts(30, 4, 70, 100)
    results: dict[int, Any] = {}

    def request(place: int) -> None:
        results[place] = lm.next_token_logprobs_sync(sequences[place])

    threads = [threading.Thread(target=request, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert largest_error(tiny, [results[place] for place in range(4)], sequences) <= 1e-4


def test_closing_in_the_middle_ends_every_request(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = genlm.load_model(tiny.path, "vllm", engine_opts=OPTIONS)
    sequences = prompts(*[150] * 12)
    engine: Any = lm.engine
    step, begun = engine.step, threading.Event()

    def wait_for_close() -> Any:
        """Step, and let the fifth step wait until the model is closed."""
        if engine.statistics()["steps"] >= 4:
            begun.set()
            while not lm._scheduler.closed:
                time.sleep(0.001)
        return step()

    engine.step = wait_for_close

    async def request() -> list[Any]:
        tasks = [asyncio.ensure_future(lm.next_token_logprobs(ids)) for ids in sequences]
        tasks += [asyncio.ensure_future(lm.sample(ids, 60)) for ids in sequences]
        assert await asyncio.to_thread(begun.wait, 60)
        closing = asyncio.ensure_future(asyncio.to_thread(lm.close))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await closing
        return list(results)

    ended = [result for result in asyncio.run(request()) if isinstance(result, Exception)]
    assert ended
    assert all(isinstance(error, genlm.EngineClosedError) for error in ended)
    with pytest.raises(genlm.EngineClosedError):
        lm.next_token_logprobs_sync([5])
    # The process may have another engine.
    capsys.readouterr()
    with genlm.load_model(tiny.path, "vllm", engine_opts=OPTIONS, progress=True) as other:
        assert "genlm: starting vLLM" in capsys.readouterr().err
        row = other.next_token_logprobs_sync(sequences[0])
    assert largest_error(tiny, [row], sequences[:1]) <= 1e-4


def test_an_adapter_is_replaced_if_there_is_no_room_for_another(tiny: TinyLlama) -> None:
    options = OPTIONS | {"enable_lora": True, "max_loras": 1}
    cache = genlm.OutputCache(0)
    [ids] = prompts(40)
    with genlm.load_model(tiny.path, "vllm", engine_opts=options, output_cache=cache) as lm:
        for adapter in ("red", "blue"):
            lm.load_lora(tiny.adapters[adapter], "only", replace=True)
            row = lm.next_token_logprobs_sync(ids, lora_name="only")
            assert largest_error(tiny, [row], [ids], adapter) <= 1e-4
        with pytest.raises(genlm.AdapterLimitError, match="1 adapters are loaded"):
            lm.load_lora(tiny.adapters["red"], "other")


def test_batches_are_as_large_as_those_of_vllms_own_llm(tiny: TinyLlama) -> None:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    tokens, requests = EngineArgs.get_batch_defaults(1)
    engine = VLLMEngine(tiny.path, engine_opts={"kv_cache_memory_bytes": 2**24})
    try:
        scheduler = engine.llm_engine.vllm_config.scheduler_config
        assert scheduler.max_num_seqs == requests[UsageContext.LLM_CLASS]
        assert scheduler.max_num_batched_tokens == tokens[UsageContext.LLM_CLASS]
        assert UsageContext.ENGINE_CONTEXT not in requests  # the context of a bare LLMEngine
    finally:
        engine.close()
