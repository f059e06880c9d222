"""Populations on requests that stay in vLLM's running list.

Each test runs on five engines: with room for all, with a place for six requests, with a single
place, with a KV cache of nine blocks, of which one context alone can need eight, and with a
worker in another process.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from population_programs import run_population_programs
from serving_populations import PROMPT, check, figures

import genlm
from genlm.plugin import (
    Generation,
    GroupQuery,
    GroupReduction,
    Lineage,
    Query,
    Rows,
    TokenSequence,
)
from genlm.testing import TINY_VOCABULARY
from genlm_vllm.conformance import TinyLlama
from genlm_vllm.lifecycle import model_of

from .interpreted_triton import SECOND_RUNNER

ENGINES: dict[str, dict[str, Any]] = {
    "room for all": {"max_num_seqs": 64, "max_num_batched_tokens": 64},
    "six places": {"max_num_seqs": 6, "max_num_batched_tokens": 64},
    "one place": {"max_num_seqs": 1, "max_num_batched_tokens": 64},
    "few blocks": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 10 * 2**15,
    },
    "own process": {"multiprocess": True, "max_num_seqs": 64, "max_num_batched_tokens": 64},
}
if SECOND_RUNNER:  # its kernels are interpreted
    ENGINES = {name: ENGINES[name] for name in ("room for all", "six places")}


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, tiny: TinyLlama) -> Iterator[genlm.AsyncLM]:
    def build() -> Any:
        return tiny.engine(**ENGINES[request.param], max_loras=3)

    with genlm.AsyncLM(build, output_cache=genlm.OutputCache(0)) as llm:
        for name, path in tiny.adapters.items():
            llm.load_lora(path, name)
        yield llm


@pytest.fixture
def free(llm: genlm.AsyncLM) -> Iterator[Any]:
    """Function that returns the number of free KV blocks without cached contexts."""

    def blocks() -> int:
        gc.collect()
        llm.clear_kv_cache()
        engine: Any = llm.engine
        assert engine.statistics()["members_living"] == 0
        return int(engine._residents.requests._pool.get_num_free_blocks())

    before = blocks()
    yield blocks
    assert blocks() == before


def has_room(llm: genlm.AsyncLM) -> bool:
    engine: Any = llm.engine
    config = engine.llm_engine.vllm_config
    return bool(config.scheduler_config.max_num_seqs == 64)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_on_populations(llm: genlm.AsyncLM, tiny: TinyLlama, seed: int) -> None:
    run_population_programs(
        llm,
        tiny.logprobs,
        seed=seed,
        steps=6 if SECOND_RUNNER else 15,
        adapters=(None, "red"),
    )


@pytest.mark.usefixtures("free")
def test_populations_that_exceed_the_places_together_are_computed_in_turn(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    begun = figures(llm, "members_begun")
    steps = 4 if SECOND_RUNNER else 10

    async def grow(number: int) -> None:
        generator = np.random.default_rng(number)
        population = llm.population([*PROMPT[:8], 3 + number], 3)
        for _ in range(steps):
            rows = await population.next_token_logprobs()
            population = population.extend(generator.integers(3, TINY_VOCABULARY, 3))
        rows = await population.next_token_logprobs()
        check(tiny, population, rows)

    async def main() -> None:
        await asyncio.gather(*(grow(number) for number in range(6)))

    asyncio.run(main())
    engine: Any = llm.engine
    places = engine.llm_engine.vllm_config.scheduler_config.max_num_seqs
    if places in {6, 64}:  # with few blocks, requests end for these, too
        assert begun()[0] <= (6 if places == 64 else 6 * 3 * steps // 3)


def test_the_rows_of_a_population_are_freed_when_the_caller_drops_them(
    llm: genlm.AsyncLM,
) -> None:
    rows = llm.population(PROMPT, 4).next_token_logprobs_sync()
    memory = rows.data_ptr(), rows.untyped_storage().nbytes()
    del rows
    gc.collect()
    storages = [
        each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor
    ]
    assert memory not in {(each.data_ptr(), each.nbytes()) for each in storages}


@pytest.mark.usefixtures("free")
def test_members_grow_through_several_blocks(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    generator = np.random.default_rng(1)
    population = llm.population(PROMPT[:30], 5).extend([3, 4, 5, 6, 7])
    population.draw_sync(seed=0)
    grown = figures(llm, "members_continued")
    steps = 8 if SECOND_RUNNER else 40
    for step in range(steps):
        population = population.extend(generator.integers(3, TINY_VOCABULARY, 5))
        rows = population.next_token_logprobs_sync()
        if step % 3 == 1:
            check(tiny, population, rows)
    if has_room(llm):
        assert grown() == (5 * steps,)


def test_a_child_costs_its_token_and_what_nothing_refers_to_ends(
    llm: genlm.AsyncLM, free: Any
) -> None:
    if not has_room(llm):
        pytest.skip("for a place for each member")
    names = ("tokens_computed", "members_continued", "members_forked", "members_begun")
    grown, engine = figures(llm, *names), llm.engine
    population = llm.population(PROMPT, 20)
    population.draw_sync(seed=1)
    assert grown() == (len(PROMPT), 0, 0, 1)
    population = population.extend(np.arange(20) + 3)
    population.draw_sync(seed=1)
    assert grown() == (len(PROMPT) + 20, 1, 19, 1)
    population = population.extend(np.full(20, 7))[[0, 0, 0, 5, 5, 19]]
    population.draw_sync(seed=1)
    assert grown() == (len(PROMPT) + 23, 4, 19, 1)
    population = population.extend(np.arange(6))
    population.draw_sync(seed=1)
    assert grown() == (len(PROMPT) + 29, 7, 22, 1)
    assert engine.statistics()["members_living"] == 6
    population.draw_sync(seed=2)  # the rows are not stored
    assert grown() == (len(PROMPT) + 35, 7, 28, 1)
    population = population.extend(np.full((6, 3), 9))
    population.draw_sync(seed=1)
    assert grown() == (len(PROMPT) + 53, 7, 34, 1)
    del population
    free()


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("grows", [False, True], ids=["as it is", "grows"])
def test_a_member_that_waits_keeps_its_request(
    llm: genlm.AsyncLM, tiny: TinyLlama, grows: bool
) -> None:
    population = llm.population(PROMPT, 4).extend([3, 4, 5, 6])
    population.draw_sync(seed=0)
    grown = figures(llm, "members_continued", "members_forked", "members_begun")
    for step in range(6):
        asked = np.array([step % 2, 2 + step % 2])
        tokens = np.full(4, 9 if grows else -1)
        tokens[asked] = 7 + step
        population = population.extend(tokens)
        rows = population[asked].next_token_logprobs_sync()
        check(tiny, population[asked], rows)
    if has_room(llm):  # vLLM forks for several tokens
        assert grown() == ((2, 10, 0) if grows else (12, 0, 0))


@pytest.mark.usefixtures("free")
def test_members_of_an_earlier_step_fork_requests_that_were_continued(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    earlier = population = llm.population(PROMPT, 3).extend([3, 4, 5])
    for step in range(20):  # more than a block
        population.draw_sync(seed=0)
        population = population.extend([6, 7, 8 + step % 2])
    grown = figures(llm, "members_continued", "members_forked", "members_begun")
    branch = earlier.extend([9, 9, 10])
    check(tiny, branch, branch.next_token_logprobs_sync())
    population.draw_sync(seed=0)
    check(tiny, population, population.next_token_logprobs_sync())
    if has_room(llm):
        assert grown() == (3, 6, 0)  # rows are not stored, so the second query forks


@pytest.mark.usefixtures("free")
def test_a_concatenation_continues_the_requests_of_its_populations(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    first = llm.population(PROMPT, 3).extend([3, 4, 5])
    second = llm.population(PROMPT[:9], 2).extend([6, 7])
    for _ in range(3):
        first, second = first.extend([8, 8, 9]), second.extend([9, 8])
        first.draw_sync(seed=0)
        second.draw_sync(seed=0)
    grown = figures(llm, "members_continued", "members_forked", "members_begun")
    joined = genlm.Population.cat([first[1:], second.extend([5, 5])])
    joined = genlm.Population.cat([joined, first[:1]]).extend([3] * 5)
    check(tiny, joined, joined.next_token_logprobs_sync())
    if has_room(llm):
        assert grown() == (3, 2, 0)  # vLLM forks for two tokens
    shorter = first.truncate([len(PROMPT) + 2, 20, 99]).extend([7, 7, 7])
    check(tiny, shorter, shorter.next_token_logprobs_sync())
    if has_room(llm):
        assert grown() == (3, 5, 0)


@pytest.mark.usefixtures("free")
def test_a_population_of_contexts_forks_their_requests(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    contexts = [llm.context([*PROMPT, token]) for token in (3, 4)]
    llm.batch_next_token_logprobs_sync(contexts)
    grown = figures(llm, "members_forked", "members_begun", "contexts_continued")
    population = llm.population([contexts[0], contexts[1].extend(5), contexts[1]])
    check(tiny, population, population.next_token_logprobs_sync())
    longer = contexts[0].extend(6)  # the contexts still have their own requests
    check(tiny, llm.population([longer]), longer.next_token_logprobs_sync()[None])
    if has_room(llm):
        assert grown() == (3, 0, 1)


@pytest.mark.usefixtures("free")
def test_other_queries_fork_the_requests_of_recent_populations(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    start = llm.population(PROMPT, 3)
    start.next_token_logprobs_sync()
    population = start.extend([[3, 4], [5, 6], [5, 4]])
    population.next_token_logprobs_sync()
    grown = figures(llm, "tokens_computed")

    def computes(count: int, queried: genlm.Population, rows: Any = None) -> None:
        check(tiny, queried, queried.next_token_logprobs_sync() if rows is None else rows)
        if has_room(llm):
            assert grown() == (count,)

    computes(3, llm.population([*population]))
    computes(3 + 3, llm.population([population[1], population[0].extend([7, 8])])[[1, 0]])
    computes(6 + 3, start.extend([[3, 4, 9], [5, 6, 9], [5, 4, 9]]))
    context = population[2].extend([1, 2])
    computes(9 + 2, llm.population([context]), context.next_token_logprobs_sync()[None])
    population.score_sync([[1, 2], [3, 1], [2, 2]])
    computes(11 + 3 * 2 + 3, llm.population([*population]))
    population = population.extend([9, -1, -1])
    computes(20 + 3, population)
    computes(23 + 3, llm.population([*population]))
    adapted = llm.population([*PROMPT, 3, 4], 1, lora_name="red")  # not that of the model
    check(tiny, adapted, adapted.next_token_logprobs_sync(), "red")


@pytest.mark.usefixtures("free")
def test_the_request_of_a_member_that_waits_for_long_ends(llm: genlm.AsyncLM) -> None:
    if not has_room(llm):
        pytest.skip("for a place for each member")
    population = llm.population(PROMPT, 3).extend([3, 4, 5])
    population.draw_sync(seed=0)
    population, engine, living = population.finish([False, True, True]), llm.engine, []
    for _ in range(18):
        population = population.extend([7, -1, -1])
        population.draw_sync(seed=0)
        living.append(engine.statistics()["members_living"])
    assert living == [3] * living.count(3) + [1] * living.count(1)
    assert 10 < living.count(3) < 18


@pytest.mark.usefixtures("free")
def test_continuations_are_drawn_on_the_living_requests(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    population = llm.population(PROMPT, 10)
    grown = figures(llm, "members_begun", "tokens_computed")
    sampled = population.sample_sync(6, stop=[3, 4, 5], seed=2)
    if has_room(llm):
        drawn = int((sampled.token_ids >= 0).sum())
        begun, computed = grown()
        assert begun == 1
        assert computed < len(PROMPT) + drawn
    extended = sampled.population
    check(tiny, extended, extended.next_token_logprobs_sync())


@pytest.mark.usefixtures("free")
def test_several_queries_of_a_population_at_once(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    async def together() -> list[Any]:
        population = llm.population(PROMPT, 5)
        await population.draw(seed=0)
        one = population.extend([3, 4, 5, 3, 4])
        other = population.extend([3, 9, 5, 9, 4])
        populations = [one, other, population, one, other[[0, 2]]]
        rows = await asyncio.gather(*(members.next_token_logprobs() for members in populations))
        return list(zip(populations, rows, strict=True))

    for population, rows in asyncio.run(together()):
        check(tiny, population, rows)


@pytest.mark.usefixtures("free")
def test_what_only_a_cancelled_query_computes_ends_at_once(llm: genlm.AsyncLM) -> None:
    lineage = Lineage.of_sequences([TokenSequence.of(PROMPT * 5), TokenSequence.of([7] * 90)])
    both = np.arange(2)
    generation = Generation(lineage)

    def cancel(engine: Any) -> list[int]:
        def living() -> int:
            return int(engine.statistics()["members_living"])

        first, second = (
            GroupQuery(-9 - i, generation, both, both, Broken(5)) for i in range(2)
        )
        engine.submit_group(first)
        engine.step()
        engine.submit_group(second)
        engine.step()  # both wait for the same rows
        counts = [living()]
        for query in (first, second):
            engine.abort(query.query_id)
            counts.append(living())
        return counts

    before, shared, after = llm._scheduler.run(cancel)
    assert 0 < before <= 2
    assert shared in ({before} if has_room(llm) else {0, before})  # or the second one waits
    assert after == 0


def test_a_population_above_the_places_does_not_hold_up_others(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    if has_room(llm):
        pytest.skip("for more members than places")
    prompts = [(*PROMPT, 3 + i % 50, 3 + i // 50) for i in range(150)]
    lineage = Lineage.of_sequences([TokenSequence.of(ids) for ids in prompts])
    members = np.arange(150)
    group = GroupQuery(-9, Generation(lineage), members, members, Rows())
    begun = figures(llm, "members_begun")

    def beside(engine: Any) -> dict[int, Any]:
        engine.submit_group(group)
        engine.step()
        engine.submit(Query(-8, tuple(PROMPT)))
        results: dict[int, Any] = {}
        while len(results) < 2:
            for completion in engine.step():
                assert completion.error is None
                results[completion.query_id] = completion.result
                assert completion.query_id == -9 or 0 < begun()[0] < 150
        assert engine.statistics()["members_living"] <= 16
        return results

    results = llm._scheduler.run(beside)
    assert list(results) == [-8, -9]
    [rows] = results[-9].columns
    for ids, row in ((tuple(PROMPT), results[-8]), *zip(prompts[::20], rows[::20])):
        assert float((row.cpu() - tiny.logprobs(ids)).abs().max()) <= 1e-4


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("method", ["_check", "_fork"])
def test_a_last_member_that_is_refused_fails_alone(
    llm: genlm.AsyncLM, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """With one place, it is refused when all others are computed."""
    residents = llm.engine._residents  # type: ignore[attr-defined]
    original = getattr(residents, method)

    def refusing(query: genlm.Query, *arguments: Any) -> Any:
        if query.token_ids[-1] == 9:
            raise RuntimeError("refused")
        return original(query, *arguments)

    population = llm.population([[*PROMPT, last] for last in (3, 4, 5, 9)])
    with monkeypatch.context() as patch:
        patch.setattr(residents, method, refusing)
        with pytest.raises(genlm.PopulationError, match="refused") as caught:
            population.draw_sync(seed=0)
    assert list(caught.value.members) == [3]
    check(tiny, population, population.next_token_logprobs_sync())


@pytest.mark.usefixtures("free")
def test_a_population_that_cannot_begin_fails_alone(
    llm: genlm.AsyncLM, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_room(llm):
        pytest.skip("for a place for each member")
    requests = llm.engine._residents.requests  # type: ignore[attr-defined]
    begin = requests.begin

    def refusing(token_ids: Any, *arguments: Any, **options: Any) -> Any:
        if token_ids[0] == 9:
            raise RuntimeError("refused")
        return begin(token_ids, *arguments, **options)

    refused, population = llm.population([9, *PROMPT], 2), llm.population(PROMPT, 2)

    async def together() -> list[Any]:
        queries = refused.draw(seed=0), population.next_token_logprobs()
        return await asyncio.gather(*queries, return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(requests, "begin", refusing)
        error, rows = asyncio.run(together())
    assert "refused" in str(error)
    check(tiny, population, rows)
    check(tiny, refused, refused.next_token_logprobs_sync())


class Broken(GroupReduction):
    """Raises for the member `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def compute(self, rows: Any, row_of: Any, members: Any) -> tuple[torch.Tensor, ...]:
        if self.at in members.tolist():
            raise ArithmeticError("broken")
        return (rows[row_of, 0],)


@pytest.mark.usefixtures("free")
def test_a_reduction_that_raises_fails_its_own_query(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    async def together() -> None:
        population = llm.population(PROMPT, 4).extend([3, 4, 5, 6])
        failed, rows = await asyncio.gather(
            population.reduce(Broken(2)),
            population.next_token_logprobs(),
            return_exceptions=True,
        )
        assert isinstance(failed, genlm.PopulationError)
        assert 2 in failed.members
        check(tiny, population, rows)
        population = population.extend([7, 7, 7, 7])
        check(tiny, population, await population.next_token_logprobs())

    asyncio.run(together())


def broken(*_arguments: Any, **_options: Any) -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.usefixtures("free")
def test_a_step_that_raises_loses_no_population(
    llm: genlm.AsyncLM, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = llm.engine
    if engine.statistics()["processes"] == "own":
        pytest.skip("for workers in this process")
    model = type(model_of(engine.llm_engine))
    population = llm.population(PROMPT, 5)
    population.draw_sync(seed=0)
    population = population.extend([3, 4, 5, 3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            population.draw_sync(seed=1)
    assert engine.statistics()["members_living"] == 0
    for _ in range(2):
        check(tiny, population, population.next_token_logprobs_sync())


@pytest.mark.usefixtures("free", "adapters")
def test_a_removed_adapter_takes_its_requests_along(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    population = llm.population(PROMPT, 3, lora_name="blue").extend([3, 4, 5])
    check(tiny, population, population.next_token_logprobs_sync(), "blue")
    base = llm.population(PROMPT, 2)
    base.draw_sync(seed=0)
    engine: Any = llm.engine
    llm.unload_lora("blue")
    llm.next_token_logprobs_sync([3])
    assert engine.statistics()["members_living"] <= 1
    with pytest.raises(genlm.UnknownAdapterError):
        population.draw_sync(seed=0)
    llm.load_lora(tiny.adapters["blue"], "blue")
    again = llm.population(PROMPT, 3, lora_name="blue")
    check(tiny, again, again.next_token_logprobs_sync(), "blue")


@pytest.mark.usefixtures("free")
def test_members_grow_to_the_longest_context(llm: genlm.AsyncLM, tiny: TinyLlama) -> None:
    longest = llm.max_context
    assert longest is not None
    population = llm.population((PROMPT * 8)[: longest - 2], 3)
    population.draw_sync(seed=0)
    for _ in range(2):
        population = population.extend([3, 4, 5])
        check(tiny, population, population.next_token_logprobs_sync())
    with pytest.raises(genlm.PopulationError, match="256"):
        population.extend([-1, 4, 5]).draw_sync(seed=0)
    check(tiny, population, population.next_token_logprobs_sync())


@pytest.mark.usefixtures("free")
def test_ids_that_the_model_does_not_embed_fail_their_members(
    llm: genlm.AsyncLM, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = llm.engine
    population = llm.population(PROMPT, 4)
    population.draw_sync(seed=0)
    monkeypatch.setattr(engine._residents, "_embedded_ids", 100)
    with pytest.raises(genlm.PopulationError, match="token id 107") as caught:
        population.extend([3, 107, 99, 100]).draw_sync(seed=0)
    assert list(caught.value.members) == [1, 3]
    population = population.extend([3, 4, 99, 5])
    check(tiny, population, population.next_token_logprobs_sync())


def test_requests_end_at_once_where_contexts_are_not_kept(
    llm: genlm.AsyncLM, tiny: TinyLlama
) -> None:
    engine: Any = llm.engine
    llm._scheduler.run(lambda _: setattr(engine, "keeps_contexts", False))
    population = llm.population(PROMPT, 3).extend([3, 4, 5])
    for _ in range(2):
        check(tiny, population, population.next_token_logprobs_sync())
        assert engine.statistics()["members_living"] == 0
        population = population.extend([6, 6, 6])
    llm._scheduler.run(lambda _: setattr(engine, "keeps_contexts", True))
    population.draw_sync(seed=0)
    assert engine.statistics()["members_living"] > 0
