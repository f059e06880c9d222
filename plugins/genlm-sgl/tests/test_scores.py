"""Scores of all positions of a text in one pass, equal to those of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from row_oracle import check_scores, check_scores_of_a_model

from genlm import (
    Capability,
    EvaluationError,
    Query,
)
from genlm_sgl.conformance import TinyLlama

from .conftest import SETTINGS, adapted_engine
from .driving import collected, prompts_of

Ids = tuple[int, ...]


@pytest.fixture(scope="module", params=SETTINGS)
def engine(request: pytest.FixtureRequest, tiny: TinyLlama) -> Iterator[Any]:
    engine = adapted_engine(tiny, SETTINGS[request.param])
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def fresh(engine: Any) -> None:
    engine.clear_prefix_cache()


def submit(engine: Any, number: int, text: Ids, start: int, adapter: str | None = None) -> None:
    engine.submit(Query(number, text[:-1], adapter, targets=text[start:]))


def scores(engine: Any, spans: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Put texts, their starts and perhaps adapters through the engine."""
    for number, span in enumerate(spans):
        submit(engine, number, *span)
    return collected(engine, range(len(spans)))


def texts_of(tiny: TinyLlama) -> list[tuple[Ids, int]]:
    starts = [1, 3, 60, 1, 31, 32, 33, 64, 90, 2]
    texts = prompts_of(2, 9, 90, 100, 64, 65, 65, 130, 91, 40)
    likely = texts[4]
    for _ in range(5):
        likely = (*likely, int(tiny.logprobs(likely).argmax()))
    return [*zip(texts, starts, strict=True), (likely, 60)]


def test_all_positions_are_those_of_rows(engine: Any, tiny: Any) -> None:
    assert Capability.SCORE in engine.capabilities
    assert engine.statistics()["scores"] == "in one pass"
    spans = texts_of(tiny)
    for span in spans:  # one by one
        check_scores(*scores(engine, [span]), tiny, *span)
    engine.clear_prefix_cache()
    for result, span in zip(scores(engine, spans), spans, strict=True):
        check_scores(result, tiny, *span)


def test_what_the_cache_knows_of_the_targets_is_computed_again(engine: Any, tiny: Any) -> None:
    [text] = prompts_of(110)
    for cached in (None, text, (*text, 5)):  # nothing, a prefix, and a context
        if cached is not None:
            engine.submit(Query(0, cached))
            collected(engine, [0])
        for start in (109, 100, 65, 33, 32, 1):
            check_scores(*scores(engine, [(text, start)]), tiny, text, start)


def test_a_prompt_that_is_known_is_not_computed_again(engine: Any, tiny: Any) -> None:
    [prompt] = prompts_of(96)
    for length in range(80, 97):
        engine.submit(Query(0, prompt[:length]))
        collected(engine, [0])
    before = engine.statistics()["tokens_computed"]
    for number in range(4):
        text = (*prompt, *prompts_of(16, seed=number)[0])
        check_scores(*scores(engine, [(text, 96)]), tiny, text, 96)
    # The last token of the prompt predicts the first target.
    assert engine.statistics()["tokens_computed"] - before == 4 * 16


def test_adapters_have_their_own_scores(engine: Any, tiny: Any) -> None:
    spans = [
        (text, start, name)
        for text, start in zip(prompts_of(40, 70), (1, 33), strict=True)
        for name in (None, "red", "blue")
    ]
    for result, span in zip(scores(engine, spans), spans, strict=True):
        check_scores(result, tiny, *span)


def test_scores_and_rows_mix(engine: Any, tiny: Any) -> None:
    texts = prompts_of(70, 33, 90)
    for place, text in enumerate(texts):
        submit(engine, 2 * place, text, 10)
        engine.submit(Query(2 * place + 1, (*text, 9)))
    results = collected(engine, range(6))
    for place, text in enumerate(texts):
        check_scores(results[2 * place], tiny, text, 10)
        assert (results[2 * place + 1] - tiny.logprobs((*text, 9))).abs().max() <= 1e-4


def test_a_bias_of_the_output_counts(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang drops the bias, and the engine adds it to the logits of all passes."""
    [text] = prompts_of(60)
    runner = engine._served
    bias = torch.linspace(-3, 3, runner.embedding_rows)
    monkeypatch.setattr(runner, "output_bias", bias)
    rows = (tiny.all_logprobs(text[:-1]) + bias[: tiny.vocab_size]).log_softmax(-1)
    [result] = scores(engine, [(text, 1)])
    expected = rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    assert float((result.logprobs - expected).abs().max()) <= 1e-4


def test_the_longest_text_is_scored(engine: Any, tiny: Any) -> None:
    [text] = prompts_of(engine.max_context + 1)
    check_scores(*scores(engine, [(text, 1)]), tiny, text, 1)


def test_decoded_texts_have_the_same_scores(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._choice.path.forward, "_reads_states", False)
    spans = texts_of(tiny)
    for result, span in zip(scores(engine, spans), spans, strict=True):
        check_scores(result, tiny, *span)


def test_cancelled_texts_leave_nothing(engine: Any, tiny: Any) -> None:
    texts = prompts_of(110, 100, 90, 40)
    for number, text in enumerate(texts):
        submit(engine, number, text, 1)
    results = {item.query_id: item.result for item in engine.step()}
    for number in (0, 1, 0):
        engine.abort(number)
    waiting = [number for number in (2, 3) if number not in results]
    results |= zip(waiting, collected(engine, waiting) if waiting else [], strict=True)
    for number in (2, 3):
        check_scores(results[number], tiny, texts[number], 1)


def test_a_text_without_a_distribution_fails_alone(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = prompts_of(20, 12)
    layers = engine.model.model
    forward = type(layers).forward

    def spoiled(self: Any, input_ids: Any, *arguments: Any, **options: Any) -> Any:
        states = forward(self, input_ids, *arguments, **options).clone()
        if len(input_ids) >= 11:
            matches = (input_ids.unfold(0, 11, 1) == torch.tensor(wrong[:11])).all(1)
            states[matches.nonzero()[:, 0] + 3] = torch.nan
        return states

    with monkeypatch.context() as patch:
        patch.setattr(type(layers), "forward", spoiled)
        result, error = scores(engine, [(right, 5), (wrong, 1)])
    check_scores(result, tiny, right, 5)
    assert isinstance(error, EvaluationError)
    assert "1 of 11 rows that are not distributions" in str(error)


def test_a_model_scores_texts(engine: Any, tiny: Any) -> None:
    """`AsyncLM` requests all positions in one query, and the same text once."""
    texts = prompts_of(70, 9, 33)
    check_scores_of_a_model(engine, tiny, texts, "forwards")
