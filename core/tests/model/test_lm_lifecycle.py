"""A model ends once, tells everybody who waits, and answers nothing afterwards."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm.core.base.errors import EngineClosedError, EngineDiedError, QueryResetError
from genlm.core.engine.engine import Capability
from genlm.core.model.lm import AsyncLM
from genlm.core.rows.group_reductions import Rows

VOCAB_SIZE = 16
MakeModel = Callable[..., AsyncLM]


class FullEngine(ScriptedEngine):
    """Declares everything, so that every method gets as far as the engine."""

    capabilities = frozenset({Capability.LORA, Capability.PREFIX_CACHE})

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.closings = 0

    def close(self) -> None:
        self.closings += 1
        super().close()


REQUESTS: dict[str, Callable[[AsyncLM], Any]] = {
    "row": lambda llm: asyncio.run(llm.next_token_logprobs([1])),
    "uncached": lambda llm: asyncio.run(llm.next_token_logprobs([1], use_cache=False)),
    "batch": lambda llm: asyncio.run(llm.batch_next_token_logprobs([[1], [2]])),
    "sync": lambda llm: llm.next_token_logprobs_sync([1]),
    "batch_sync": lambda llm: llm.batch_next_token_logprobs_sync([[1], [2]]),
    "sample": lambda llm: asyncio.run(llm.sample([1], 2)),
    "sample_none": lambda llm: asyncio.run(llm.sample([1], 0)),
    "stream_none": lambda llm: asyncio.run(anext(llm.stream([1], 0))),
    "score_none": lambda llm: asyncio.run(llm.score([1])),
    "reduce_none": lambda llm: llm.reduce_text_sync([1], Rows()),
    "empty_batch": lambda llm: asyncio.run(llm.batch_next_token_logprobs([])),
    "empty_batch_sync": lambda llm: llm.batch_next_token_logprobs_sync([]),
    "empty_samples": lambda llm: llm.batch_sample_sync([], 3),
    "empty_scores": lambda llm: llm.batch_score_sync([]),
    "empty_draws": lambda llm: llm.batch_draw_sync([]),
    "no_members": lambda llm: llm.population([1], 0).draw_sync(),
    "no_rows": lambda llm: llm.population([1], 0).next_token_logprobs_sync(),
    "finished": lambda llm: llm.population([1], 1).finish([True]).draw_sync(),
    "no_tokens": lambda llm: llm.population([1], 1).sample_sync(0),
    "with": lambda llm: llm.__enter__(),
    "async_with": lambda llm: asyncio.run(llm.__aenter__()),
    "load_lora": lambda llm: llm.load_lora("folder", "a"),
    "pin_prefix": lambda llm: llm.pin_prefix([1]),
    "clear_kv_cache": lambda llm: llm.clear_kv_cache(),
}


@pytest.mark.parametrize("ask", REQUESTS.values(), ids=REQUESTS)
def test_after_close_every_request_is_refused_though_it_was_answered_before(
    make_model: MakeModel, ask: Callable[[AsyncLM], Any]
) -> None:
    llm = make_model(FullEngine())
    llm.batch_next_token_logprobs_sync([[1], [2]])
    llm.load_lora("folder", "a")
    llm.close()
    with pytest.raises(EngineClosedError, match="load the model again"):
        ask(llm)


def test_closing_twice_closes_the_engine_once(make_model: MakeModel) -> None:
    engine = FullEngine()
    llm = make_model(engine)
    llm.close()
    llm.close()
    llm.cancel_all()
    assert engine.closings == 1


def test_a_closed_model_still_knows_its_vocabulary_and_figures(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    llm.next_token_logprobs_sync([1])
    llm.close()
    assert llm.vocab_size == len(llm.byte_vocab) == len(llm.str_vocab) == VOCAB_SIZE
    statistics = llm.statistics()
    assert (statistics.requests, statistics.answered) == (1, 1)
    assert (statistics.cache_entries, statistics.cache_bytes) == (0, 0)


def test_a_model_says_what_it_is() -> None:
    llm = AsyncLM(lambda: ScriptedEngine(max_context=9), name="scripted")
    llm.load_lora("folder", "red")
    described = "<AsyncLM 'scripted': 16 token ids, context of 9 tokens; rows, lora"
    assert repr(llm) == f"{described}>"
    assert repr(llm.with_lora("red")) == f"{described}; lora 'red'>"
    llm.close()
    assert repr(llm) == f"{described}; closed>"
    with AsyncLM(ScriptedEngine) as other:
        assert "context of any length" in repr(other)
        assert repr(other._scheduler).startswith("<Scheduler of ")
    assert repr(other._scheduler) == "<Scheduler; closed>"


def test_a_context_manager_closes_the_model() -> None:
    engine = FullEngine()
    with AsyncLM(lambda: engine) as llm:
        row = llm.next_token_logprobs_sync([1])
    assert torch.equal(row, oracle_row([1], None, VOCAB_SIZE))
    assert engine.closings == 1


def test_an_async_context_manager_closes_the_model_also_after_an_error() -> None:
    engine = FullEngine()

    async def main() -> None:
        async with AsyncLM(lambda: engine) as llm:
            await llm.next_token_logprobs([1])
            raise KeyError("the caller's own")

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert engine.closings == 1


def test_closing_ends_requests_in_the_engine_and_behind_it(make_model: MakeModel) -> None:
    engine = FullEngine()
    llm = make_model(engine)

    async def main() -> list[Any]:
        engine.hold()
        first = asyncio.create_task(llm.next_token_logprobs([1]))
        await asyncio.to_thread(engine.wait_until_entered)
        second = asyncio.create_task(llm.batch_next_token_logprobs([[2], [3]]))
        third = asyncio.create_task(llm.sample([4], 3))
        async with asyncio.timeout(TIMEOUT_S):
            while llm.statistics().pending < 4:
                await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(llm.close))
        errors = await asyncio.gather(first, second, third, return_exceptions=True)
        assert not closing.done()  # it waits for the step, the callers do not
        engine.release()
        await closing
        return errors

    assert [type(error) for error in asyncio.run(main())] == [EngineClosedError] * 3
    assert engine.closings == 1


def test_a_reset_ends_all_requests_and_the_model_works_on(make_model: MakeModel) -> None:
    engine = FullEngine()
    llm = make_model(engine)

    async def main() -> list[Any]:
        engine.hold()
        tasks = [asyncio.create_task(llm.next_token_logprobs([1]))]
        await asyncio.to_thread(engine.wait_until_entered)
        tasks += [
            asyncio.create_task(llm.next_token_logprobs([1])),
            asyncio.create_task(llm.next_token_logprobs([2])),
        ]
        async with asyncio.timeout(TIMEOUT_S):
            while llm.statistics().pending < 2 or not llm.statistics().joined:
                await asyncio.sleep(0)
        llm.cancel_all()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        engine.release()
        rows = await llm.batch_next_token_logprobs([[1], [2]])
        assert torch.equal(rows[0], oracle_row([1], None, VOCAB_SIZE))
        assert torch.equal(rows[1], oracle_row([2], None, VOCAB_SIZE))
        return errors

    assert [type(error) for error in asyncio.run(main())] == [QueryResetError] * 3


def thread_named(name: str) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == name), None)


def test_a_model_that_is_dropped_frees_its_engine() -> None:
    engine = FullEngine()
    llm = AsyncLM(lambda: engine, name="dropped")
    view = llm.with_lora(None)
    llm.next_token_logprobs_sync([1])
    thread = thread_named("genlm-dropped")
    assert thread is not None
    del llm
    gc.collect()
    assert torch.equal(view.next_token_logprobs_sync([2]), oracle_row([2], None, VOCAB_SIZE))
    del view
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert engine.closings == 1


class LeanEngine(ScriptedEngine):
    """Has no `close` of its own: what refers to it keeps its memory."""

    def close(self) -> None:
        """Nothing is freed."""

    def statistics(self) -> dict[str, int]:
        return {"steps": len(self.batches)}


def test_a_closed_model_does_not_refer_to_its_engine() -> None:
    llm = AsyncLM(LeanEngine)
    view = llm.with_lora(None)
    llm.next_token_logprobs_sync([1])
    engine = weakref.ref(llm.engine)
    llm.close()
    gc.collect()
    assert engine() is None
    for model in (llm, view):
        assert model.statistics().engine == {"steps": 1}
        with pytest.raises(EngineClosedError):
            _ = model.engine


def test_a_model_whose_thread_died_does_not_refer_to_its_engine() -> None:
    class Dying(LeanEngine):
        def evaluate(self, queries: Any) -> Any:
            raise SystemExit

    llm = AsyncLM(Dying, name="died")
    engine, thread = weakref.ref(llm.engine), thread_named("genlm-died")
    assert thread is not None
    with pytest.raises(EngineDiedError):
        llm.next_token_logprobs_sync([1])
    thread.join(TIMEOUT_S)
    gc.collect()
    assert engine() is None
    assert llm.statistics().engine == {"steps": 0}


def test_a_subclass_is_loaded_as_itself() -> None:
    class Own(AsyncLM):
        """A subclass with nothing of its own."""

    with Own.from_name("demo", "reference") as llm:
        assert type(llm) is Own
        assert type(llm.with_lora(None)) is Own
