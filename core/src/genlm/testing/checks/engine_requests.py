"""Checks of valid and invalid requests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genlm import (
    ContextLengthError,
    EmptySequenceError,
    TokenIdError,
    TokenTypeError,
)
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.strategies import TokenTuple


def bad_requests(
    token_ids: TokenTuple, vocab_size: int, max_context: int | None
) -> dict[str, tuple[Any, type[Exception]]]:
    """Invalid requests derived from a valid one, and the error of each."""
    bad: dict[str, tuple[Any, type[Exception]]] = {
        "empty": ([], EmptySequenceError),
        "id out of range": ([*token_ids, vocab_size], TokenIdError),
        "negative id": ([-1, *token_ids], TokenIdError),
        "float": ([*token_ids, 1.0], TokenTypeError),
        "text": ("ab", TokenTypeError),
        "None": ([*token_ids, None], TokenTypeError),
        "nested": ([list(token_ids)], TokenTypeError),
        "float array": (np.array(token_ids, dtype=np.float64), TokenTypeError),
        "two-dimensional": (torch.tensor([token_ids]), TokenTypeError),
    }
    if max_context is not None:
        longer = (token_ids * (max_context + 1))[: max_context + 1]
        bad["too long"] = (list(longer), ContextLengthError)
    return bad


@engine_check(
    cases=("empty", "id out of range", "negative id", "float", "text", "nested", "float array")
)
def bad_requests_fail_alone(fixture: EngineFixture) -> None:
    """An invalid request raises its specific error; concurrent requests are answered."""
    lm, probe = fixture.load_probed()

    async def surrounded(good: TokenTuple, bad: Any) -> list[Any]:
        asked = (lm.next_token_logprobs(ids) for ids in (good, bad, good[::-1]))
        return await asyncio.gather(*asked, return_exceptions=True)

    good = fixture.some_sequences(1)[0]
    for case, (bad, error) in bad_requests(good, lm.vocab_size, lm.max_context).items():
        lm.clear_output_cache()
        first, found, last = fixture.run(surrounded(good, bad))
        fixture.check_rows([first, last], [good, good[::-1]], beside=bad)
        fixture.expect_raised(error, found, request=bad)
        for call in (lm.batch_next_token_logprobs, lm.batch_next_token_logprobs_sync):
            fixture.expect_error(error, functools.partial(call, [good, bad]), request=bad)
        fixture.saw(case)
    fixture.check_row(
        fixture.run(lm.next_token_logprobs(good, use_cache=False)), good, after="bad ones"
    )
    seen = [query for query in probe.submitted if query.token_ids not in {good, good[::-1]}]
    expect(not seen, "no bad request to reach the engine", seen)


@engine_check(cases=("numpy", "torch", "tuple", "list of numpy integers"))
def integers_of_any_kind(fixture: EngineFixture) -> None:
    """Lists, tuples, numpy and torch integers of any width are the same request."""
    narrow = [i for i in fixture.token_ids if i < 127]

    def kinds(token_ids: TokenTuple) -> dict[str, Sequence[int] | Any]:
        found: dict[str, Any] = {
            "tuple": token_ids,
            "list": list(token_ids),
            "numpy": np.array(token_ids),
            "numpy int32": np.array(token_ids, dtype=np.int32),
            "numpy view": np.repeat(np.array(token_ids), 2)[::2],
            "torch": torch.tensor(token_ids),
            "torch int32": torch.tensor(token_ids, dtype=torch.int32),
            "list of numpy integers": list(np.array(token_ids)),
            "list of torch integers": list(torch.tensor(token_ids)),
        }
        if max(token_ids) < 128:
            found["numpy uint8"] = np.array(token_ids, dtype=np.uint8)
        return found

    for token_ids in filter(None, (*fixture.some_sequences(2), tuple(narrow[:2]))):
        for kind, spelled in kinds(token_ids).items():
            row = fixture.run(fixture.lm.next_token_logprobs(spelled, use_cache=False))
            fixture.check_row(row, token_ids, kind=kind)
            row = fixture.run(fixture.lm.next_token_logprobs(spelled))
            fixture.check_row(row, token_ids, kind=kind)
            fixture.saw(kind)


@engine_check(cases=("full context",))
def the_context_can_be_filled(fixture: EngineFixture) -> None:
    """A sequence of exactly `max_context` tokens is answered."""
    limit = fixture.lm.max_context
    length = fixture.max_length if limit is None else limit
    (some, *_) = fixture.some_sequences(1)
    full = (some * length)[:length]
    fixture.saw("full context")
    row = fixture.run(fixture.lm.next_token_logprobs(full))
    expect(
        tuple(row.shape) == (fixture.lm.vocab_size,) and not bool(row.isnan().any()),
        f"a row for a sequence of {length} tokens",
        tuple(row.shape),
    )
    if length <= fixture.target.max_length:
        fixture.check_row(row, full)
