"""A step is one forward pass: what waits can be cancelled, and what arrives joins it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm import AsyncLM, Completion, Query
from genlm_hf.engine import HFEngine

from .population import Oracle, used
from .test_adapters import make_adapter
from .tiny import answers, ids_of_lengths

Population = list[list[int]]


@pytest.fixture(params=["packed", "slot_cache", "padded"])
def build(request: pytest.FixtureRequest, llama: Any, tokenizer: Any) -> Callable[[], HFEngine]:
    """Make an engine of the tiny Llama on each execution path, with passes of 100 tokens."""
    return lambda: HFEngine.from_model(
        llama, tokenizer, execution_path=request.param, max_tokens_per_batch=100
    )


@pytest.fixture
def engine(build: Callable[[], HFEngine]) -> HFEngine:
    return build()


def submit(engine: HFEngine, contexts: Population, *, first: int = 0) -> None:
    for query_id, ids in enumerate(contexts, start=first):
        engine.submit(Query(query_id, tuple(ids)))


def steps_of(engine: HFEngine) -> Iterator[list[Completion]]:
    """Step until nothing is left; every step is one forward pass."""
    before = used(engine, "forwards")
    while completions := engine.step():
        assert used(engine, "forwards") == before + 1
        before += 1
        yield completions


def ids_answered(completions: Sequence[Completion]) -> list[int]:
    return sorted(completion.query_id for completion in completions)


def is_padded(engine: HFEngine) -> bool:
    return engine.statistics()["execution_path"] == "padded"


def test_a_step_is_one_forward_pass(engine: HFEngine, llama: Any) -> None:
    contexts = ids_of_lengths(*[30] * 8)
    submit(engine, contexts)
    steps = list(steps_of(engine))
    assert [ids_answered(step) for step in steps] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    rows = {completion.query_id: completion.result for step in steps for completion in step}
    assert Oracle(llama).largest_error(contexts, [rows[i] for i in range(8)]) <= 1e-4


def test_the_oldest_is_in_every_step(engine: HFEngine) -> None:
    lengths = [9, 70, 30, 60, 4, 50, 90, 12, 3]
    submit(engine, ids_of_lengths(*lengths))
    waiting = set(range(len(lengths)))
    while waiting:
        answered = ids_answered(engine.step())
        assert answered[0] == min(waiting)
        waiting -= set(answered)


def test_a_query_aborted_between_steps_is_never_computed(engine: HFEngine) -> None:
    before = used(engine, "tokens_computed")
    submit(engine, ids_of_lengths(*[30] * 8))
    engine.step()
    for query_id in range(3, 8):
        engine.abort(query_id)
    assert engine.step() == []
    assert used(engine, "tokens_computed") - before == 90


def test_what_arrives_joins_the_next_pass_if_it_fits(engine: HFEngine) -> None:
    *contexts, late = ids_of_lengths(*[30] * 9, 3)
    submit(engine, contexts)
    engine.step()
    submit(engine, [late], first=9)
    answered_in = next(i for i in range(9) if 9 in ids_answered(engine.step()))
    # Padded to 30 it does not fit, and has to wait for its turn.
    assert answered_in == (2 if is_padded(engine) else 0)


def test_a_population_that_fits_one_pass_is_one_step(engine: HFEngine, llama: Any) -> None:
    oracle, [prompt] = Oracle(llama), ids_of_lengths(40)
    contexts = [[*prompt, i] for i in range(3, 13)]  # 50 tokens, if each is counted once
    for _ in range(3):
        submit(engine, contexts)
        steps = [engine.step() for _ in range(5 if is_padded(engine) else 1)]
        assert engine.step() == []
        rows = {completion.query_id: completion.result for step in steps for completion in step}
        assert oracle.largest_error(contexts, [rows[i] for i in range(10)]) <= 1e-4
        contexts = [[*ids, 5] for ids in contexts]


def test_a_context_longer_than_a_pass_takes_turns_with_those_that_fit(
    engine: HFEngine, llama: Any
) -> None:
    before, rows = used(engine, "forwards"), {}
    contexts = ids_of_lengths(220, 30, 130, 30)
    submit(engine, contexts)
    steps = []
    while len(rows) < len(contexts):
        completions = engine.step()
        steps.append(ids_answered(completions))
        rows |= {completion.query_id: completion.result for completion in completions}
        assert used(engine, "forwards") == before + len(steps)
    # Without a cache a context is computed by one pass; otherwise one is after the other.
    expected = [[0], [2], [1, 3]] if is_padded(engine) else [[], [1, 3], [], [0], [], [2]]
    assert sorted(steps) == sorted(expected)
    assert Oracle(llama).largest_error(contexts, [rows[i] for i in range(4)]) <= 1e-4


def test_only_the_sequence_that_raises_fails_in_whichever_step(
    engine: HFEngine, llama: Any
) -> None:
    def picky(_: Any, args: Any) -> None:
        if (args[0] == 99).any():
            raise RuntimeError("99")

    contexts = [[i if i != 99 else 98 for i in ids] for ids in ids_of_lengths(*[30] * 8)]
    contexts[4][7] = 99
    handle = llama.model.embed_tokens.register_forward_pre_hook(picky)
    rows = answers(engine, contexts)
    handle.remove()
    assert isinstance(rows.pop(4), RuntimeError)
    contexts.pop(4)
    assert Oracle(llama).largest_error(contexts, rows) <= 1e-4


def test_adapters_take_turns(build: Callable[[], HFEngine], llama: Any, tmp_path: Path) -> None:
    oracles = {
        None: Oracle(llama),
        **{name: Oracle(make_adapter(llama, tmp_path / name, ord(name))) for name in "rb"},
    }
    engine = build()
    for name in "rb":
        engine.add_adapter(name, str(tmp_path / name))
    requests = [(ids, name) for ids in ids_of_lengths(9, 9, 9, 9) for name in (None, "r", "b")]
    queries: list[Query] = []

    def submit_query(ids: Sequence[int], adapter: str | None) -> None:
        queries.append(Query(len(queries), tuple(ids), adapter))
        engine.submit(queries[-1])

    for ids, adapter in requests:
        submit_query(ids, adapter)
    served = []
    for _ in range(6):
        completions = engine.step()
        served.append({queries[completion.query_id].adapter for completion in completions})
        for completion in (
            completions
        ):  # served callers send further requests before other adapters are served
            ids, adapter = (
                queries[completion.query_id].token_ids,
                queries[completion.query_id].adapter,
            )
            assert oracles[adapter].largest_error([ids], [completion.result]) <= 1e-4
            submit_query([*ids, 5], adapter)
    assert served == [{None}, {"r"}, {"b"}] * 2


class Held:
    """Holds the first forward pass of a model until it is let go."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        self._handle = model.register_forward_pre_hook(self._hold)

    def _hold(self, *_: Any) -> None:
        self._handle.remove()
        self.begun.set()
        assert self.let_go.wait(60)


def test_a_cancelled_population_holds_nobody_up_for_more_than_its_pass(
    build: Callable[[], HFEngine], llama: Any
) -> None:
    *contexts, short = ids_of_lengths(*[30] * 60, 5)

    async def main(llm: AsyncLM) -> torch.Tensor:
        before, held = llm.statistics().engine, Held(llama)
        asking = [asyncio.ensure_future(llm.next_token_logprobs(ids)) for ids in contexts]
        await asyncio.to_thread(held.begun.wait, 60)
        for task in asking:
            task.cancel()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in results)
        late = asyncio.ensure_future(llm.next_token_logprobs(short))
        await asyncio.sleep(0)  # the request is sent
        held.let_go.set()
        row = await late
        after = llm.statistics().engine
        assert int(after["forwards"]) - int(before["forwards"]) == 2
        assert int(after["tokens_computed"]) - int(before["tokens_computed"]) == 90 + 5
        return row

    with AsyncLM(build, name="hf") as llm:
        assert Oracle(llama).largest_error([short], [asyncio.run(main(llm))]) <= 1e-4


def test_closing_waits_for_no_more_than_the_pass_that_runs(
    build: Callable[[], HFEngine], llama: Any
) -> None:
    contexts = ids_of_lengths(*[30] * 60)
    llm = AsyncLM(build, name="hf")
    before, held = llm.statistics().engine, Held(llama)

    async def main() -> list[Any]:
        asking = [asyncio.ensure_future(llm.next_token_logprobs(ids)) for ids in contexts]
        await asyncio.to_thread(held.begun.wait, 60)
        closing = asyncio.ensure_future(asyncio.to_thread(llm.close))
        results = await asyncio.gather(*asking, return_exceptions=True)
        held.let_go.set()
        await closing
        return results

    assert all(isinstance(each, Exception) for each in asyncio.run(main()))
    assert int(llm.statistics().engine["forwards"]) == int(before["forwards"]) + 1
