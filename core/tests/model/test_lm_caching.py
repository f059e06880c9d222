"""`AsyncLM` answers from memory what it can, owns what it remembers, and counts it all."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm import BatchEngine, Query, Reduction, Token, TopTokens, Vocabulary
from genlm.core.base.errors import EvaluationError
from genlm.core.model.lm import AsyncLM
from genlm.core.rows import output_cache as cache
from genlm.core.rows.output_cache import OutputCache

VOCAB_SIZE = 16
ROW_BYTES = 4 * VOCAB_SIZE
MakeModel = Callable[..., AsyncLM]


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until a condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("cache_size", [0, 10])
def test_every_caller_owns_its_row_fresh_joined_or_cached(
    make_model: MakeModel, cache_size: int
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine, output_cache=OutputCache(cache_size))

    async def main() -> list[torch.Tensor]:
        engine.hold()
        callers = [asyncio.create_task(llm.next_token_logprobs([1])) for _ in range(3)]
        await asyncio.to_thread(engine.wait_until_entered)
        callers.append(asyncio.create_task(llm.next_token_logprobs([1], use_cache=False)))
        await until(lambda: llm.statistics().joined == 3)
        engine.release()
        return [*await asyncio.gather(*callers), await llm.next_token_logprobs([1])]

    rows = asyncio.run(main())
    for index, row in enumerate(rows):
        assert torch.equal(row, oracle_row([1], None, VOCAB_SIZE))
        assert row.untyped_storage().nbytes() == ROW_BYTES
        row.fill_(index)
    assert [row.tolist() for row in rows] == [[float(i)] * VOCAB_SIZE for i in range(len(rows))]


# -- cache and statistics -------------------------------------------------------------


def test_a_repeated_request_comes_from_the_cache_until_it_is_cleared(
    make_model: MakeModel,
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    for _ in range(3):
        llm.next_token_logprobs_sync([1, 2])
    assert len(engine.batches) == 1
    llm.clear_output_cache()
    assert llm.statistics().cache_entries == llm.statistics().cache_bytes == 0
    llm.next_token_logprobs_sync([1, 2])
    assert len(engine.batches) == 2


def test_cached_results_of_several_tensors_belong_to_the_caller(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE), output_cache=OutputCache(100))
    first = llm.batch_top_tokens_sync([[i] for i in range(9)], 5)
    again = llm.batch_top_tokens_sync([[i] for i in range(9)], 5)
    for computed, cached in zip(first, again, strict=True):
        torch.testing.assert_close(cached, computed)
        assert type(cached) is TopTokens
        for tensor, other in zip(cached, computed, strict=True):
            assert tensor.data_ptr() != other.data_ptr()
    assert llm.statistics().cache_hits == 9


def test_results_of_earlier_weights_are_computed_again(make_model: MakeModel) -> None:
    class TrainedEngine(ScriptedEngine):
        updates = 0

        def weights_version(self) -> int:
            return self.updates

    engine = TrainedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    llm.next_token_logprobs_sync([1, 2])
    llm.token_logprobs_sync([1], [3])
    engine.updates += 1
    assert llm.cached_logprobs([1, 2]) is None
    for _ in range(2):
        llm.batch_next_token_logprobs_sync([[1, 2], [3]])
    assert engine.batches[2:] == [[(1, 2), (3,)]]
    engine.updates += 1
    llm.token_logprobs_sync([3], [3])
    assert engine.batches[3:] == [[(3,)]]
    assert llm.cached_logprobs([1, 2]) is None
    llm.next_token_logprobs_sync([4])
    engine.updates += 1
    llm.batch_next_token_logprobs_sync([[4], [5]])  # a cached row and another one
    assert engine.batches[5:] == [[(4,), (5,)]]


def test_an_uncached_request_is_evaluated_and_remembered(make_model: MakeModel) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    for _ in range(2):
        asyncio.run(llm.next_token_logprobs([1], use_cache=False))
    assert len(engine.batches) == 2
    llm.next_token_logprobs_sync([1])
    assert len(engine.batches) == 2
    statistics = llm.statistics()
    assert (statistics.requests, statistics.tokens_requested, statistics.cache_hits) == (
        3,
        3,
        1,
    )


def test_a_number_of_rows_is_no_cache(make_model: MakeModel) -> None:
    with pytest.raises(TypeError, match=r"output_cache=1000; expected an OutputCache"):
        make_model(ScriptedEngine(VOCAB_SIZE), output_cache=1000)


def test_models_that_share_a_cache_keep_their_rows_apart(make_model: MakeModel) -> None:
    class OtherEngine(ScriptedEngine):
        def evaluate(self, queries: Any) -> torch.Tensor:
            return super().evaluate(queries).flip(-1)

    cache = OutputCache(10)
    first = make_model(ScriptedEngine(VOCAB_SIZE), output_cache=cache)
    second = make_model(OtherEngine(VOCAB_SIZE), output_cache=cache)
    for _ in range(2):
        assert torch.equal(first.next_token_logprobs_sync([1]), oracle_row([1], None, 16))
        assert torch.equal(
            second.next_token_logprobs_sync([1]), oracle_row([1], None, 16).flip(0)
        )
    assert len(cache) == 2


@pytest.mark.parametrize("ending", ["clear_output_cache", "close"])
def test_a_model_that_ends_leaves_the_rows_of_others_in_a_shared_cache(
    make_model: MakeModel, ending: str
) -> None:
    cache, engine = OutputCache(10), ScriptedEngine(VOCAB_SIZE)
    cache.put("somebody's own", torch.zeros(1))
    first = make_model(ScriptedEngine(VOCAB_SIZE), output_cache=cache)
    second = make_model(engine, output_cache=cache)
    for llm in (first, second):
        llm.next_token_logprobs_sync([1])
    getattr(first, ending)()
    assert len(cache) == 2
    second.next_token_logprobs_sync([1])
    assert engine.batches == [[(1,)]]


def test_statistics_say_what_was_asked_and_how_it_was_answered(make_model: MakeModel) -> None:
    class CountingEngine(ScriptedEngine):
        def statistics(self) -> dict[str, int]:
            return {"tokens_computed": 42}

    llm = make_model(CountingEngine(VOCAB_SIZE, poison=[7]))
    llm.batch_next_token_logprobs_sync([[1], [2, 3], [1], [4]])  # the second [1] joins
    asyncio.run(settled(llm, [[1], [2, 3], [5, 6, 8]]))  # two hits
    with pytest.raises(EvaluationError):
        llm.next_token_logprobs_sync([7, 7])
    statistics = llm.statistics()
    assert statistics.requests == 8
    assert statistics.cache_hits == 2
    assert statistics.joined == 1
    assert statistics.answered == 4
    assert statistics.failed == 1
    assert statistics.abandoned == statistics.pending == statistics.waiting == 0
    assert statistics.tokens_requested == 5 + 6 + 2
    assert statistics.cache_entries == 4
    assert statistics.cache_bytes == 4 * ROW_BYTES + 4 * 7  # of [1], [2, 3], [4], [5, 6, 8]
    assert sum(size * n for size, n in statistics.batch_sizes.items()) == 5
    assert sum(statistics.batch_sizes.values()) == statistics.batches
    assert statistics.mean_batch_size == 5 / statistics.batches
    assert statistics.largest_batch == 3
    assert statistics.dispatched == 5
    assert statistics.mean_queue_s == statistics.queue_seconds / 5 > 0
    assert statistics.cache_hit_ratio == 2 / 8
    assert statistics.joined_ratio == 1 / 8
    assert statistics.requests_per_s == pytest.approx(8 / statistics.seconds)
    assert statistics.engine == {"tokens_computed": 42}


def test_statistics_of_the_engine_are_a_copy_of_its_mapping(make_model: MakeModel) -> None:
    figures: Any = {"tokens_computed": 1}

    class CountingEngine(ScriptedEngine):
        def statistics(self) -> Any:
            return figures

    llm = make_model(CountingEngine(VOCAB_SIZE))
    for figures in ({"tokens_computed": 1}, MappingProxyType({"tokens_computed": 1})):
        before = llm.statistics()
        assert before.engine == {"tokens_computed": 1}
        before.engine["tokens_computed"] = 2  # type: ignore[index]
        assert figures == {"tokens_computed": 1}


@pytest.mark.parametrize("cache_size", [0, 5, 1000])
def test_statistics_add_up_exactly_whatever_threads_and_loops_ask(
    make_model: MakeModel, cache_size: int
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE, poison=[13])
    llm = make_model(engine, output_cache=OutputCache(cache_size))
    threads, rounds = 4, 40
    start = threading.Barrier(threads)

    def work(thread: int) -> int:
        generator = np.random.default_rng([thread])
        start.wait(TIMEOUT_S)
        tokens = 0
        for turn in range(rounds):
            sequences = [
                [int(token_id)] * (turn % 3 + 1) for token_id in generator.integers(0, 16, 5)
            ]
            tokens += sum(map(len, sequences))
            if turn % 2:
                rows = asyncio.run(settled(llm, sequences))
            else:
                rows = [sync_or_error(llm, sequence) for sequence in sequences]
            for row, sequence in zip(rows, sequences, strict=True):
                if 13 in sequence:
                    assert isinstance(row, EvaluationError)
                else:
                    assert isinstance(row, torch.Tensor)
                    assert torch.equal(row, oracle_row(sequence, None, VOCAB_SIZE))
        return tokens

    with ThreadPoolExecutor(threads) as pool:
        tokens_requested = sum(pool.map(work, range(threads)))
    statistics = llm.statistics()
    assert statistics.requests == threads * rounds * 5
    assert statistics.tokens_requested == tokens_requested
    assert (
        statistics.requests
        == statistics.cache_hits + statistics.joined + statistics.answered + statistics.failed
    )
    assert statistics.abandoned == statistics.pending == statistics.waiting == 0
    assert sum(n * count for n, count in statistics.batch_sizes.items()) == (
        statistics.answered + statistics.failed
    )
    assert (statistics.cache_hits > 0) == (cache_size > 0)


async def settled(llm: AsyncLM, sequences: Sequence[list[int]]) -> list[Any]:
    return await asyncio.gather(
        *map(llm.next_token_logprobs, sequences), return_exceptions=True
    )


def sync_or_error(llm: AsyncLM, sequence: list[int]) -> torch.Tensor | EvaluationError:
    try:
        return llm.next_token_logprobs_sync(sequence)
    except EvaluationError as error:
        return error


# -- where rows are touched -----------------------------------------------------------

LARGE = 20_000
"""Ids of a vocabulary of which one row is more than the event loop may copy."""


class WideEngine(BatchEngine):
    """Has rows that are too large to be touched on the event loop."""

    def __init__(self) -> None:
        tokens = [Token(i, i.to_bytes(2, "big")) for i in range(LARGE)]
        self.vocabulary = Vocabulary(None, tokens, [str(i) for i in range(LARGE)])
        self.evaluated: list[tuple[int, ...]] = []

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        self.evaluated += [query.token_ids for query in queries]
        rows = [
            torch.randn(LARGE, generator=torch.Generator().manual_seed(sum(query.token_ids)))
            for query in queries
        ]
        return torch.stack(rows).log_softmax(-1)


@dataclass(frozen=True)
class Where(Reduction):
    """The thread that reduces, and how many rows it reduces at once."""

    number: int = 0

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Where]) -> list[tuple[str, int]]:
        return [(threading.current_thread().name, len(requests))] * len(requests)


@dataclass(frozen=True)
class Raises(Reduction):
    """A reduction that raises an error."""

    kind: type[Exception]

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Raises]) -> list[Any]:
        raise requests[0].kind("refused")


KNOWN = [[i] for i in range(8)]


@pytest.fixture
def knowing(make_model: MakeModel) -> Iterator[AsyncLM]:
    """A model that has the rows of `KNOWN`, and that must not evaluate anything else."""
    engine = WideEngine()
    llm = make_model(engine)
    llm.batch_next_token_logprobs_sync(KNOWN)
    evaluated = engine.evaluated.copy()
    yield llm
    assert engine.evaluated == evaluated


def test_known_rows_cannot_be_copied_when_the_threads_of_the_loop_have_ended(
    knowing: AsyncLM,
) -> None:
    async def main() -> None:
        await asyncio.get_running_loop().shutdown_default_executor()
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(RuntimeError, match="shutdown"):
                await knowing.batch_next_token_logprobs(KNOWN)

    asyncio.run(main())


def test_known_rows_are_reduced_together_and_off_the_event_loop(knowing: AsyncLM) -> None:

    async def main() -> list[Any]:
        reductions = [Where(i) for i in range(8)]
        return [
            *await knowing.batch_reduce(KNOWN, reductions),
            await knowing.reduce([3], Where(99)),
        ]

    thread_name = threading.current_thread().name
    *batched, single = asyncio.run(main())
    assert {count for _, count in batched} == {8}
    assert single[1] == 1
    assert thread_name not in {name for name, _ in [*batched, single]}
    waited = knowing.batch_reduce_sync(KNOWN, [Where(100 + i) for i in range(8)])
    assert waited == [(thread_name, 8)] * 8  # a thread that waits anyway


def test_concurrent_reductions_of_known_rows_are_computed_together(knowing: AsyncLM) -> None:
    async def main() -> list[Any]:
        tasks = [
            asyncio.ensure_future(knowing.reduce(context, Where(i)))
            for i, context in enumerate(KNOWN)
        ]
        failing = [knowing.reduce([0], Raises(error)) for error in (KeyError, StopIteration)]
        outcomes = asyncio.gather(*failing, return_exceptions=True)
        await asyncio.sleep(0)  # all requests have begun
        tasks[3].cancel()
        async with asyncio.timeout(TIMEOUT_S):
            errors = await outcomes
            assert [type(error) for error in errors] == [EvaluationError] * 2
            return list(await asyncio.gather(*tasks[:3], *tasks[4:]))

    loops = [main() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(asyncio.run, loops):
            assert {count for _, count in found} == {8}
            assert len({name for name, _ in found}) == 1


def test_a_request_does_not_fail_with_others_of_its_batch(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_model(WideEngine())
    rows = llm.batch_next_token_logprobs_sync([[1], [2], [3]])

    def copied(row: torch.Tensor) -> torch.Tensor:
        if torch.equal(row, rows[1]):
            raise MemoryError("too little memory for a copy")
        return row.clone()

    monkeypatch.setattr(cache, "copy_result", copied)

    async def main() -> list[Any]:
        requests = [llm.next_token_logprobs([i]) for i in (1, 2, 3)]
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.gather(*requests, return_exceptions=True)

    first, error, third = asyncio.run(main())
    assert torch.equal(first, rows[0])
    assert isinstance(error, MemoryError)
    assert torch.equal(third, rows[2])


def test_an_event_loop_that_ends_before_its_batch_is_freed(make_model: MakeModel) -> None:
    llm = make_model(WideEngine())
    llm.batch_next_token_logprobs_sync([[1]])
    loop = asyncio.new_event_loop()
    request = llm.reduce([1], Where(1))
    task = loop.create_task(request)
    loop.call_soon(loop.stop)
    loop.run_forever()  # the request has begun; its batch would start in the next iteration
    task.cancel()
    loop.close()
    ended = weakref.ref(loop)
    del loop, task, request
    assert asyncio.run(llm.reduce([1], Where(2)))[1] == 1
    gc.collect()
    assert ended() is None


def test_known_rows_that_are_large_are_copied_off_the_event_loop(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_model(WideEngine())
    rows = llm.batch_next_token_logprobs_sync([[1], [2]])
    threads: list[str] = []

    def copied(row: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return row.clone()

    monkeypatch.setattr(cache, "copy_result", copied)

    async def main() -> None:
        assert torch.equal(await llm.next_token_logprobs([1]), rows[0])
        assert torch.equal(await llm.batch_next_token_logprobs([[1], [2]]), rows)

    asyncio.run(main())
    assert len(threads) == 3
    assert threading.current_thread().name not in threads


def test_draws_from_known_rows_are_those_from_rows_that_are_computed(
    make_model: MakeModel,
) -> None:
    engine = WideEngine()
    llm = make_model(engine, output_cache=OutputCache(0))
    cached = make_model(WideEngine())
    contexts = [[i % 3] for i in range(9)]
    cached.batch_next_token_logprobs_sync(contexts)
    expected = llm.batch_draw_sync(contexts, seed=4)
    assert asyncio.run(cached.batch_draw(contexts, seed=4)) == expected
    assert cached.batch_draw_sync(contexts, seed=4) == expected


def test_rows_that_are_evicted_while_others_are_read_are_found_or_computed(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = WideEngine()
    llm = make_model(engine)
    rows = llm.batch_next_token_logprobs_sync([[1], [2], [3]])

    def find(self: OutputCache, key: Any) -> Any:
        entry = original(self, key)
        if entry is not None:
            self.clear()
        return entry

    original = OutputCache.find
    monkeypatch.setattr(OutputCache, "find", find)
    again = asyncio.run(llm.batch_next_token_logprobs([[3], [1]]))
    assert torch.equal(again, rows[[2, 0]])
    [top] = asyncio.run(llm.batch_top_tokens([[1]], 1))
    assert top.token_ids.item() == rows[0].argmax()
    assert len(engine.evaluated) == 4
    assert llm.statistics().cache_hits == 2


def test_draws_are_neither_stored_nor_do_they_evict_rows(make_model: MakeModel) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    llm = make_model(engine, output_cache=OutputCache(3))
    llm.next_token_logprobs_sync([1])
    keys = list(llm.output_cache._entries)
    for seed in range(10):
        llm.draw_sync([1], [2, 3], seed=seed)
        llm.draw_sync([seed], seed=seed)
        llm.sample_sync([4], 3, seed=seed)
    assert list(llm.output_cache._entries) == keys
    llm.log_mass_sync([5], [2, 3])
    assert len(llm.output_cache) == 2  # a later request can find this one
    computed = len(engine.batches)
    llm.log_mass_sync([5], [2, 3])
    assert len(engine.batches) == computed
