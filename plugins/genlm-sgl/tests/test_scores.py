"""Scores of all positions of a text in one pass, equal to those of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from row_oracle import check_scores, check_scores_of_a_model

from genlm import (
    Capability,
    ContextLengthError,
    EvaluationError,
    Query,
    SamplingParams,
    TokenIdError,
)
from genlm_sgl.conformance import TinyLlama

from .conftest import SETTINGS, adapted_engine
from .driving import collected, continuation, prompts_of

Ids = tuple[int, ...]


@pytest.fixture(scope="module", params=SETTINGS)
def engine(request: pytest.FixtureRequest, tiny: TinyLlama) -> Iterator[Any]:
    engine = adapted_engine(tiny, SETTINGS[request.param])
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def fresh(engine: Any) -> Iterator[None]:
    engine.clear_prefix_cache()
    yield
    assert not len(engine._requests)


def submit(engine: Any, number: int, text: Ids, start: int, adapter: str | None = None) -> None:
    engine.submit(Query(number, text[:-1], adapter, targets=text[start:]))


def scores(engine: Any, asked: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Put texts, their starts and perhaps adapters through the engine."""
    for number, each in enumerate(asked):
        submit(engine, number, *each)
    return collected(engine, range(len(asked)))


def texts_of(tiny: TinyLlama) -> list[tuple[Ids, int]]:
    starts = [1, 3, 60, 1, 31, 32, 33, 64, 90, 2]
    texts = prompts_of(2, 9, 90, 100, 64, 65, 65, 130, 91, 40)
    greedy = SamplingParams(5, 0.0, frozenset(), 0)
    likely = (*texts[4], *continuation(tiny, texts[4], greedy))
    return [*zip(texts, starts, strict=True), (likely, 60)]


def test_all_positions_are_those_of_rows(engine: Any, tiny: Any) -> None:
    assert Capability.SCORE in engine.capabilities
    assert engine.statistics()["scores"] == "in one pass"
    asked = texts_of(tiny)
    for each in asked:  # one by one
        check_scores(*scores(engine, [each]), tiny, *each)
    engine.clear_prefix_cache()
    for found, each in zip(scores(engine, asked), asked, strict=True):
        check_scores(found, tiny, *each)


def test_what_the_cache_knows_of_the_targets_is_computed_again(engine: Any, tiny: Any) -> None:
    [text] = prompts_of(110)
    for known in (None, text, (*text, 5)):  # nothing, a prefix that is cached, and a context
        if known is not None:
            engine.submit(Query(0, known))
            collected(engine, [0])
        for start in (109, 100, 65, 33, 32, 1):
            check_scores(*scores(engine, [(text, start)]), tiny, text, start)


def test_a_prompt_that_is_known_is_not_computed_again(engine: Any, tiny: Any) -> None:
    [prompt] = prompts_of(96)
    for length in range(80, 97):  # what it decodes is not in the radix cache yet
        engine.submit(Query(0, prompt[:length]))
        collected(engine, [0])
    page = engine._api.page_size
    before = engine.statistics()["tokens_computed"]
    for number in range(4):
        text = (*prompt, *prompts_of(16, seed=number)[0])
        check_scores(*scores(engine, [(text, 96)]), tiny, text, 96)
    # The last token of the prompt predicts the first target.
    assert engine.statistics()["tokens_computed"] - before == 4 * (111 - 95 // page * page)


def test_adapters_have_their_own_scores(engine: Any, tiny: Any) -> None:
    asked = [
        (text, start, name)
        for text, start in zip(prompts_of(40, 70), (1, 33), strict=True)
        for name in (None, "red", "blue")
    ]
    for found, each in zip(scores(engine, asked), asked, strict=True):
        check_scores(found, tiny, *each)


def test_scores_rows_and_continuations_mix(engine: Any, tiny: Any) -> None:
    texts = prompts_of(70, 33, 90)
    for number, text in enumerate(texts):  # contexts that stay
        engine.submit(Query(number, text))
    collected(engine, range(3))
    plan = SamplingParams(20, 1.0, frozenset(), 2)
    for _ in range(2):
        for place, text in enumerate(texts):
            engine.submit(Query(3 * place, text, None, plan))
            submit(engine, 3 * place + 1, text, 10)
            engine.submit(Query(3 * place + 2, (*text, 9)))
        found = collected(engine, range(9))
        for place, text in enumerate(texts):
            tokens, scored, row = found[3 * place : 3 * place + 3]
            assert tokens == continuation(tiny, text, plan)
            check_scores(scored, tiny, text, 10)
            assert (row - tiny.logprobs((*text, 9))).abs().max() <= 1e-4


def test_a_bias_of_the_output_counts(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang drops it, and the engine adds it to the logits of all passes."""
    [text] = prompts_of(60)
    bias = torch.linspace(-3, 3, engine.embedding_rows)
    monkeypatch.setattr(engine._api, "output_bias", bias)
    rows = (tiny.all_logprobs(text[:-1]) + bias[: tiny.vocab_size]).log_softmax(-1)
    [found] = scores(engine, [(text, 1)])
    expected = rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    assert float((found.logprobs - expected).abs().max()) <= 1e-4


def test_the_longest_text_is_scored(engine: Any, tiny: Any) -> None:
    [text] = prompts_of(engine.max_context + 1)
    check_scores(*scores(engine, [(text, 1)]), tiny, text, 1)
    with pytest.raises(ContextLengthError):
        submit(engine, 0, (*text, 5), 1)


def test_pieces_of_any_size_give_the_same(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    original = type(engine._api)._biased

    def recorded(api: Any, logits: torch.Tensor) -> torch.Tensor:
        sizes.append(len(logits))
        return original(api, logits)

    monkeypatch.setattr(type(engine._api), "_biased", recorded)
    monkeypatch.setattr("genlm_sgl.scores._VALUES", 300 * 7)
    asked = texts_of(tiny)
    for found, each in zip(scores(engine, asked), asked, strict=True):
        check_scores(found, tiny, *each)
    assert sorted(sizes)[len(sizes) // 2] == 7  # others are rows of requests
    assert max(sizes) <= len(asked)


def test_wrong_targets_are_refused_alone(engine: Any, tiny: Any) -> None:
    [text] = prompts_of(30)
    submit(engine, 0, text, 5)
    for wrong in (-1, 300, 319):
        with pytest.raises(TokenIdError, match=f"token id {wrong} at position 1 of targets"):
            engine.submit(Query(1, text[:-1], targets=(5, wrong)))
    check_scores(*collected(engine, [0]), tiny, text, 5)


def test_cancelled_texts_leave_nothing(engine: Any, tiny: Any) -> None:
    texts = prompts_of(110, 100, 90, 40)
    for number, text in enumerate(texts):
        submit(engine, number, text, 1)
    found = {each.query_id: each.result for each in engine.step()}
    for number in (0, 1, 0):
        engine.abort(number)
    waiting = [number for number in (2, 3) if number not in found]
    found |= zip(waiting, collected(engine, waiting) if waiting else [], strict=True)
    for number in (2, 3):
        check_scores(found[number], tiny, texts[number], 1)


def test_a_text_without_a_distribution_fails_alone(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = prompts_of(20, 12)
    original = engine._requests.on_hidden_states

    def spoiled(rids: Any, begins: Any, lengths: Any, states: Any, compute: Any) -> None:
        begin = sum(lengths[: lengths.index(11)])
        states = states.clone()
        states[begin + 3] = torch.nan
        original(rids, begins, lengths, states, compute)

    with monkeypatch.context() as patch:
        patch.setattr(engine._requests, "on_hidden_states", spoiled)
        found, error = scores(engine, [(right, 5), (wrong, 1)])
    check_scores(found, tiny, right, 5)
    assert isinstance(error, EvaluationError)
    assert "1 of 11 rows that are not distributions" in str(error)


def test_a_position_that_was_not_computed_is_an_error(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm_sgl.engine.limit_reuse", lambda req, length: None)
    [text] = prompts_of(60)
    scores(engine, [(text, 1)])
    [error] = scores(engine, [(text, 1)])
    assert isinstance(error, EvaluationError)
    assert "the radix cache served others" in str(error)


def test_a_model_scores_texts(engine: Any, tiny: Any) -> None:
    """`AsyncLM` asks for all positions at once, and once for the same text."""

    texts = prompts_of(70, 9, 33)
    check_scores_of_a_model(engine, tiny, texts, "batches")
