"""Checks of reductions, draws and scores, whether the engine or the core computes them."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from genlm import (
    Capability,
    DrawnToken,
    GenlmError,
    GroupReduction,
    Mask,
    OutputCache,
    Reduction,
)
from genlm.plugin import stream_uniform
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.target import TokenTuple


@dataclass(frozen=True)
class LargestLogprob(Reduction):
    """A reduction as a program may define it; it can be made to fail."""

    fails: bool = False

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[LargestLogprob]) -> Sequence[float]:
        """Return the largest entry of each row."""
        if any(request.fails for request in requests):
            raise ArithmeticError("this reduction fails")
        largest: list[float] = rows.amax(-1).tolist()
        return largest


class TokenAndMaxLogprobs(GroupReduction):
    """The log-probability of a token of each member, and the largest one of its row."""

    def __init__(self, token_ids: TokenTuple, *, fails: bool = False) -> None:
        self.token_ids = torch.tensor(token_ids, dtype=torch.long)
        self.fails = fails

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return two columns."""
        if self.fails:
            raise ArithmeticError("this reduction fails")
        row_of = row_of.to(rows.device)
        token_ids = self.token_ids[members].to(rows.device)
        return rows[row_of, token_ids], rows.amax(-1)[row_of]


@engine_check()
def reductions_are_of_the_row(fixture: EngineFixture) -> None:
    """Log-probabilities of tokens, top-k, masses and other reductions agree with the row."""
    lm, size = fixture.load(output_cache=OutputCache(0)), fixture.lm.vocab_size
    ids = st.lists(st.integers(0, size - 1), max_size=8)

    def holds(token_ids: TokenTuple, queried_ids: list[int], k: int) -> None:
        row, example = fixture.expected(token_ids), {"context": token_ids, "ids": queried_ids}
        logprobs = fixture.run(lm.token_logprobs(token_ids, queried_ids))
        fixture.check_logprobs(logprobs, row[queried_ids], reduction="tokens", **example)
        _check_top(fixture, row, fixture.run(lm.top_tokens(token_ids, k)), k)
        mass = fixture.run(lm.log_mass(token_ids, Mask(queried_ids, size)))
        expected = row[sorted(set(queried_ids))].logsumexp(-1)
        fixture.check_logprobs(mass, expected, reduction="log mass", **example)
        largest = fixture.run(lm.reduce(token_ids, LargestLogprob()))
        fixture.check_logprobs(largest, row.max(), reduction="largest", context=token_ids)

    fixture.for_all(
        holds, token_ids=fixture.sequences(), queried_ids=ids, k=st.integers(1, min(size, 20))
    )
    holds(fixture.some_sequences(1)[0], [], 1)


def _check_top(fixture: EngineFixture, row: torch.Tensor, top: Any, k: int) -> None:
    """Raise `CheckFailure` unless tokens are the k most likely ones, up to rounding."""
    expected = row.sort(descending=True).values[:k]
    fixture.check_logprobs(top.logprobs, expected, reduction="top tokens", k=k)
    fixture.check_logprobs(row[top.token_ids], expected, reduction="ids of top tokens", k=k)
    ordered = bool((top.logprobs[1:] <= top.logprobs[:-1]).all())
    expect(
        ordered and len(set(top.token_ids.tolist())) == k,
        f"{k} different tokens in descending order",
        f"{top.logprobs.tolist()} of {top.token_ids.tolist()}",
    )


@engine_check()
def draws_are_those_of_the_seed(fixture: EngineFixture) -> None:
    """A seed and a context determine a draw; requests leave global generators unchanged."""
    lm, size = fixture.load(output_cache=OutputCache(0)), fixture.lm.vocab_size
    contexts, generator = fixture.some_sequences(6), np.random.default_rng(fixture.seed)
    fixture.run(fixture.lm.batch_next_token_logprobs(contexts))  # into its output cache
    draws: list[tuple[TokenTuple, dict[str, Any]]] = []
    for number, context in enumerate(contexts):
        row = fixture.expected(context)
        possible = [i for i in range(size) if row[i] > -math.inf]
        masked_ids = sorted({int(generator.choice(possible)) for _ in range(8)})
        settings: list[dict[str, Any]] = [
            {},
            {"mask": masked_ids},
            {"mask": masked_ids, "temperature": 0.5 + number / 4},
            {"temperature": 0.0},
            {"top_k": 2, "mask": masked_ids},
            {"top_p": 0.5, "temperature": 1.5},
            {"min_p": 0.3, "temperature": 1.5},
            {"bias": torch.from_numpy(generator.normal(size=size))},
            {"bias": generator.normal(size=size), "mask": masked_ids, "temperature": 0.8},
        ]
        draws += [(context, {"seed": fixture.seed + i} | s) for i, s in enumerate(settings)]
    requests: list[Any] = [lm.draw(context, **arguments) for context, arguments in draws]
    before = _states_of_generators()
    drawn = fixture.gather([*requests, *map(lm.next_token_logprobs, contexts)])
    fixture.check_rows(drawn[len(draws) :], contexts, how="beside draws")
    results_by_mode = {
        "together": drawn,
        "alone": [fixture.run(lm.draw(context, **more)) for context, more in draws],
        "cached": [fixture.run(fixture.lm.draw(context, **more)) for context, more in draws],
    }
    after = _states_of_generators(draws=0)
    changed = [name for name, state in after.items() if state != before[name]]
    expect(not changed, "the global random generators as before the requests", changed)
    for how, results in results_by_mode.items():
        for (context, arguments), token in zip(draws, results, strict=False):
            _check_drawn(fixture, context, token, how=how, **arguments)
    unseeded = fixture.run(lm.batch_draw([contexts[0]] * 60, temperature=3.0))
    distinct = {draw.token_id for draw in unseeded}
    expect(len(distinct) > 1, "independent draws without a seed", distinct)
    impossible = [i for i in range(size) if fixture.expected(contexts[0])[i] == -math.inf]
    if impossible:
        no_draw = (-1, -math.inf, -math.inf, 0.0)
        last = fixture.run(lm.draw(contexts[0], impossible))
        expect(last == no_draw, f"{no_draw} for a mask without probability", last)


def _states_of_generators(draws: int = 1) -> dict[str, bytes]:
    """Return the states of global generators, after draws, so that none was just seeded."""
    torch.rand(draws)
    np.random.random_sample(draws)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": pickle.dumps(np.random.get_state()),
    }


def _check_drawn(
    fixture: EngineFixture,
    context: TokenTuple,
    drawn: DrawnToken,
    *,
    seed: int,
    how: str,
    **settings: Any,
) -> None:
    """Raise `CheckFailure` unless the seed draws the token, up to rounding."""
    oracle = fixture.draw_oracle(context, **settings)
    example = {"how": how, **settings, "bias": settings.get("bias") is not None}
    expected = oracle.row[drawn.token_id], oracle.log_mass
    found = [drawn.logprob, drawn.log_mass]
    fixture.check_logprobs(found, expected, drawn=drawn, **example)
    uniform = stream_uniform(seed, len(context))
    oracle.check(drawn.token_id, uniform, drawn.draw_logprob, **example)


@engine_check()
def scores_equal_the_loop_over_rows(fixture: EngineFixture) -> None:
    """Scores and reductions of a text agree with the rows before its tokens."""
    lm = fixture.load(output_cache=OutputCache(0))

    def holds(texts: list[TokenTuple], data: Any) -> None:
        starts = [data.draw(st.integers(1, len(text))) for text in texts]
        requests: list[Any] = [
            lm.batch_token_scores(texts, starts),
            lm.reduce_text(texts[0], LargestLogprob(), starts[0]),
        ]
        requests += [
            lm.reduce_text(text, TokenAndMaxLogprobs(text[start:][::-1]), start)
            for text, start in zip(texts, starts, strict=True)
        ]
        scored, largest, *reduced = fixture.gather(requests)
        for text, start, scores, columns in zip(texts, starts, scored, reduced, strict=True):
            _check_scores(fixture, text, start, scores)
            _check_columns(fixture, text, start, columns)
            fixture.saw("whole text", start == 1 < len(text))
            fixture.saw("after a prompt", 1 < start < len(text))
            fixture.saw("nothing to score", start == len(text))
        expected = fixture.expected_rows(texts[0][:-1], starts[0]).amax(-1)
        fixture.check_logprobs(largest, expected, texts=texts)

    fixture.for_all(holds, texts=fixture.batches(4), data=st.data())
    # Random texts hardly contain a token that is the most likely one.
    likely = _likely_text(fixture)
    [likely_scores] = fixture.run(lm.batch_token_scores([likely], [1]))
    _check_scores(fixture, likely, 1, likely_scores)
    longest = fixture.some_sequences(1)[0]
    scores = fixture.run(lm.score(longest))
    expect(
        isinstance(scores, torch.Tensor) and scores.shape == (len(longest) - 1,),
        f"a tensor of {len(longest) - 1} log-probabilities",
        scores,
    )


def _likely_text(fixture: EngineFixture) -> TokenTuple:
    """A text of which each token after the first is the most likely one, if it may be used."""
    text, usable = fixture.some_sequences(1)[0][:1], set(fixture.token_ids)
    while len(text) < min(fixture.max_length, 8):
        most_likely = int(fixture.expected(text).argmax())
        if most_likely not in usable:
            break
        text = (*text, most_likely)
    return text


def _gather_tokens(rows: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """The log-probability of one token of each row."""
    return rows.gather(1, torch.tensor(token_ids, dtype=torch.long)[:, None])[:, 0]


def _check_scores(fixture: EngineFixture, text: TokenTuple, start: int, scores: Any) -> None:
    rows = fixture.expected_rows(text[:-1], start)
    expected = _gather_tokens(rows, text[start:])
    fixture.check_logprobs(scores.logprobs, expected, text=text, start=start)
    best, second = rows.topk(2).values.unbind(-1)
    is_top = expected >= best
    # Rounding decides which of two tokens is the most likely one if they are nearly equal.
    margins = torch.where(is_top, best - second, best - expected)
    is_right = (scores.is_top.cpu() == is_top) | (margins <= 2 * fixture.target.largest_error)
    expect(bool(is_right.all()), f"is_top={is_top}", scores.is_top, text=text, start=start)


def _check_columns(fixture: EngineFixture, text: TokenTuple, start: int, columns: Any) -> None:
    """Compare the columns of `TokenAndMaxLogprobs` of a text's tokens, the last one first."""
    rows = fixture.expected_rows(text[:-1], start)
    expected = _gather_tokens(rows, text[start:][::-1]), rows.amax(-1)
    for column, expected_column in zip(columns, expected, strict=True):
        fixture.check_logprobs(column, expected_column, text=text, start=start)


@engine_check()
def a_failing_reduction_fails_alone(fixture: EngineFixture) -> None:
    """A reduction that raises, of a row or of a text, fails its own request only."""
    lm = fixture.load(output_cache=OutputCache(0))
    texts = fixture.some_sequences(4)
    requests: list[Any] = [
        lm.reduce(text, LargestLogprob(fails=number == 1)) for number, text in enumerate(texts)
    ]
    requests += [
        lm.reduce_text(text, TokenAndMaxLogprobs(text[1:][::-1], fails=number == 1))
        for number, text in enumerate(texts)
    ]
    requests += map(lm.next_token_logprobs, texts)
    results = fixture.gather(requests, return_exceptions=True)
    fixture.check_rows(results[8:], texts)
    for number, text in enumerate(texts):
        of_row, of_text = results[number], results[4 + number]
        if number == 1:
            for error in (of_row, of_text):
                fixture.expect_raised(GenlmError, error, request="a reduction that raises")
                expect("this reduction fails" in str(error), "the reduction's error", error)
            continue
        failed = [repr(x) for x in (of_row, of_text) if isinstance(x, Exception)]
        expect(not failed, "results beside a reduction that raises", failed)
        fixture.check_logprobs(of_row, fixture.expected(text).max(), text=text)
        _check_columns(fixture, text, 1, of_text)


@engine_check(needs=Capability.LORA)
def reductions_use_the_adapter(fixture: EngineFixture) -> None:
    """Reductions and scores of a text with several adapters use the requested adapter."""
    names = [None, *fixture.adapter_names()]
    lm = fixture.load(adapters=True, output_cache=OutputCache(0))
    for text in fixture.some_sequences(3):
        requests: list[Any] = [lm.log_mass(text, [0, 1, 2], lora_name=name) for name in names]
        requests += [lm.score(text, lora_name=name) for name in names]
        results = fixture.gather(requests)
        masses, scores = results[: len(names)], results[len(names) :]
        for name, mass, logprobs in zip(names, masses, scores, strict=True):
            expected = fixture.expected(text, name)[:3].logsumexp(-1)
            fixture.check_logprobs(mass, expected, adapter=name)
            rows = fixture.expected_rows(text[:-1], adapter=name)
            targets = _gather_tokens(rows, text[1:])
            fixture.check_logprobs(logprobs, targets, adapter=name, text=text)
