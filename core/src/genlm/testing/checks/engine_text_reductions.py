"""Checks of reductions of all positions of a text, computed by the engine or from rows."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from hypothesis import strategies as st

from genlm import GenlmError, GroupReduction, OutputCache
from genlm.testing.check import engine_check, expect
from genlm.testing.checks.engine_reductions import LargestLogprob
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.strategies import TokenTuple


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


def _check_columns(
    fixture: EngineFixture, text: TokenTuple, start: int, found: Any, **example: Any
) -> None:
    """Compare the columns of `ChosenLogprobs` of a text's tokens, the last one first."""
    rows = [fixture.expected(text[:place]) for place in range(start, len(text))]
    chosen = text[start:][::-1]
    expected = [[float(row[i]) for row, i in zip(rows, chosen, strict=True)]]
    expected.append([float(row.max()) for row in rows])
    near = [tuple(column.shape) for column in found] == [(len(rows),)] * 2 and all(
        bool(torch.isclose(column.double(), torch.tensor(right).double(), 0, error).all())
        for column, right in zip(found, expected, strict=True)
        for error in [fixture.target.largest_error]
    )
    shown = [column.tolist() for column in found]
    expect(near, f"the columns {expected}", shown, text=text, start=start, **example)


@engine_check(cases=("whole texts", "after a prompt", "nothing to reduce", "beside a score"))
def text_reductions_are_of_the_rows(fixture: EngineFixture) -> None:
    """Reductions of all positions of a text are those of the rows before its tokens."""
    lm = fixture.load(output_cache=OutputCache(0))

    def holds(texts: list[TokenTuple], data: Any) -> None:
        starts = [data.draw(st.integers(1, len(text))) for text in texts]

        async def ask() -> list[Any]:
            asked = [
                lm.reduce_text(text, ChosenLogprobs(text[start:][::-1]), start)
                for text, start in zip(texts, starts, strict=True)
            ]
            return await asyncio.gather(*asked, lm.score(texts[0], starts[0]))

        *found, scores = fixture.run(ask())
        for text, start, columns in zip(texts, starts, found, strict=True):
            _check_columns(fixture, text, start, columns)
            fixture.saw("whole texts", start == 1 < len(text))
            fixture.saw("after a prompt", 1 < start < len(text))
            fixture.saw("nothing to reduce", start == len(text))
        fixture.saw("beside a score", len(scores) > 0)
        shared = fixture.run(lm.reduce_text(texts[0], LargestLogprob(), starts[0]))
        own = ChosenLogprobs(texts[0][starts[0] :][::-1])
        expected = fixture.run(lm.reduce_text(texts[0], own, starts[0]))[1]
        expect(
            len(shared) == len(expected)
            and bool(torch.isclose(shared, expected, 0, fixture.target.largest_error).all()),
            f"the largest log-probabilities {expected.tolist()}",
            shared.tolist(),
            text=texts[0],
            start=starts[0],
        )

    fixture.for_all(holds, texts=fixture.batches(4), data=st.data())


@engine_check(cases=("fails alone",))
def a_failing_text_reduction_fails_alone(fixture: EngineFixture) -> None:
    """A reduction of a text that raises fails its own request and none beside it."""
    lm = fixture.load(output_cache=OutputCache(0))
    texts = fixture.some_sequences(3)

    async def ask() -> list[Any]:
        reductions = [
            ChosenLogprobs(text[1:][::-1], fails=place == 1) for place, text in enumerate(texts)
        ]
        asked = [lm.reduce_text(*each) for each in zip(texts, reductions, strict=True)]
        return await asyncio.gather(*asked, return_exceptions=True)

    found = fixture.run(ask())
    failed = [place for place, each in enumerate(found) if isinstance(each, Exception)]
    expect(failed == [1], "an error of the text whose reduction raised", found)
    expect(
        isinstance(found[1], GenlmError) and "this reduction fails" in str(found[1]),
        "a genlm error with what the reduction raised",
        repr(found[1]),
    )
    for place in (0, 2):
        _check_columns(fixture, texts[place], 1, found[place])
    fixture.saw("fails alone")
