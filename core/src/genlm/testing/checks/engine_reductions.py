"""Checks of reductions, draws and scores, whether the engine or the core computes them."""

from __future__ import annotations

import asyncio
import math
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
from genlm.testing.strategies import TokenTuple


@dataclass(frozen=True)
class LargestLogprob(Reduction):
    """A reduction as a program may write one, which fails if it is told to."""

    fails: bool = False

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[LargestLogprob]) -> Sequence[float]:
        """Return the largest entry of each row."""
        if any(request.fails for request in requests):
            raise ArithmeticError("this reduction fails")
        largest: list[float] = rows.amax(-1).tolist()
        return largest


class ChosenLogprobs(GroupReduction):
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
        chosen = rows[row_of, self.token_ids[members].to(rows.device)]
        return chosen, rows.amax(-1)[row_of]


def _close(fixture: EngineFixture, found: float, expected: float) -> bool:
    return found == expected or abs(found - expected) <= fixture.target.largest_error


@engine_check()
def reductions_are_of_the_row(fixture: EngineFixture) -> None:
    """Log-probabilities of tokens, top-k, masses and other reductions are those of the row."""
    lm, size = fixture.load(output_cache=OutputCache(0)), fixture.lm.vocab_size
    ids = st.lists(st.integers(0, size - 1), max_size=8)

    def holds(token_ids: TokenTuple, wanted: list[int], k: int) -> None:
        row = fixture.expected(token_ids)
        found = fixture.run(lm.token_logprobs(token_ids, wanted))
        near = [_close(fixture, float(f), float(row[i])) for f, i in zip(found, wanted)]
        expect(
            found.shape == (len(wanted),) and all(near),
            f"the log-probabilities {[float(row[i]) for i in wanted]} of {wanted}",
            found.tolist(),
            context=token_ids,
        )
        _check_top(fixture, row, fixture.run(lm.top_tokens(token_ids, k)), k)
        mass = float(row[sorted(set(wanted))].logsumexp(-1)) if wanted else -math.inf
        result = fixture.run(lm.log_mass(token_ids, Mask(wanted, size)))
        expect(
            _close(fixture, result, mass),
            f"a log mass of {mass:.6g} for the ids {wanted}",
            result,
            context=token_ids,
        )
        largest = fixture.run(lm.reduce(token_ids, LargestLogprob()))
        expect(
            _close(fixture, largest, float(row.max())),
            f"the largest log-probability, {float(row.max()):.6g}",
            largest,
            context=token_ids,
        )

    fixture.for_all(
        holds, token_ids=fixture.sequences(), wanted=ids, k=st.integers(1, min(size, 20))
    )
    holds(fixture.some_sequences(1)[0], [], 1)


def _check_top(fixture: EngineFixture, row: torch.Tensor, found: Any, k: int) -> None:
    """Raise `CheckFailure` unless tokens are the k most likely ones, whatever the rounding."""
    expected = row.sort(descending=True).values[:k]
    own = row[found.token_ids]
    near = all(
        _close(fixture, float(a), float(b)) and _close(fixture, float(c), float(b))
        for a, b, c in zip(found.logprobs, expected, own, strict=True)
    )
    ordered = bool((found.logprobs[1:] <= found.logprobs[:-1]).all())
    expect(
        near and ordered and len(set(found.token_ids.tolist())) == k,
        f"the {k} largest log-probabilities {expected.tolist()}, descending",
        f"{found.logprobs.tolist()} of {found.token_ids.tolist()}",
    )


@engine_check()
def draws_are_those_of_the_seed(fixture: EngineFixture) -> None:
    """A seed and a context determine the token drawn, whatever else is drawn or cached."""
    lm, size = fixture.load(output_cache=OutputCache(0)), fixture.lm.vocab_size
    contexts, generator = fixture.some_sequences(6), np.random.default_rng(fixture.seed)
    fixture.run(fixture.lm.batch_next_token_logprobs(contexts))  # into its output cache
    asked: list[tuple[TokenTuple, dict[str, Any]]] = []
    for number, context in enumerate(contexts):
        row = fixture.expected(context)
        possible = [i for i in range(size) if row[i] > -math.inf]
        some = sorted({int(generator.choice(possible)) for _ in range(8)})
        settings: list[dict[str, Any]] = [
            {},
            {"mask": some},
            {"mask": some, "temperature": 0.5 + number / 4},
            {"temperature": 0.0},
            {"top_k": 2, "mask": some},
            {"top_p": 0.5, "temperature": 1.5},
        ]
        asked += [(context, {"seed": fixture.seed + i} | s) for i, s in enumerate(settings)]

    async def together() -> list[Any]:
        draws = [lm.draw(context, **arguments) for context, arguments in asked]
        return list(await asyncio.gather(*draws, *map(lm.next_token_logprobs, contexts)))

    drawn = fixture.run(together())
    fixture.check_rows(drawn[len(asked) :], contexts, asked="beside draws")
    ways = {
        "together": drawn,
        "alone": [fixture.run(lm.draw(context, **more)) for context, more in asked],
        "cached": [fixture.run(fixture.lm.draw(context, **more)) for context, more in asked],
    }
    for how, found in ways.items():
        for (context, arguments), token in zip(asked, found, strict=False):
            _check_drawn(fixture, context, token, how=how, **arguments)
    unseeded = fixture.run(lm.batch_draw([contexts[0]] * 60, temperature=3.0))
    distinct = {each.token_id for each in unseeded}
    expect(len(distinct) > 1, "independent draws without a seed", distinct)
    impossible = [i for i in range(size) if fixture.expected(contexts[0])[i] == -math.inf]
    if impossible:
        nothing = (-1, -math.inf, -math.inf, -math.inf)
        last = fixture.run(lm.draw(contexts[0], impossible))
        expect(last == nothing, f"{nothing} for a mask without probability", last)


def _check_drawn(
    fixture: EngineFixture, context: TokenTuple, drawn: DrawnToken, **arguments: Any
) -> None:
    """Raise `CheckFailure` unless the seed draws the token, whatever the rounding."""
    row, rounding = fixture.expected(context), fixture.target.largest_error
    temperature = arguments.get("temperature", 1.0)
    allowed = torch.full_like(row, -math.inf)
    ids = arguments.get("mask", list(range(len(row))))
    allowed[ids] = row[ids]
    mass = float(allowed.logsumexp(-1)) if "mask" in arguments else 0.0
    own = float(row[drawn.token_id])
    expect(
        _close(fixture, drawn.logprob, own) and _close(fixture, drawn.log_mass, mass),
        f"log-probability {own:.6g}, log mass {mass:.6g}",
        drawn,
        **arguments,
    )
    if temperature == 0:
        gap = float(allowed.max()) - own
        expect(gap <= 2 * rounding, "a most likely token", drawn, **arguments)
        return
    kept, is_near = _kept(allowed / temperature, arguments, 2 * rounding / temperature)
    expect(bool(kept[drawn.token_id] > -math.inf), "a token of top-k and top-p", drawn)
    if is_near:  # rounding decides which tokens belong to top-k or top-p
        return
    slack = rounding / (2 * temperature) + 1e-6
    uniform = stream_uniform(arguments["seed"], len(context))
    share = fixture.check_drawn(kept, drawn.token_id, uniform, slack, **arguments)
    found = math.exp(drawn.draw_logprob)
    expect(abs(found - share) <= slack, f"probability {share:.6g}", found, **arguments)


def _kept(
    logits: torch.Tensor, arguments: dict[str, Any], gap: float
) -> tuple[torch.Tensor, bool]:
    """Logits of the tokens in top-k and top-p, and whether rounding may decide about others."""
    ordered, ids = logits.sort(descending=True, stable=True)
    count, is_near = len(ids), False
    if "top_k" in arguments:
        count = arguments["top_k"]
    if "top_p" in arguments:
        share = ordered.softmax(-1).cumsum(-1)
        count = int((share < arguments["top_p"]).sum()) + 1
        is_near = bool(((share - arguments["top_p"]).abs() < gap).any())
    if count < len(ids):
        is_near = is_near or bool(ordered[count - 1] - ordered[count] < gap)
    kept = torch.full_like(logits, -math.inf)
    chosen = ids[: count + 1] if is_near else ids[:count]
    kept[chosen] = logits[chosen]
    return kept, is_near


@engine_check(cases=("whole text", "after a prompt", "nothing to score"))
def scores_equal_the_loop_over_rows(fixture: EngineFixture) -> None:
    """Scores and reductions of a text are those of the rows before its tokens."""
    lm = fixture.load(output_cache=OutputCache(0))

    def holds(texts: list[TokenTuple], data: Any) -> None:
        starts = [data.draw(st.integers(1, len(text))) for text in texts]

        async def ask() -> list[Any]:
            reduced = [
                lm.reduce_text(text, ChosenLogprobs(text[start:][::-1]), start)
                for text, start in zip(texts, starts, strict=True)
            ]
            largest = lm.reduce_text(texts[0], LargestLogprob(), starts[0])
            scored = lm.batch_token_scores(texts, starts)
            return await asyncio.gather(scored, largest, *reduced)

        scored, largest, *reduced = fixture.run(ask())
        for text, start, scores, columns in zip(texts, starts, scored, reduced, strict=True):
            _check_scores(fixture, text, start, scores)
            _check_columns(fixture, text, start, columns)
            fixture.saw("whole text", start == 1 < len(text))
            fixture.saw("after a prompt", 1 < start < len(text))
            fixture.saw("nothing to score", start == len(text))
        _check_numbers(fixture, largest, _rows_of(fixture, texts[0], starts[0]).amax(-1))

    fixture.for_all(holds, texts=fixture.batches(4), data=st.data())
    longest = fixture.some_sequences(1)[0]
    whole = fixture.run(lm.score(longest))
    expect(
        isinstance(whole, torch.Tensor) and whole.shape == (len(longest) - 1,),
        f"a tensor of {len(longest) - 1} log-probabilities",
        whole,
    )


def _rows_of(fixture: EngineFixture, text: TokenTuple, start: int) -> torch.Tensor:
    """The expected rows before the tokens of a text from a position on."""
    rows = [fixture.expected(text[:place]) for place in range(start, len(text))]
    return torch.stack(rows) if rows else torch.empty(0, fixture.lm.vocab_size)


def _of_tokens(rows: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """The log-probability of one token of each row."""
    return rows.gather(1, torch.tensor(token_ids, dtype=torch.long)[:, None])[:, 0]


def _check_numbers(
    fixture: EngineFixture, found: torch.Tensor, expected: torch.Tensor, **example: Any
) -> None:
    """Compare log-probabilities, some of which may be infinite."""
    near = found.shape == expected.shape and bool(
        found.cpu().double().isclose(expected.double(), 0, fixture.target.largest_error).all()
    )
    expect(near, f"the log-probabilities {expected.tolist()}", found.tolist(), **example)


def _check_scores(fixture: EngineFixture, text: TokenTuple, start: int, scores: Any) -> None:
    rows = _rows_of(fixture, text, start)
    expected = _of_tokens(rows, text[start:])
    _check_numbers(fixture, scores.logprobs, expected, text=text, start=start)
    gaps = rows.amax(-1) - expected
    right = (scores.is_top.cpu() == (gaps <= 0)) | (gaps <= 2 * fixture.target.largest_error)
    expect(bool(right.all()), f"is_top={gaps <= 0}", scores.is_top, text=text, start=start)


def _check_columns(fixture: EngineFixture, text: TokenTuple, start: int, columns: Any) -> None:
    """Compare the columns of `ChosenLogprobs` of a text's tokens, the last one first."""
    rows = _rows_of(fixture, text, start)
    expected = _of_tokens(rows, text[start:][::-1]), rows.amax(-1)
    for found, right in zip(columns, expected, strict=True):
        _check_numbers(fixture, found, right, text=text, start=start)


@engine_check()
def a_failing_reduction_fails_alone(fixture: EngineFixture) -> None:
    """A reduction that raises, of a row or of a text, fails its own request and no other."""
    lm = fixture.load(output_cache=OutputCache(0))
    texts = fixture.some_sequences(4)

    async def ask() -> list[Any]:
        reductions = [
            lm.reduce(text, LargestLogprob(fails=place == 1))
            for place, text in enumerate(texts)
        ]
        of_texts = [
            lm.reduce_text(text, ChosenLogprobs(text[1:][::-1], fails=place == 1))
            for place, text in enumerate(texts)
        ]
        rows = map(lm.next_token_logprobs, texts)
        asked = (*reductions, *of_texts, *rows)
        return list(await asyncio.gather(*asked, return_exceptions=True))

    found = fixture.run(ask())
    fixture.check_rows(found[8:], texts)
    for place, text in enumerate(texts):
        of_row, of_text = found[place], found[4 + place]
        if place == 1:
            for error in (of_row, of_text):
                fixture.expect_raised(GenlmError, error, asked="a reduction that raises")
                expect("this reduction fails" in str(error), "the reduction's error", error)
            continue
        failed = [repr(each) for each in (of_row, of_text) if isinstance(each, Exception)]
        expect(not failed, "results beside a reduction that raises", failed)
        largest = float(fixture.expected(text).max())
        expect(_close(fixture, of_row, largest), f"{largest:.6g}", of_row)
        _check_columns(fixture, text, 1, of_text)


@engine_check(needs=Capability.LORA)
def reductions_use_the_adapter(fixture: EngineFixture) -> None:
    """Reductions and scores of one text with several adapters are those of each adapter."""
    names = [None, *fixture.adapter_names()]
    lm = fixture.load(adapters=True, output_cache=OutputCache(0))
    for text in fixture.some_sequences(3):

        async def ask(text: TokenTuple = text) -> list[Any]:
            masses = [lm.log_mass(text, [0, 1, 2], lora_name=name) for name in names]
            scores = [lm.score(text, lora_name=name) for name in names]
            return list(await asyncio.gather(*masses, *scores))

        found = fixture.run(ask())
        for name, mass in zip(names, found, strict=False):
            expected = float(fixture.expected(text, name)[:3].logsumexp(-1))
            expect(_close(fixture, mass, expected), f"{expected:.6g}", mass, adapter=name)
        for name, scores in zip(names, found[len(names) :], strict=True):
            for place, score in enumerate(scores.tolist(), 1):
                own = float(fixture.expected(text[:place], name)[text[place]])
                expect(
                    _close(fixture, score, own), f"{own:.6g}", score, adapter=name, text=text
                )
