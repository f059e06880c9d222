"""Contexts that stay in vLLM between steps: rows, computed tokens and progress.

Each test runs on four engines: with a place for six requests, with a single place, with a KV
cache for one long context, and in other processes with few places and blocks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from genlm import (
    ContextLengthError,
    Query,
    TokenIdError,
    UnknownAdapterError,
)
from genlm.plugin import Completion, TokenSequence
from genlm.testing import TINY_VOCABULARY
from genlm_vllm.conformance import TinyLlama

from .interpreted_triton import SECOND_RUNNER
from .traffic import Ids, largest_error, prompts, submit, unfetched

BLOCK_BYTES = 2**15
FEW_BLOCKS = {"kv_cache_memory_bytes": 10 * BLOCK_BYTES}  # nine, of which one context needs 8
ENGINES: dict[str, dict[str, Any]] = {
    "six places": {"max_num_seqs": 6, "max_num_batched_tokens": 64},
    "one place": {"max_num_seqs": 1},
    "few blocks": {"max_num_seqs": 16, **FEW_BLOCKS},
    "own process": {
        "multiprocess": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        **FEW_BLOCKS,
    },
}
if SECOND_RUNNER:  # its kernels are interpreted
    ENGINES = {"six places": ENGINES["six places"]}

MANY_STEPS = 3000


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny: TinyLlama) -> Iterator[Any]:
    engine = tiny.engine(**ENGINES[request.param], max_loras=3)
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def fresh(engine: Any) -> None:
    engine.clear_prefix_cache()


def finish(engine: Any, queries: Iterable[Query]) -> list[Any]:
    """Step until all queries are complete and return their results or errors in order."""
    waiting = [query.query_id for query in queries]
    results: dict[int, Any] = {}
    for _ in range(MANY_STEPS):
        if len(results) == len(waiting):
            return [results[query_id] for query_id in waiting]
        for answer in engine.step():
            assert answer.query_id in waiting
            assert answer.query_id not in results
            results[answer.query_id] = answer.result if answer.error is None else answer.error
    raise AssertionError(
        f"{len(waiting) - len(results)} requests wait after {MANY_STEPS} steps"
    )


def rows(engine: Any, sequences: Iterable[Ids], adapter: str | None = None) -> list[Any]:
    return finish(engine, [submit(engine, ids, adapter) for ids in sequences])


def check(engine: Any, tiny: TinyLlama, sequences: Sequence[Ids], adapter: Any = None) -> None:
    assert largest_error(tiny, rows(engine, sequences, adapter), sequences, adapter) <= 1e-4


def grown(engine: Any, name: str) -> Any:
    """Return a function that returns the growth of a statistic from now on."""
    before = engine.statistics()[name]
    return lambda: engine.statistics()[name] - before


def slots(engine: Any) -> int:
    return int(engine.llm_engine.vllm_config.scheduler_config.max_num_seqs)


def costs(engine: Any) -> tuple[Any, Any]:
    """Return functions for the numbers of computed tokens and continued contexts."""
    return grown(engine, "tokens_computed"), grown(engine, "contexts_continued")


def token(generator: random.Random) -> int:
    return generator.randrange(3, TINY_VOCABULARY)


def test_a_context_that_grows_costs_a_token_a_step(engine: Any, tiny: Any) -> None:
    assert engine.statistics()["contexts"] == "kept"
    generator = random.Random(1)
    [context] = prompts(20)
    check(engine, tiny, [context])
    for _ in range(80):  # through several blocks
        context = (*context, token(generator))
        computed, continued = costs(engine)
        check(engine, tiny, [context])
        assert (computed(), continued()) == (1, 1)


def test_several_tokens_are_added_at_once(engine: Any, tiny: Any) -> None:
    if slots(engine) == 1:
        pytest.skip("with one place nothing is there to copy from")
    [context] = prompts(29)
    check(engine, tiny, [context])
    for added in (1, 8, 3, 7, 2, 8):
        computed, continued = costs(engine)
        context += prompts(added, seed=added)[0]
        check(engine, tiny, [context])
        assert (computed(), continued()) == (added, int(added == 1))
    continued = grown(engine, "contexts_continued")
    context += prompts(9)[0]  # served by the prefix cache
    check(engine, tiny, [context])
    assert continued() == 0


@pytest.mark.parametrize("seed", range(3))
def test_populations_grow_fork_and_wait(engine: Any, tiny: Any, seed: int) -> None:
    generator = random.Random(seed)
    [prompt] = prompts(40, seed=seed)
    population = [prompt] * 7
    for _ in range(25):
        if generator.random() < 0.3:
            population = generator.choices(population, k=7)
        moving = [i for i in range(7) if generator.random() < 0.7] or [0]
        for i in moving:
            added = [token(generator) for _ in range(generator.choice([1, 1, 1, 2, 5]))]
            population[i] = (*population[i], *added)
        sequences = [population[i] for i in moving]
        if generator.random() < 0.3:
            sequences.append(generator.choice(population))  # possibly an idle one
        check(engine, tiny, sequences)


def test_what_vllm_sampled_itself_does_not_enter_the_prefix_cache(
    engine: Any, tiny: Any
) -> None:
    for length in (31, 63):
        [context] = prompts(length)
        [row] = rows(engine, [context])
        sampled = int(row.argmax())
        check(engine, tiny, [(*context, sampled ^ 1)])  # fills the block
        check(engine, tiny, [(*context, sampled, 5), (*context, sampled ^ 1, 5)])


def test_a_fork_costs_what_differs(engine: Any, tiny: Any) -> None:
    if slots(engine) == 1:
        pytest.skip("with one place nothing is there to copy from")
    [context] = prompts(55)
    check(engine, tiny, [context])
    computed = grown(engine, "tokens_computed")
    check(engine, tiny, [(*context, 4), (*context, 5), (*context, 6, 7)])
    assert computed() == 4
    check(engine, tiny, [(*context, 5, 3), (*context, 4, 4)])
    assert computed() == 6
    check(engine, tiny, [(*context, 8)])  # a context that was not released
    assert computed() == 7
    engine.release_context(None, TokenSequence.of(context).key)
    check(engine, tiny, [(*context, 9)])  # served by the prefix cache
    assert computed() == 7 + 24
    # Rows after the forks: what was copied is read and continued.
    check(engine, tiny, [(*context, i, *prompts(20)[0]) for i in (4, 5, 6)])


def test_forks_that_begin_again_have_the_same_rows(engine: Any, tiny: Any) -> None:
    if slots(engine) == 1:
        pytest.skip("with one place nothing is there to copy from")
    [context] = prompts(40)
    check(engine, tiny, [context])
    sequences = [(*context, *added) for added in ((4, 5), (6, 7), (8, 9))]
    queries = [submit(engine, ids) for ids in sequences]
    computed, residents = grown(engine, "tokens_computed"), engine._residents.idle
    residents._restart_forks(list(residents.busy))  # as if they waited for blocks
    assert largest_error(tiny, finish(engine, queries), sequences) <= 1e-4
    assert computed() == 2 + 2 * (42 - 32)  # two of them from the prefix cache
    check(engine, tiny, [(*ids, 3) for ids in sequences])


def test_a_context_that_is_idle_is_asked_again(engine: Any, tiny: Any) -> None:
    sequences = prompts(33, 5, 64)
    for _ in range(3):
        check(engine, tiny, sequences)
    check(engine, tiny, [sequences[0]] * 3)
    check(engine, tiny, [(*sequences[0], 7)] * 2)
    assert engine.statistics()["contexts_resident"] <= slots(engine)


def test_more_contexts_than_places_take_turns(engine: Any, tiny: Any) -> None:
    generator = random.Random(2)
    contexts = prompts(*[12] * 10)
    for _ in range(6):
        check(engine, tiny, contexts)
        contexts = [(*context, token(generator)) for context in contexts]
        assert engine.statistics()["contexts_resident"] <= slots(engine)


def test_more_contexts_than_there_are_blocks_leave_room(engine: Any, tiny: Any) -> None:
    count = 600 if slots(engine) == 1 else 1200
    assert count > engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
    sequences = prompts(*[6] * count)
    for begin in range(0, len(sequences), 300):
        results = rows(engine, sequences[begin : begin + 300])
        assert largest_error(tiny, results[::30], sequences[begin : begin + 300 : 30]) <= 1e-4
        assert engine.statistics()["contexts_resident"] <= slots(engine)
    check(engine, tiny, [(*ids, 5) for ids in sequences[-20:]])


@pytest.mark.parametrize("lengths", [(64,) * 4, (96,) * 3], ids=["one is free", "none is free"])
def test_all_need_a_block_at_once(engine: Any, tiny: Any, lengths: tuple[int, ...]) -> None:
    contexts = prompts(*lengths)
    check(engine, tiny, contexts)
    for _ in range(2):
        contexts = [(*context, 9) for context in contexts]
        check(engine, tiny, contexts)


def test_a_long_prompt_is_computed_beside_contexts_that_go_on(engine: Any, tiny: Any) -> None:
    contexts = prompts(*[20] * min(4, slots(engine)))
    check(engine, tiny, contexts)
    [prompt] = prompts(250, seed=3)
    long = submit(engine, prompt)
    answered = False
    for _ in range(8):  # before the contexts need another block
        contexts = [(*context, 9) for context in contexts]
        waiting = {submit(engine, ids).query_id: ids for ids in contexts}
        while waiting:
            for answer in engine.step():
                ids = waiting.pop(answer.query_id, prompt)
                assert largest_error(tiny, [answer.result], [ids]) <= 1e-4
                answered |= answer.query_id == long.query_id
        if answered:
            break
    assert answered


def test_cancelled_requests_end_whatever_they_do(engine: Any, tiny: Any) -> None:
    sequences = prompts(40, 7, 33)
    check(engine, tiny, sequences)
    for _ in range(2):
        never_sent = submit(engine, (*sequences[0], 5))
        engine.abort(never_sent.query_id)
        long = [submit(engine, ids) for ids in prompts(250, 240, seed=6)]
        continuing = [submit(engine, (*ids, 8)) for ids in sequences]
        results = list(engine.step())
        for query in (*long, *continuing, never_sent):
            engine.abort(query.query_id)
            engine.abort(query.query_id)  # an unknown query
        assert all(answer.error is None for answer in results)
        check(
            engine,
            tiny,
            [*sequences, *[(*ids, 8) for ids in sequences], *[(*ids, 9) for ids in sequences]],
        )
    assert engine.step() == []
    assert unfetched(engine) == 0


@pytest.mark.usefixtures("adapters")
def test_contexts_of_adapters_do_not_mix(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(37)
    for length in range(37, 44):
        names = (None, "red", "blue")
        sequences = [(*prompt, *range(3, 3 + length - 37))] * 3
        queries = [
            submit(engine, ids, name) for ids, name in zip(sequences, names, strict=True)
        ]
        for name, row in zip(names, finish(engine, queries), strict=True):
            assert largest_error(tiny, [row], sequences[:1], name) <= 1e-4


@pytest.mark.usefixtures("adapters")
def test_a_removed_adapter_takes_its_contexts_along(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(40)
    for adapter in ("red", "blue"):
        engine.add_adapter("changing", tiny.adapters[adapter])
        for ids in (prompt, (*prompt, 5), (*prompt, 5, 6)):
            results = rows(engine, [ids], "changing")
            assert largest_error(tiny, results, [ids], adapter) <= 1e-4
        engine.remove_adapter("changing")
        with pytest.raises(UnknownAdapterError):
            submit(engine, (*prompt, 5, 6, 7), "changing")


def test_a_cached_prefix_is_continued(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(70)
    engine.cache_prefix(prompt, None)
    computed = grown(engine, "tokens_computed")
    check(engine, tiny, [(*prompt, 5)])
    check(engine, tiny, [(*prompt, 5, 7)])
    assert computed() == 2


def test_clearing_ends_contexts_and_empties_the_cache(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(64)
    check(engine, tiny, [prompt])
    engine.clear_prefix_cache()
    assert engine.statistics()["contexts_resident"] == 0
    computed = grown(engine, "tokens_computed")
    check(engine, tiny, [(*prompt, 5)])
    assert computed() == 65


def test_a_context_may_grow_to_the_longest(engine: Any, tiny: Any) -> None:
    [context] = prompts(engine.max_context - 3)
    for _ in range(4):
        check(engine, tiny, [context])
        context = (*context, 5)
    assert engine.statistics()["contexts_resident"] == 0
    with pytest.raises(ContextLengthError):
        submit(engine, context)
    [context] = prompts(engine.max_context - 3)
    check(engine, tiny, [context])
    with pytest.raises(ContextLengthError):
        submit(engine, (*context, 5, 5, 5, 5))
    check(engine, tiny, [(*context, 5)])


def test_wrong_tokens_of_an_extension_are_refused_alone(engine: Any, tiny: Any) -> None:
    sequences = prompts(9, 40)
    check(engine, tiny, sequences)
    queries = [submit(engine, (*sequences[0], 4))]
    for wrong in (320, -1, 2**40):
        with pytest.raises(TokenIdError, match=f"token id {wrong} at position 40"):
            submit(engine, (*sequences[1], wrong))
    with pytest.raises(UnknownAdapterError):
        submit(engine, (*sequences[1], 4), "green")
    queries.append(submit(engine, (*sequences[1], 4)))
    sequences = [(*ids, 4) for ids in sequences]
    assert largest_error(tiny, finish(engine, queries), sequences) <= 1e-4


def test_a_released_context_ends(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(40)
    key = TokenSequence.of(prompt).key
    check(engine, tiny, [prompt])
    ended = grown(engine, "contexts_ended")
    for unknown in ((None, b"no such"), ("red", key), ("green", key)):
        engine.release_context(*unknown)
    assert ended() == 0
    engine.release_context(None, key)
    assert ended() == 1
    assert engine.statistics()["contexts_resident"] == 0
    check(engine, tiny, [prompt, (*prompt, 5), (*prompt, 5, 6)])


def test_the_context_before_is_released_without_its_extension(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(40)
    check(engine, tiny, [prompt])
    check(engine, tiny, [(*prompt, 5)])
    computed = grown(engine, "tokens_computed")
    engine.release_context(None, TokenSequence.of(prompt).key)
    check(engine, tiny, [(*prompt, 5, 6)])
    assert computed() == 1


def test_what_is_computed_at_the_moment_is_not_released(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(200)
    key = TokenSequence.of(prompt).key
    ended = grown(engine, "contexts_ended")
    query = submit(engine, prompt)
    engine.release_context(None, key)
    results = engine.step()  # where steps are short, a chunk
    if not results:
        engine.release_context(None, key)
        results = [Completion(query.query_id, *finish(engine, [query]))]
    assert largest_error(tiny, [results[0].result], [prompt]) <= 1e-4
    assert ended() == 1


def test_contexts_need_not_be_kept(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(40)
    check(engine, tiny, [prompt])
    engine.keeps_contexts = False
    try:
        continued = grown(engine, "contexts_continued")
        check(engine, tiny, [(*prompt, 5)])
        check(engine, tiny, [(*prompt, 5, 6)])
        figures = engine.statistics()
        assert continued() == figures["contexts_resident"] == 0
        assert figures["contexts"] == "not kept: keep_contexts=False"
    finally:
        engine.keeps_contexts = True
    check(engine, tiny, [(*prompt, 5, 6, 7), (*prompt, 5)])


def test_contexts_that_are_computed_when_they_are_not_kept_any_more_end(
    engine: Any, tiny: Any
) -> None:
    sequences = prompts(40, 30)
    queries = [submit(engine, ids) for ids in sequences]
    engine.keeps_contexts = False
    try:
        assert largest_error(tiny, finish(engine, queries), sequences) <= 1e-4
        assert engine.statistics()["contexts_resident"] == 0
    finally:
        engine.keeps_contexts = True


def test_rows_belong_to_the_caller(engine: Any) -> None:
    [context] = prompts(10)
    for _ in range(3):
        [row] = rows(engine, [context])
        context = (*context, 5)
        assert row.shape == (TINY_VOCABULARY,)
        assert row.dtype == torch.float32
        assert row.untyped_storage().nbytes() == row.nbytes
        row.fill_(7.0)
