"""Scores of all positions of a text in one pass, equal to those of its rows.

Each test runs on three engines: one that computes prompts in chunks, one whose KV cache is so
small that requests are preempted, and one in other processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from row_oracle import check_scores, check_scores_of_a_model

from genlm import (
    Capability,
    ContextLengthError,
    EvaluationError,
    TokenIdError,
)
from genlm.prefix import PieceScores
from genlm_vllm import scores as scoring
from genlm_vllm.conformance import TinyLlama

from .interpreted_triton import SECOND_RUNNER
from .traffic import (
    Ids,
    expected_draws,
    finish,
    largest_error,
    prompts,
    rows,
    submit,
    unfetched,
)

BLOCK_BYTES = 2**15
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_seqs": 6, "max_num_batched_tokens": 64},
    "few blocks": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 20,  # several texts at once
        "kv_cache_memory_bytes": 10 * BLOCK_BYTES,
    },
    "own process": {
        "multiprocess": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    },
}
if SECOND_RUNNER:  # its kernels are interpreted
    ENGINES = {"chunks": ENGINES["chunks"]}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny: TinyLlama) -> Iterator[Any]:
    engine = tiny.engine(**ENGINES[request.param], max_loras=3)
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def fresh(engine: Any) -> Iterator[None]:
    engine.clear_prefix_cache()
    yield
    rows(engine, [(5,)])  # fetches, and drops what was abandoned
    engine.step()
    assert unfetched(engine) == 0
    assert not engine._residents.unanswered


def score(engine: Any, text: Ids, start: int, adapter: str | None = None) -> Any:
    return submit(engine, text[:-1], adapter, targets=text[start:])


def is_small(engine: Any) -> bool:
    """Whether the engine computes in this process with a small KV cache."""
    blocks = int(engine.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    return bool(blocks <= 10 and engine.statistics()["processes"] == "this")


def likely(tiny: TinyLlama, text: Ids, length: int) -> Ids:
    """A text continued by its most likely tokens."""
    return (*text, *expected_draws(tiny, text, length, 0, temperature=0.0))


def texts_of(tiny: TinyLlama) -> list[tuple[Ids, int]]:
    starts = [1, 3, 60, 1, 31, 32, 33, 64, 199, 2]
    texts = prompts(2, 9, 90, 200, 64, 65, 65, 130, 200, 40)
    return [*zip(texts, starts, strict=True), (likely(tiny, texts[4], 5), 60)]


def test_all_positions_are_those_of_rows(engine: Any, tiny: Any) -> None:
    assert Capability.SCORE in engine.capabilities
    texts = texts_of(tiny)
    for text, start in texts:  # one by one
        [scores] = finish(engine, [score(engine, text, start)])
        check_scores(scores, tiny, text, start)
    engine.clear_prefix_cache()
    results = finish(engine, [score(engine, text, start) for text, start in texts])
    for scores, (text, start) in zip(results, texts, strict=True):
        check_scores(scores, tiny, text, start)


def test_texts_that_continue_a_context_share_its_tokens(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(70)
    rows(engine, [prompt])
    texts = [(*prompt, 4, 5), (*prompt, 4, 6, 7), (*prompt, *range(20, 30))]
    starts = [70, 71, 74]  # of which the first token is computed with the last one before it
    computed = engine.statistics()["tokens_computed"]
    pairs = list(zip(texts, starts, strict=True))
    results = finish(engine, [score(engine, text, start) for text, start in pairs])
    for scores, (text, start) in zip(results, pairs, strict=True):
        check_scores(scores, tiny, text, start)
    if not is_small(engine):
        assert engine.statistics()["tokens_computed"] - computed == 2 + 2 + 9


def test_texts_that_continue_a_fork_before_its_first_step(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(70)
    rows(engine, [prompt])
    contexts = [(*prompt, token) for token in (4, 5)]  # the second is a fork
    text = (*contexts[1], 6, 7)
    queries = [*(submit(engine, ids) for ids in contexts), score(engine, text, 71)]
    *found, scores = finish(engine, queries)
    assert largest_error(tiny, found, contexts) <= 1e-4
    check_scores(scores, tiny, text, 71)


def test_what_the_cache_knows_of_the_targets_is_computed_again(engine: Any, tiny: Any) -> None:
    [text] = prompts(150)
    rows(engine, [text])
    for start in (149, 129, 128, 127, 100, 65, 33, 32, 1):
        [scores] = finish(engine, [score(engine, text, start)])
        check_scores(scores, tiny, text, start)
        [scores] = finish(engine, [score(engine, (*text[:120], 7, 8), start % 120 + 1)])
        check_scores(scores, tiny, (*text[:120], 7, 8), start % 120 + 1)


def test_out_of_memory_fails_the_scores_and_not_vllm(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine.statistics()["processes"] == "own":
        pytest.skip("vLLM is in the other process")
    failing = {1}
    add = scoring._add

    def fails_once(*arguments: Any) -> None:
        if failing:
            failing.clear()
            raise torch.OutOfMemoryError("out of memory")
        add(*arguments)

    monkeypatch.setattr(scoring, "_add", fails_once)
    [text, other] = prompts(150, 9)
    error, row = finish(engine, [score(engine, text, 1), submit(engine, other)])
    assert isinstance(error, EvaluationError)
    assert "OutOfMemoryError: out of memory" in str(error)
    assert largest_error(tiny, [row], [other]) <= 1e-4
    [scores] = finish(engine, [score(engine, text, 1)])
    check_scores(scores, tiny, text, 1)


def test_a_prompt_that_the_cache_knows_is_not_computed_again(engine: Any, tiny: Any) -> None:
    [prompt] = prompts(140)
    rows(engine, [prompt])
    engine.keeps_contexts = False  # residents hold blocks
    engine.keeps_contexts = True
    before = engine.statistics()["tokens_computed"]
    for number in range(4):
        text = (*prompt, *prompts(6, seed=number)[0])
        [scores] = finish(engine, [score(engine, text, 140)])
        check_scores(scores, tiny, text, 140)
    assert engine.statistics()["tokens_computed"] - before == 4 * (145 - 128)


@pytest.mark.usefixtures("adapters")
def test_adapters_have_their_own_scores(engine: Any, tiny: Any) -> None:
    spans = [(text, start) for text in prompts(40, 90) for start in (1, 33)]
    names = (None, "red", "blue")
    queries = [score(engine, text, start, name) for text, start in spans for name in names]
    results = iter(finish(engine, queries))
    for text, start in spans:
        for name in names:
            check_scores(next(results), tiny, text, start, name)


def test_scores_and_rows_mix(engine: Any, tiny: Any) -> None:
    texts = prompts(70, 33, 140)
    rows(engine, texts)  # contexts that stay
    for _ in range(2):
        queries: list[Any] = []
        for text in texts:
            queries += [score(engine, text, 10), submit(engine, (*text, 9))]
        results = finish(engine, queries)
        for place, text in enumerate(texts):
            check_scores(results[2 * place], tiny, text, 10)
            assert largest_error(tiny, [results[2 * place + 1]], [(*text, 9)]) <= 1e-4


def test_preempted_texts_begin_again(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are computed in turns, in a KV cache that does not hold all of them."""
    preempted = []
    if is_small(engine):
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def recorded(request: Any, *arguments: Any, **options: Any) -> None:
            preempted.append(request.num_computed_tokens)
            preempt(request, *arguments, **options)

        monkeypatch.setattr(scheduler, "_preempt_request", recorded)
    texts = prompts(*[180] * 3, seed=7)
    results = finish(engine, [score(engine, text, 20) for text in texts])
    assert not is_small(engine) or any(computed > 32 for computed in preempted), preempted
    for scores, text in zip(results, texts, strict=True):
        check_scores(scores, tiny, text, 20)


def test_the_longest_text_is_scored(engine: Any, tiny: Any) -> None:
    [text] = prompts(engine.max_context + 1)
    [scores] = finish(engine, [score(engine, text, 1)])
    check_scores(scores, tiny, text, 1)
    with pytest.raises(ContextLengthError):
        score(engine, (*text, 5), 1)


def test_pieces_of_any_size_give_the_same(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm_vllm.scores._LOGITS_PER_PIECE", 300 * 7)
    monkeypatch.setattr("genlm_vllm.scores._MIN_POSITIONS", 1)
    for text, start in texts_of(tiny):
        [scores] = finish(engine, [score(engine, text, start)])
        check_scores(scores, tiny, text, start)


def test_wrong_targets_are_refused_alone(engine: Any, tiny: Any) -> None:
    [text] = prompts(30)
    query = score(engine, text, 5)
    for wrong in (-1, 300, 319):
        with pytest.raises(TokenIdError, match=f"token id {wrong} at position 1 of targets"):
            submit(engine, text[:-1], targets=(5, wrong))
    check_scores(finish(engine, [query])[0], tiny, text, 5)


def test_cancelled_texts_leave_nothing(engine: Any, tiny: Any) -> None:
    texts = prompts(200, 190, 180, 40)
    queries = [score(engine, text, 1) for text in texts]
    results = list(engine.step())
    for query in queries[:2]:
        engine.abort(query.query_id)
        engine.abort(query.query_id)
    assert not results
    for scores, text in zip(finish(engine, queries[2:]), texts[2:], strict=True):
        check_scores(scores, tiny, text, 1)


def test_scores_that_are_not_numbers_are_an_error(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine.statistics()["processes"] == "own":
        pytest.skip("the store is in the other process")
    [text] = prompts(20)
    add = PieceScores.add

    def spoiled(scores: Any, keys: Any, logits: Any) -> None:
        fourth = torch.tensor([3], device=logits.device)
        add(scores, keys, logits.index_fill(0, fourth, torch.nan))

    with monkeypatch.context() as patch:
        patch.setattr(PieceScores, "add", spoiled)
        [error] = finish(engine, [score(engine, text, 5)])
    assert isinstance(error, EvaluationError)
    assert "1 of 15 rows that are not distributions" in str(error)
    check_scores(finish(engine, [score(engine, text, 5)])[0], tiny, text, 5)


def test_a_model_scores_texts(engine: Any, tiny: Any) -> None:
    """`AsyncLM` requests all positions in one query, and the same text once."""
    texts = prompts(70, 9, 33)
    check_scores_of_a_model(engine, tiny, texts, "steps")
