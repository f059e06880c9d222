"""Continuations of populations on the engine's thread, against draws by callers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import genlm
from genlm.plugin import Completion, GroupQuery, SamplingRun

SIZE = 7


class TinyEngine(genlm.BatchEngine):
    """Fixed random rows; NaN after the token `nan_after`."""

    nan_after: int | None = None

    def __init__(self, max_context: int | None = None) -> None:
        tokens = [genlm.Token(i, bytes([97 + i])) for i in range(SIZE)]
        self.vocabulary = genlm.Vocabulary(None, tokens, [str(token) for token in tokens])
        self.max_context = max_context
        self.evaluated = 0

    def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
        self.evaluated += 1
        rows = torch.stack([self.row(query.token_ids) for query in queries])
        for place, query in enumerate(queries):
            if query.token_ids[-1] == self.nan_after:
                rows[place] = float("nan")
        return rows

    @staticmethod
    def row(token_ids: Sequence[int]) -> torch.Tensor:
        logits = np.random.default_rng((3, *token_ids)).normal(scale=2, size=SIZE)
        return torch.log_softmax(torch.from_numpy(logits), 0).float()


class Native(TinyEngine):
    """An engine that takes queries with `sampling` and draws all tokens in one step."""

    samples_groups = 64

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[int, SamplingRun] = {}

    def submit_group(self, group: GroupQuery) -> None:
        if group.sampling is None:
            super().submit_group(group)
        else:
            self.runs[group.query_id] = SamplingRun(group, self.vocabulary)

    def step(self) -> list[Completion]:
        completions = []
        for query_id, run in self.runs.items():
            while not run.is_complete:
                super().submit_group(run.next_query())
                [answer] = super().step()
                run.add(answer.result)  # type: ignore[arg-type]
            completions.append(Completion(query_id, run.result()))
        self.runs.clear()
        return completions or super().step()


def drawn_by_steps(population: genlm.Population, count: int, stop: int) -> torch.Tensor:
    steps = []
    for _ in range(count):
        drawn = population.draw_sync(temperature=np.linspace(0.5, 1.5, len(population)), seed=5)
        steps.append(drawn.token_ids)
        population = population.extend(drawn.token_ids).finish(drawn.token_ids == stop)
    return torch.stack(steps, 1)


@pytest.mark.parametrize("engine", [TinyEngine, Native])
def test_a_continuation_is_what_draws_and_extensions_give(engine: type[TinyEngine]) -> None:
    with genlm.AsyncLM(engine, output_cache=genlm.OutputCache(0)) as llm:
        population = llm.population([[1], [1, 2], [1]] * 4).finish([True] + [False] * 11)
        sampled = population.sample_sync(
            6, stop=3, temperature=np.linspace(0.5, 1.5, 12), seed=5
        )
        assert torch.equal(sampled.token_ids, drawn_by_steps(population, 6, 3))
        assert sampled.token_ids[0].tolist() == [-1] * 6
        extended = sampled.population
        assert torch.equal(extended.finished[1:], (sampled.token_ids == 3).any(1)[1:])
        assert torch.equal(extended.tokens, population.extend(sampled.token_ids).tokens)
        # The next draw has the random numbers of the step after the last token.
        again = population.extend(sampled.token_ids).finish(extended.finished)
        assert torch.equal(
            extended.draw_sync(seed=8).token_ids, again.draw_sync(seed=8).token_ids
        )


def test_members_that_are_queries_of_their_own_draw_what_those_of_groups_do() -> None:
    results = []
    for smallest_group in (2, 100):
        engine = TinyEngine()
        engine.smallest_group = smallest_group
        with genlm.AsyncLM(lambda e=engine: e, output_cache=genlm.OutputCache(0)) as llm:  # type: ignore[misc]
            population = llm.population([[1], [1, 2], [1], [3], [2, 1]])
            population = population.finish([False, False, False, True, False])
            sampled = population.sample_sync(
                9, stop=[5, b"ab"], temperature=np.linspace(0.0, 2.0, 5), top_k=6, seed=4
            )
            extended = sampled.population
            direct = population.extend(sampled.token_ids)
            assert extended._places.tolist() == direct._places.tolist()
            again = extended.draw_sync(seed=8).token_ids
            results.append([*sampled[:3], extended.tokens, extended.finished, again])
            assert len(engine._pending) == len(engine._groups) == 0
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    assert (results[0][0][:, -1] < 0).any()


def test_single_queries_of_a_sample_need_no_normalised_rows() -> None:
    class Recording(TinyEngine):
        def submit(self, query: genlm.Query) -> None:
            draws.extend(query.outputs)
            super().submit(query)

    draws: list[Any] = []
    with genlm.AsyncLM(Recording, output_cache=genlm.OutputCache(0)) as llm:
        llm.population([1], 2).sample_sync(2, seed=1)
    assert len(draws) >= 2
    assert all(draw.reads_logits for draw in draws)


def test_a_member_that_fails_ends_its_small_group() -> None:
    engine = TinyEngine()
    with genlm.AsyncLM(lambda: engine, output_cache=genlm.OutputCache(0)) as llm:
        population = llm.population([[1], [2], [1]])
        drawn = population.sample_sync(3, seed=4).token_ids
        engine.nan_after = int(drawn[1, 1])
        with pytest.raises(genlm.PopulationError) as caught:
            population.sample_sync(10**6, seed=4)
        assert 1 in caught.value.members or engine.nan_after in drawn[[0, 2]].tolist()
        engine.nan_after = None
        assert torch.equal(population.sample_sync(3, seed=4).token_ids, drawn)
        assert llm.statistics().pending == 0


def test_tokens_after_the_first_do_not_pass_through_the_scheduler() -> None:
    with genlm.AsyncLM(TinyEngine, output_cache=genlm.OutputCache(0)) as llm:
        requests_before = llm.statistics().requests
        llm.population([1], 20).sample_sync(5, seed=1)
        assert llm.statistics().requests - requests_before == 1
        engine: Any = llm.engine
        assert engine.evaluated == 5


def test_no_tensors_are_kept_between_the_tokens_of_a_continuation() -> None:
    living: list[int] = []

    class Counting(TinyEngine):
        def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
            living.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
            return super().evaluate(queries)

    with genlm.AsyncLM(Counting) as llm:
        population = llm.population([1], 10)
        gc.collect()
        population.sample_sync(8, stop=(), seed=0)
    assert living[-1] <= living[3]


def test_members_whose_contexts_get_full_end_and_the_others_continue() -> None:
    with genlm.AsyncLM(lambda: TinyEngine(4), output_cache=genlm.OutputCache(0)) as llm:
        population = llm.population([[1, 2, 3], [1], [3, 2, 1]])
        sampled = population.sample_sync(3, seed=1)
        assert (sampled.token_ids < 0).sum(1).tolist() == [1, 0, 1]
        two = population.sample_sync(2, seed=1)
        assert torch.equal(sampled.token_ids[:, :2], two.token_ids)
        with pytest.raises(genlm.PopulationError) as caught:
            sampled.population.sample_sync(1, seed=1)
        assert list(caught.value.members) == [0, 2]
        assert llm.statistics().pending == 0


def test_members_that_fail_later_are_listed() -> None:
    with genlm.AsyncLM(TinyEngine, output_cache=genlm.OutputCache(0)) as llm:
        engine: Any = llm.engine
        population = llm.population([1], 30)
        first = population.draw_sync(seed=2).token_ids
        engine.nan_after = int(first[4])
        with pytest.raises(genlm.PopulationError) as caught:
            population.sample_sync(3, seed=2)
        assert list(caught.value.members) == torch.nonzero(first == first[4])[:, 0].tolist()


def test_a_cancelled_continuation_ends_between_two_tokens() -> None:
    class Slow(TinyEngine):
        def evaluate(self, queries: Sequence[genlm.Query]) -> torch.Tensor:
            if self.evaluated == 3:
                loop.call_soon_threadsafe(task.cancel)
            return super().evaluate(queries)

    async def cancelled() -> None:
        nonlocal loop, task
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(llm.population([1], 4).sample(100_000, seed=1))
        with pytest.raises(asyncio.CancelledError):
            await task

    loop: Any = None
    task: Any = None
    with genlm.AsyncLM(Slow, output_cache=genlm.OutputCache(0)) as llm:
        asyncio.run(cancelled())
        assert llm.population([2], SIZE).draw_sync(seed=1).token_ids.shape == (SIZE,)
        assert llm.statistics().pending == 0


def test_replicas_share_the_continuations_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    submit_group = Native.submit_group

    def counted(self: Native, group: GroupQuery) -> None:
        sizes.append(len(group.row_of))
        submit_group(self, group)

    monkeypatch.setattr(Native, "submit_group", counted)
    prompts = [[1 + i % 3, 2] for i in range(150)]
    with genlm.AsyncLM(TinyEngine) as llm:
        expected = llm.batch_sample_sync(prompts, 3, stop=(), seed=4)
    with genlm.AsyncLM(Native) as llm:
        assert llm.batch_sample_sync(prompts, 3, stop=(), seed=4) == expected
    assert sizes[-3:] == [64, 64, 22]
