"""Checks of reductions, draws and scores, whether the engine or the core computes them.

Longer than other modules because all checks compare with the same functions of the oracle's
rows.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from genlm import (
    Capability,
    DrawnToken,
    GenlmError,
    Mask,
    OutputCache,
    Reduction,
    TokenIdError,
)
from genlm.plugin import stream_uniform
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.strategies import TokenTuple

DRAWS = 6
"""Draws of one context in one batch."""


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


def _forms(ids: Sequence[int], size: int) -> dict[str, Any]:
    """A mask in every form that programs have them in."""
    flags = np.zeros(size, np.bool_)
    flags[list(ids)] = True
    padded = np.zeros(-(-size // 32) * 32, np.bool_)
    padded[:size] = flags
    words = np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)
    return {
        "ids": list(ids),
        "array of ids": np.asarray(ids, np.int64),
        "booleans": flags.tolist(),
        "array of booleans": flags,
        "tensor of booleans": torch.from_numpy(flags),
        "packed bits": words[None],
        "tensor of packed bits": torch.from_numpy(words)[None],
        "mask of packed bits": Mask.from_packed(words, size),
        "mask": Mask(list(ids), size),
    }


def _close(fixture: EngineFixture, found: float, expected: float) -> bool:
    return found == expected or abs(found - expected) <= fixture.target.largest_error


@engine_check(cases=("given tokens", "most likely", "mask", "empty mask", "one's own"))
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
        fixture.saw("given tokens", bool(wanted))
        _check_top(
            fixture, row, fixture.run(lm.top_tokens(token_ids, min(k, size))), min(k, size)
        )
        fixture.saw("most likely")
        mass = float(row[sorted(set(wanted))].logsumexp(-1)) if wanted else -math.inf
        for form, mask in _forms(wanted, size).items():
            result = fixture.run(lm.log_mass(token_ids, mask))
            expect(
                _close(fixture, result, mass),
                f"a log mass of {mass:.6g} for the ids {wanted}",
                result,
                context=token_ids,
                form=form,
            )
        fixture.saw("mask" if wanted else "empty mask")
        largest = fixture.run(lm.reduce(token_ids, LargestLogprob()))
        expect(
            _close(fixture, largest, float(row.max())),
            f"the largest log-probability, {float(row.max()):.6g}",
            largest,
            context=token_ids,
        )
        fixture.saw("one's own")

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


@engine_check(cases=("all tokens", "masked", "tempered", "most likely", "top-k", "top-p"))
def draws_are_those_of_the_seed(fixture: EngineFixture) -> None:
    """A seed and a context determine the token that is drawn, under masks and temperatures."""
    lm, size = fixture.load(output_cache=OutputCache(0)), fixture.lm.vocab_size
    generator = fixture.generator()
    for number, context in enumerate(fixture.some_sequences(6)):
        row = fixture.expected(context)
        possible = [i for i in range(size) if row[i] > -math.inf]
        some = sorted({int(generator.choice(possible)) for _ in range(8)})
        settings: dict[str, dict[str, Any]] = {
            "all tokens": {},
            "masked": {"mask": some},
            "tempered": {"mask": some, "temperature": 0.5 + number / 4},
            "most likely": {"temperature": 0.0},
            "top-k": {"top_k": 2, "mask": some},
            "top-p": {"top_p": 0.5, "temperature": 1.5},
        }
        for case, arguments in settings.items():
            seed = fixture.seed + number
            drawn = fixture.run(lm.draw(context, seed=seed, **arguments))
            uniform = stream_uniform(seed, len(context))
            _check_drawn(fixture, row, drawn, uniform, arguments)
            fixture.saw(case)


def _check_drawn(
    fixture: EngineFixture,
    row: torch.Tensor,
    drawn: DrawnToken,
    uniform: float,
    arguments: dict[str, Any],
) -> None:
    """Raise `CheckFailure` unless the number draws the token, whatever the rounding."""
    rounding = fixture.target.largest_error
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


@engine_check(cases=("together", "alone", "from the cached row", "without a seed"))
def draws_do_not_depend_on_the_batch(fixture: EngineFixture) -> None:
    """The same context and seed draw the same token, whatever else is drawn or cached."""
    lm = fixture.load(output_cache=OutputCache(0))
    contexts = fixture.some_sequences(4)
    asked = [(context, seed) for context in contexts for seed in range(DRAWS)]

    async def all_at_once() -> list[DrawnToken]:
        draws = [lm.draw(context, seed=seed) for context, seed in asked]
        rows = [lm.next_token_logprobs(context) for context in contexts]
        found: list[Any] = list(await asyncio.gather(*draws, *rows))
        for context, row in zip(contexts, found[len(draws) :], strict=True):
            fixture.check_row(row, context, asked="beside draws")
        return found[: len(draws)]

    together = [drawn.token_id for drawn in fixture.run(all_at_once())]
    fixture.saw("together")
    alone = [
        fixture.run(lm.draw(context, seed=seed)).token_id for context, seed in reversed(asked)
    ][::-1]
    _check_equal_draws(fixture, asked, together, alone)
    fixture.saw("alone")
    cached = fixture.load()
    fixture.run(cached.batch_next_token_logprobs(contexts))
    of_rows = [fixture.run(cached.draw(context, seed=seed)).token_id for context, seed in asked]
    _check_equal_draws(fixture, asked, together, of_rows)
    fixture.saw("from the cached row")
    context = max(contexts, key=lambda each: -float(fixture.expected(each).max()))

    async def unseeded() -> list[int]:
        return [each.token_id for each in await lm.batch_draw([context] * 60, temperature=3.0)]

    expect(len(set(fixture.run(unseeded()))) > 1, "independent draws", "60 equal tokens")
    fixture.saw("without a seed")


def _check_equal_draws(
    fixture: EngineFixture,
    asked: Sequence[tuple[TokenTuple, int]],
    expected: Sequence[int],
    found: Sequence[int],
) -> None:
    for (context, seed), first, second in zip(asked, expected, found, strict=True):
        if first == second:
            continue
        # Rounding may decide between two tokens whose boundary the number happens to hit.
        cumulative = fixture.expected(context).softmax(-1).cumsum(-1)
        boundary = float(cumulative[min(first, second)])
        near = abs(boundary - stream_uniform(seed, len(context)))
        expect(
            near <= fixture.target.largest_error,
            f"token {first} drawn again",
            second,
            context=context,
            seed=seed,
        )


@engine_check(cases=("whole texts", "after a prompt", "nothing to score", "in a batch"))
def scores_equal_the_loop_over_rows(fixture: EngineFixture) -> None:
    """The score of a text has the log-probability of each token after those before it."""
    lm = fixture.load(output_cache=OutputCache(0))

    def holds(texts: list[TokenTuple], data: Any) -> None:
        starts = [data.draw(st.integers(1, len(text))) for text in texts]
        found = fixture.run(lm.batch_token_scores(texts, starts))
        fixture.saw("in a batch", len(texts) > 1)
        for text, start, scores in zip(texts, starts, found, strict=True):
            _check_scores(fixture, text, start, scores)
            fixture.saw("whole texts", start == 1 < len(text))
            fixture.saw("after a prompt", 1 < start < len(text))
            fixture.saw("nothing to score", start == len(text))

    fixture.for_all(holds, texts=fixture.batches(4), data=st.data())
    longest = fixture.some_sequences(1)[0]
    whole = fixture.run(lm.score(longest))
    expect(
        isinstance(whole, torch.Tensor) and whole.shape == (len(longest) - 1,),
        f"a tensor of {len(longest) - 1} log-probabilities",
        whole,
    )


def _check_scores(fixture: EngineFixture, text: TokenTuple, start: int, scores: Any) -> None:
    rows = [fixture.expected(text[:place]) for place in range(start, len(text))]
    expected = [float(row[text[start + i]]) for i, row in enumerate(rows)]
    found = scores.logprobs.tolist()
    near = len(found) == len(expected) and all(
        _close(fixture, a, b) for a, b in zip(found, expected, strict=True)
    )
    expect(near, f"the scores {expected}", found, text=text, start=start)
    for row, score, is_top in zip(rows, expected, scores.is_top.tolist(), strict=True):
        gap = float(row.max()) - score
        is_right = is_top == (gap <= 0) or gap <= 2 * fixture.target.largest_error
        expect(is_right, f"is_top={gap <= 0}", is_top, text=text, start=start)


@engine_check(needs=Capability.SCORE, cases=("scored by the engine",))
def declared_scores_are_native(fixture: EngineFixture) -> None:
    """An engine that declares `score` gets one query for each text."""
    lm, probe = fixture.load_probed()
    fixture.run(lm.batch_score(fixture.some_sequences(3)))
    native = [query for query in probe.submitted if query.targets]
    expect(len(native) == 3, "three queries with `targets` in the engine", len(native))
    fixture.saw("scored by the engine")


@engine_check(unless=Capability.SCORE, cases=("scored from rows",))
def undeclared_scores_ask_for_rows(fixture: EngineFixture) -> None:
    """An engine that does not declare `score` gets requests for rows only."""
    lm, probe = fixture.load_probed()
    try:
        fixture.run(lm.batch_score(fixture.some_sequences(3)))
    finally:
        native = [query for query in probe.submitted if query.targets]
        expect(not native, "no query with `targets` in the engine", native)
    fixture.saw("scored from rows")


@engine_check(cases=("fails alone", "beside rows"))
def a_failing_reduction_fails_alone(fixture: EngineFixture) -> None:
    """A reduction that raises fails its own request and none beside it."""
    lm = fixture.load(output_cache=OutputCache(0))
    contexts = fixture.some_sequences(4)

    async def ask() -> list[Any]:
        reductions = [
            lm.reduce(context, LargestLogprob(fails=place == 1))
            for place, context in enumerate(contexts)
        ]
        rows = [lm.next_token_logprobs(context) for context in contexts]
        return list(await asyncio.gather(*reductions, *rows, return_exceptions=True))

    found = fixture.run(ask())
    for place, (context, result) in enumerate(zip(contexts, found, strict=False)):
        if place == 1:
            fixture.expect_raised(GenlmError, result, asked="a reduction that raises")
            fixture.saw("fails alone")
        else:
            largest = float(fixture.expected(context).max())
            expect(
                isinstance(result, float) and _close(fixture, result, largest),
                f"{largest:.6g} beside a reduction that raises",
                result,
            )
    fixture.check_rows(found[len(contexts) :], contexts)
    fixture.saw("beside rows")


@engine_check(cases=("joined", "cached", "of a cached row"))
def reductions_share_evaluations(fixture: EngineFixture) -> None:
    """Requests for one context are one evaluation; what was computed is not computed again."""
    lm, probe = fixture.load_probed()
    context, other = fixture.some_sequences(2)

    async def together() -> None:
        await asyncio.gather(
            lm.next_token_logprobs(context),
            lm.top_tokens(context, 2),
            *(lm.draw(context, seed=seed) for seed in range(DRAWS)),
        )

    def submitted(expected: int, what: str) -> None:
        expect(
            len(probe.submitted) == expected,
            f"{expected} evaluations after {what}",
            len(probe.submitted),
        )

    fixture.run(together())
    submitted(1, "a row, its top-k and draws asked together")
    fixture.saw("joined")
    fixture.run(lm.log_mass(context, [0, 1]))
    submitted(1, "the log mass of a cached row")
    fixture.saw("of a cached row")
    first = fixture.run(lm.top_tokens(other, 2))
    first.logprobs.zero_()  # the caller's own
    again = fixture.run(lm.top_tokens(other, 2))
    submitted(2, "the same top-k twice")
    _check_top(fixture, fixture.expected(other), again, 2)
    fixture.run(lm.top_tokens(other, 1))
    submitted(3, "another top-k")
    fixture.saw("cached")


@engine_check(needs=Capability.LORA, cases=("adapters",))
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
        fixture.saw("adapters")


@engine_check(cases=("refused",))
def wrong_reductions_are_refused(fixture: EngineFixture) -> None:
    """Wrong masks, ids and settings raise an error, and the model stays usable."""
    lm, size = fixture.lm, fixture.lm.vocab_size
    context = fixture.some_sequences(1)[0]
    wrong: list[tuple[type[Exception], Callable[..., Any], dict[str, Any]]] = [
        (ValueError, lm.log_mass, {"mask": np.ones(size + 1, np.bool_)}),
        (ValueError, lm.log_mass, {"mask": np.zeros((1, size // 32 + 2), np.int32)}),
        (ValueError, lm.log_mass, {"mask": np.zeros(-(-size // 32), np.int32)}),
        (TokenIdError, lm.log_mass, {"mask": [size]}),
        (TokenIdError, lm.token_logprobs, {"token_ids": [-1]}),
        (ValueError, lm.top_tokens, {"k": 0}),
        (ValueError, lm.top_tokens, {"k": size + 1}),
        (ValueError, lm.draw, {"temperature": math.inf}),
        (ValueError, lm.draw, {"temperature": -1.0}),
        (ValueError, lm.draw, {"top_k": 0}),
        (ValueError, lm.draw, {"top_p": 0.0}),
        (ValueError, lm.draw, {"top_p": 1.5}),
        (ValueError, lm.draw, {"seed": -1}),
        (TypeError, lm.reduce, {"reduction": max}),
        (ValueError, lm.score, {"start": 0}),
        (ValueError, lm.score, {"start": len(context) + 1}),
    ]
    for error, method, arguments in wrong:
        fixture.expect_error(error, functools.partial(method, context, **arguments))
        fixture.saw("refused")
    impossible = [i for i, value in enumerate(fixture.expected(context)) if value == -math.inf]
    if impossible:
        drawn = fixture.run(lm.draw(context, impossible))
        nothing = (-1, -math.inf, -math.inf, -math.inf)
        expect(drawn == nothing, f"{nothing} for a mask without probability", drawn)
    fixture.check_row(fixture.run(lm.next_token_logprobs(context)), context)
