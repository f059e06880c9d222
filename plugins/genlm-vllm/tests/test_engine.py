"""Rows of an engine in this process, with all kinds of batches of vLLM.

The tests run on both of vLLM's model runners, see `interpreted_triton`. A step of the engine
has at most 4 requests and 64 tokens, so that most requests wait in vLLM's queue and are
computed in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from genlm import (
    ContextLengthError,
    EvaluationError,
    Query,
    TokenIdError,
    UnknownAdapterError,
)
from genlm.testing import TINY_VOCABULARY
from genlm_vllm.conformance import TinyLlama

from .interpreted_triton import ON_GPU, SECOND_RUNNER
from .traffic import (
    drawn,
    expected_draws,
    finish,
    largest_error,
    prompts,
    rows,
    submit,
    unfetched,
)


@pytest.fixture(scope="module")
def engine(tiny: TinyLlama) -> Iterator[Any]:
    engine = tiny.engine(max_num_seqs=4, max_num_batched_tokens=64)
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def fresh(engine: Any) -> None:
    engine.clear_prefix_cache()


def test_the_model_runner_is_the_one_meant(engine: Any) -> None:
    if ON_GPU:
        pytest.skip("test_gpu.py chooses the runner there")
    runner = engine._vllm.model_executor.driver_worker.worker.model_runner
    name = "cpu.model_runner" if SECOND_RUNNER else "cpu_model_runner"
    assert type(runner).__module__ == f"vllm.v1.worker.{name}"


def test_more_prompts_than_fit_a_step_each_get_their_own_row(engine: Any, tiny: Any) -> None:
    sequences = prompts(*range(1, 21), 3, 3)
    sequences += [
        sequences[4],
        sequences[4],
        (*sequences[4], 7),
    ]  # duplicates and a shared prefix
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4


def test_prompts_computed_in_chunks_get_the_row_of_their_last_token(
    engine: Any, tiny: Any
) -> None:
    sequences = prompts(200, 255, 65, 130, 250)
    before = engine.statistics()["steps"]
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4
    assert engine.statistics()["steps"] - before >= 900 // 64  # in chunks


def test_rows_of_cached_prefixes_are_the_same(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(150)
    rows(engine, [prompt])
    sequences = [prompt, (*prompt[:100], 9, 8, 7), prompt[:33], (*prompt, 5)]
    before = engine.statistics()["tokens_computed"]
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4
    computed = engine.statistics()["tokens_computed"] - before
    assert computed < sum(map(len, sequences)) - 150  # the rest came from the cache


def test_a_cached_prefix_is_not_computed_again(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(128, seed=4)
    waiting = submit(engine, prompts(40)[0])
    engine.cache_prefix(prompt, None)
    finish(engine, [waiting])  # completed meanwhile; the next step returns it
    before = engine.statistics()["tokens_computed"]
    sequences = [(*prompt, 4)]
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4
    assert engine.statistics()["tokens_computed"] - before == 1
    engine.clear_prefix_cache()
    before = engine.statistics()["tokens_computed"]
    rows(engine, sequences)
    assert engine.statistics()["tokens_computed"] - before == 129


def test_requests_join_a_running_batch(engine: Any, tiny: Any) -> None:
    sequences = prompts(240, 30, 5, 90)
    queries = [submit(engine, sequences[0])]
    results = {}
    for ids in sequences[1:]:
        results |= {answer.query_id: answer.result for answer in engine.step()}
        queries.append(submit(engine, ids))
    while len(results) < len(sequences):
        results |= {answer.query_id: answer.result for answer in engine.step()}
    in_order = [results[query.query_id] for query in queries]
    assert largest_error(tiny, in_order, sequences) <= 1e-4


def test_a_continuation_does_not_depend_on_chunks_or_company(engine: Any, tiny: Any) -> None:
    sequences = prompts(200, 9, 65, engine.max_context - 7)
    alone = [expected_draws(tiny, ids, 8, seed) for seed, ids in enumerate(sequences)]
    assert drawn(engine, sequences, 8) == alone
    engine.clear_prefix_cache()
    beside = [submit(engine, ids) for ids in sequences]
    assert drawn(engine, sequences, 8, beside) == alone


@pytest.mark.usefixtures("adapters")
def test_adapters_and_the_base_model_mix_in_a_batch(engine: Any, tiny: Any) -> None:
    sequences = prompts(70, 3, 140)
    names = (None, "red", "blue")
    for _ in range(2):  # computed, then from the prefix cache
        queries = [submit(engine, ids, name) for ids in sequences for name in names]
        results = finish(engine, queries)
        for place, name in enumerate(names):
            assert largest_error(tiny, results[place::3], sequences, name) <= 1e-4, name


def test_aborted_requests_leave_nothing_and_do_not_affect_others(
    engine: Any, tiny: Any
) -> None:
    sequences = prompts(250, 40, 200, 7, 230, 12)
    queries = [submit(engine, ids) for ids in sequences]
    for query in queries[::2]:
        engine.abort(query.query_id)
    assert largest_error(tiny, finish(engine, queries[1::2]), sequences[1::2]) <= 1e-4
    sequences = prompts(250, 40, 200, 70, 230, 150)
    queries = [submit(engine, ids) for ids in sequences]
    engine.step()
    engine.step()  # some are half computed
    for query in queries[:4]:
        engine.abort(query.query_id)
    assert largest_error(tiny, finish(engine, queries[4:]), sequences[4:]) <= 1e-4
    engine.abort(queries[0].query_id)  # an unknown query
    assert engine.step() == []


def test_rows_of_aborted_requests_go_although_none_is_answered(engine: Any) -> None:
    for seed in range(5):
        query = submit(engine, prompts(250, seed=seed)[0])
        assert engine.step() == []  # a chunk
        engine.abort(query.query_id)
    engine.step()
    assert unfetched(engine) == 0


def test_rows_belong_to_the_caller(engine: Any) -> None:
    for row in rows(engine, prompts(3, 4, 5)):
        assert row.shape == (TINY_VOCABULARY,)
        assert row.dtype == torch.float32
        assert abs(float(row.logsumexp(-1))) <= 1e-4
        assert row.untyped_storage().nbytes() == row.nbytes
        assert not row.is_inference()
        row.fill_(7.0)


@pytest.mark.usefixtures("adapters")
def test_wrong_queries_are_refused_alone(engine: Any, tiny: Any) -> None:
    sequences = prompts(9, 90)
    queries = [submit(engine, ids) for ids in sequences]
    with pytest.raises(UnknownAdapterError, match=r"'green'\. Loaded: blue, red"):
        submit(engine, (3, 4), "green")
    with pytest.raises(
        ContextLengthError, match="256 tokens is longer than the context of 255"
    ):
        submit(engine, (3,) * 256)
    with pytest.raises(TokenIdError, match="token id 320 at position 1"):
        submit(engine, (3, 320))
    assert largest_error(tiny, finish(engine, queries), sequences) <= 1e-4


def test_the_longest_context_is_served(engine: Any, tiny: Any) -> None:
    sequences = prompts(engine.max_context)
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4


def broken(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("out of memory")


def model_class(engine: Any) -> Any:
    return type(engine._vllm.model_executor.driver_worker.worker.model_runner.model)


@pytest.mark.parametrize("place", ["forward", "sampler"])
def test_a_step_that_raises_fails_its_queries_and_leaves_nothing_behind(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """VLLM has counted tokens as computed, and cached their blocks, before it computes."""
    sequences = prompts(100, 50, 40)
    rows(engine, [sequences[0][:33]])  # stays
    queries = [submit(engine, ids) for ids in sequences]
    engine.step()
    with monkeypatch.context() as patch:
        if place == "forward":
            patch.setattr(model_class(engine), "forward", broken)
        else:
            patch.setattr("genlm_vllm.row_sampler.RowSampler.__call__", broken)
        results = finish(engine, queries)
    assert "out of memory" in {
        str(result) for result in results if isinstance(result, Exception)
    }
    for _ in range(2):  # computed, then from the prefix cache
        assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4
    assert unfetched(engine) == 0


def test_the_prefix_cache_is_cleared_after_the_queries_that_run(engine: Any, tiny: Any) -> None:
    prefix, prompt = prompts(64, 250, seed=9)
    engine.cache_prefix(prefix, None)
    query = submit(engine, prompt)
    assert engine.step() == []
    engine.clear_prefix_cache()
    assert largest_error(tiny, finish(engine, [query]), [prompt]) <= 1e-4
    before = engine.statistics()["tokens_computed"]
    assert largest_error(tiny, rows(engine, [(*prefix, 5)]), [(*prefix, 5)]) <= 1e-4
    assert engine.statistics()["tokens_computed"] - before == 65


def test_a_prefix_that_fails_fails_the_queries_beside_it(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = prompts(100, 250, seed=7)
    waiting = submit(engine, sequences[1])
    with monkeypatch.context() as patch:
        patch.setattr(model_class(engine), "forward", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.cache_prefix(sequences[0], None)
    [error] = finish(engine, [waiting])
    assert str(error) == "out of memory"
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4


def test_a_request_that_vllm_drops_ends_with_an_error(engine: Any, tiny: Any) -> None:
    core = engine._vllm.engine_core.engine_core
    query = submit(engine, prompts(200)[0])
    assert engine.step() == []  # a chunk
    core.abort_requests(list(core.scheduler.requests))
    [error] = finish(engine, [query])
    assert isinstance(error, EvaluationError)
    assert "vLLM ended the request" in str(error)
    sequences = prompts(9)
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4


def no_logits(*_: Any) -> Any:
    raise EvaluationError("vLLM finished the request without computing its row")


def test_a_finished_request_without_a_row_is_an_error(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm_vllm.row_sampler.RowSampler.take", no_logits)
    [error] = rows(engine, prompts(9))
    assert isinstance(error, EvaluationError)
    assert "without computing its row" in str(error)


def test_many_requests_leave_no_growth(engine: Any) -> None:
    for _ in range(10):
        rows(engine, prompts(2, 3, 4, 5, 6, 7))
    assert unfetched(engine) == 0
    assert not engine._residents.unanswered
    assert not engine._ready
    engine.keeps_contexts = False
    scheduler = engine._vllm.engine_core.engine_core.scheduler
    assert not scheduler.requests
    assert engine.statistics()["contexts_resident"] == 0
    engine.keeps_contexts = True


def test_figures_add_up(engine: Any) -> None:
    before = engine.statistics()
    rows(engine, prompts(10, 20, seed=9))
    drawn(engine, prompts(7, seed=11), 5)
    after = engine.statistics()
    grown = {name: after[name] - before[name] for name in after if "tokens_" in name[:7]}
    assert grown == {"tokens_evaluated": 75, "tokens_computed": 41}
    assert after["processes"] == "this"
    assert after["dtype"] == "float32"


def test_a_query_can_be_a_lone_token(engine: Any, tiny: Any) -> None:
    engine.submit(Query(10**9, (5,)))
    [answer] = engine.step()
    assert (answer.result.cpu() - tiny.logprobs((5,))).abs().max() <= 1e-4
