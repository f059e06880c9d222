"""`update_weights`: every result has one set of weights, and later ones the new set."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm import BatchEngine, Capability, EngineDiedError, Query, UnsupportedCapabilityError
from genlm.core.model.lm import AsyncLM

VOCAB_SIZE = 16
MakeModel = Callable[..., AsyncLM]


class TrainedEngine(ScriptedEngine):
    """Rows depend on the weight `n`; a step evaluates one sequence."""

    capabilities = frozenset({Capability.LORA, Capability.WEIGHTS})
    n = 0
    failure: Exception | None = None

    def choose(self, pending: Sequence[Query]) -> Sequence[Query]:
        return pending[:1]

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        super().evaluate(queries)
        return torch.stack([expected(q.token_ids, self.n) for q in queries])

    def update_weights(self, weights: Mapping[str, Any] | None) -> None:
        if weights is not None:
            if weights.keys() != {"n"}:
                raise ValueError(f"expected n; found {', '.join(weights)}")
            self.n = int(weights["n"])
        if self.failure is not None:
            raise self.failure


def expected(token_ids: Sequence[int], n: int) -> torch.Tensor:
    return oracle_row(token_ids, "w" * (n + 1), VOCAB_SIZE)


class Sharded(torch.Tensor):
    """A tensor with the method of `torch.distributed.tensor.DTensor`."""

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("called by one rank only")


def weights(n: int) -> dict[str, torch.Tensor]:
    return {"n": torch.tensor(n)}


def assert_current(llm: AsyncLM, n: int, *sequences: Sequence[int]) -> None:
    for ids in sequences:
        assert torch.equal(llm.next_token_logprobs_sync(ids), expected(ids, n))
        assert torch.equal(llm.token_logprobs_sync(ids, [3]), expected(ids, n)[3:4])


def test_cached_results_contexts_and_populations_have_the_new_weights(
    make_model: MakeModel,
) -> None:
    llm = make_model(TrainedEngine(VOCAB_SIZE))
    context, population = llm.context([1, 2]), llm.population([1, 2], 3)
    for n, change in enumerate(
        [None, weights(1), weights(2).items(), iter(weights(3).items())]
    ):
        if change is not None:
            llm.update_weights(change)
        assert llm.cached_logprobs([1, 2]) is None
        for _ in range(2):
            assert_current(llm, n, [1, 2], [3])
            assert torch.equal(llm.next_token_logprobs_sync(context), expected([1, 2], n))
        rows = population.next_token_logprobs_sync()
        assert torch.equal(rows, expected([1, 2], n).expand(3, -1))


def test_requests_before_the_call_have_the_earlier_weights_and_later_ones_the_new(
    make_model: MakeModel,
) -> None:
    engine = TrainedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    sequences = [[i, 7] for i in range(5)]

    async def main() -> None:
        engine.hold()
        before = [asyncio.ensure_future(llm.next_token_logprobs(ids)) for ids in sequences]
        drawn = asyncio.ensure_future(llm.population([1], 4).sample(3, seed=1))
        await asyncio.to_thread(engine.wait_until_entered)
        updates = [asyncio.ensure_future(llm.aupdate_weights(weights(1)))]
        while not llm._scheduler._worker._calls:
            await asyncio.sleep(0)
        # The same sequences, and others, of which none may share an earlier evaluation.
        after = [asyncio.ensure_future(llm.next_token_logprobs(ids)) for ids in sequences]
        await asyncio.sleep(0)
        updates.append(asyncio.ensure_future(llm.aupdate_weights(weights(2))))
        while len(llm._scheduler._worker._calls) < 2:
            await asyncio.sleep(0)
        last = [asyncio.ensure_future(llm.next_token_logprobs(ids)) for ids in sequences]
        await asyncio.sleep(0)
        engine.release()
        for n, requests in enumerate([before, after, last]):
            for ids, row in zip(sequences, await asyncio.gather(*requests), strict=True):
                assert torch.equal(row, expected(ids, n))
        await asyncio.gather(*updates)
        sampled = await drawn
        for token_ids, logprobs in zip(sampled.token_ids, sampled.logprobs, strict=True):
            for step, token in enumerate(token_ids.tolist()):
                row = expected([1, *token_ids[:step].tolist()], 0)
                assert torch.isclose(logprobs[step], row[token])

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert_current(llm, 2, *sequences)


@pytest.mark.parametrize("limits", [{"max_batch_size": 2}, {"max_pending": 2}])
def test_a_blocking_call_in_a_coroutine_completes_the_requests_of_its_loop(
    make_model: MakeModel, limits: dict[str, int]
) -> None:
    llm = make_model(TrainedEngine(VOCAB_SIZE), **limits)

    async def main() -> list[torch.Tensor]:
        requests = [asyncio.ensure_future(llm.next_token_logprobs([i])) for i in range(5)]
        await asyncio.sleep(0)
        llm.update_weights(weights(1))
        requests += [asyncio.ensure_future(llm.next_token_logprobs([i])) for i in range(5)]
        return await asyncio.gather(*requests)

    rows = asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    for i, row in enumerate(rows):
        assert torch.equal(row, expected([i % 5], i // 5))


def test_requests_of_many_threads_have_one_set_of_weights_each(make_model: MakeModel) -> None:
    llm = make_model(TrainedEngine(VOCAB_SIZE))
    problems: list[str] = []
    updated = 0

    def request(thread: int) -> None:
        for i in range(40):
            ids, least = [thread, i % 5], updated
            row = llm.next_token_logprobs_sync(ids)
            found = [n for n in range(21) if torch.equal(row, expected(ids, n))]
            if len(found) != 1 or found[0] < least:
                problems.append(f"{ids}: {found}, at least {least}")

    threads = [threading.Thread(target=request, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for n in range(1, 21):
        llm.update_weights(weights(n))
        updated = n
    for thread in threads:
        thread.join()
    assert not problems


def test_a_function_changes_the_weights_between_two_requests(make_model: MakeModel) -> None:
    engine = TrainedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    threads = []

    def change(received: Any) -> None:
        threads.append(threading.current_thread())
        engine.n = received.n + 5

    assert_current(llm, 0, [1])
    llm.update_weights(change)
    assert threads != [threading.current_thread()]
    assert_current(llm, 5, [1])

    def fail(received: Any) -> None:
        engine.n = received.n + 1
        raise ArithmeticError("no gradient")

    with pytest.raises(ArithmeticError, match="no gradient"):
        llm.update_weights(fail)
    assert_current(llm, 6, [1])
    engine.n = 7
    llm.update_weights()
    assert_current(llm, 7, [1])


def test_weights_that_do_not_fit_change_nothing(make_model: MakeModel) -> None:
    llm = make_model(TrainedEngine(VOCAB_SIZE))
    llm.update_weights(weights(1))
    with pytest.raises(ValueError, match="expected n; found m"):
        llm.update_weights({"m": torch.tensor(2)})
    assert_current(llm, 1, [1])


class WatchedEngine(TrainedEngine):
    """Detects changes of `n` that are made without the model."""

    def weights_version(self) -> int:
        return self.n


def test_the_version_changes_with_the_weights_of_the_model_and_of_the_adapter(
    make_model: MakeModel,
) -> None:
    engine = WatchedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    llm.load_lora("folder/a", "a")
    adapted = llm.with_lora("a")
    versions = [adapted.weights_version()]

    def assert_changed() -> None:
        versions.append(adapted.weights_version())
        assert versions[-1] not in versions[:-1]
        assert llm.weights_version("a") == adapted.weights_version() == versions[-1]
        assert llm.weights_version() != versions[-1]

    llm.update_weights(weights(1))
    assert_changed()
    llm.update_weights()
    assert_changed()
    engine.n = 2
    assert_changed()
    llm.load_lora("folder/b", "a", replace=True)
    base = llm.weights_version()
    assert_changed()
    assert llm.weights_version() == base


def test_results_of_an_update_are_cached_until_the_weights_change(
    make_model: MakeModel,
) -> None:
    engine = WatchedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    for n in (1, 2):
        llm.update_weights(weights(n))
        assert_current(llm, n, [1], [2])
        before = llm.statistics()
        assert_current(llm, n, [1], [2])
        assert (llm.statistics() - before).cache_hits == 4
        version = llm.weights_version()
        assert llm.weights_version() == version
    llm.update_weights(weights(3))
    assert torch.equal(llm.next_token_logprobs_sync([1]), expected([1], 3))
    engine.n = 4  # before the cached row is looked up
    assert_current(llm, 4, [1])


def test_an_engine_that_fails_during_an_update_is_closed(make_model: MakeModel) -> None:
    engine = TrainedEngine(VOCAB_SIZE)
    llm = make_model(engine)
    engine.failure = ArithmeticError("out of memory")
    for call in (lambda: llm.update_weights(weights(1)), lambda: llm.draw_sync([1])):
        with pytest.raises(EngineDiedError, match=r"replaced: ArithmeticError: out of memory"):
            call()
    llm.close()
    assert engine.closed


def test_an_engine_without_the_capability_refuses(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    with pytest.raises(UnsupportedCapabilityError, match="does not support 'weights'"):
        llm.update_weights(weights(1))
    assert not hasattr(BatchEngine, "update_weights")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.nn.Linear(2, 2), r"a Linear; pass its weights, model.state_dict\(\)"),
        (Path("folder"), r"safetensors.torch.load_file\(path\)"),
        (3, "weights is a int; expected a mapping"),
        ([torch.ones(2), torch.ones(2)], "the name of a weight is|expected a mapping"),
        ({}, "weights is empty"),
        ({1: torch.ones(2)}, "the name of a weight is 1"),
        (asyncio.sleep, "a coroutine function; pass a function"),
        ({"n": None}, "the weight 'n' is a NoneType; expected a tensor"),
        ({"n": torch.tensor(1, device="meta")}, "'n' is on the meta device and has no data"),
        ({"n": torch.tensor(1).as_subclass(Sharded)}, "'n' is sharded; pass .* full_tensor"),
    ],
)
def test_values_that_are_no_weights_are_refused(
    make_model: MakeModel, value: Any, message: str
) -> None:
    llm = make_model(TrainedEngine(VOCAB_SIZE))
    with pytest.raises((TypeError, ValueError), match=message):
        llm.update_weights(value)
    assert_current(llm, 0, [1])


def test_weights_may_be_arrays_of_numpy(make_model: MakeModel) -> None:
    class TensorEngine(TrainedEngine):
        def update_weights(self, weights: Mapping[str, Any] | None) -> None:
            assert weights is not None
            assert isinstance(weights["n"], torch.Tensor)
            super().update_weights(weights)

    llm = make_model(TensorEngine(VOCAB_SIZE))
    llm.update_weights({"n": np.broadcast_to(2, ())})  # read-only, as arrays of JAX
    assert_current(llm, 2, [1])
