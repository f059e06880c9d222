"""Checks of single rows: their form, values and memory."""

from __future__ import annotations

import math

import torch

from genlm import AsyncLM
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture, gathered
from genlm.testing.strategies import TokenTuple


@engine_check(cases=("row of one token", "row of a batch"))
def rows_are_distributions(fixture: EngineFixture) -> None:
    """A row is float32 natural-log probabilities over the whole vocabulary that sum to 1."""

    def holds(batch: list[TokenTuple]) -> None:
        single = fixture.run(fixture.lm.next_token_logprobs(batch[0]))
        rows = fixture.run(fixture.lm.batch_next_token_logprobs(batch))
        expect(
            tuple(rows.shape) == (len(batch), fixture.lm.vocab_size),
            f"a batch of shape {(len(batch), fixture.lm.vocab_size)}",
            tuple(rows.shape),
            batch=batch,
        )
        for row, token_ids in zip([single, *rows], [batch[0], *batch], strict=True):
            _check_form(fixture.lm, row, token_ids)
            expect(
                row.device == single.device, f"every row on {single.device}", str(row.device)
            )
            fixture.devices.add(str(row.device))
        fixture.saw("row of one token", min(map(len, batch)) == 1)
        fixture.saw("row of a batch", len(batch) > 1)

    fixture.for_all(holds, batch=fixture.batches())
    empty = fixture.run(fixture.lm.batch_next_token_logprobs([]))
    expect(
        tuple(empty.shape) == (0, fixture.lm.vocab_size) and empty.dtype == torch.float32,
        f"an empty batch of shape {(0, fixture.lm.vocab_size)}, float32",
        f"{tuple(empty.shape)}, {empty.dtype}",
    )


def _check_form(lm: AsyncLM, row: torch.Tensor, token_ids: TokenTuple) -> None:
    size = lm.vocab_size
    expect(tuple(row.shape) == (size,), f"shape {(size,)}", row.shape, token_ids=token_ids)
    expect(row.dtype == torch.float32, "float32", row.dtype, token_ids=token_ids)
    expect(
        not bool(row.isnan().any()) and not bool(row.isposinf().any()),
        "neither NaN nor +inf",
        f"NaN at {row.isnan().sum()} ids, +inf at {row.isposinf().sum()}",
        token_ids=token_ids,
    )
    total = float(row.cpu().double().logsumexp(-1))
    expect(abs(total) <= 1e-4, "logsumexp 0 within 1e-4", f"{total:.6g}", token_ids=token_ids)
    missing = list(lm.vocabulary.missing_ids)
    expect(
        bool(row[missing].isneginf().all()),
        "-inf at the ids that no token has",
        row[missing].tolist(),
        token_ids=token_ids,
    )


@engine_check(oracle=True, cases=("longest sequence", "one token"))
def rows_are_right(fixture: EngineFixture) -> None:
    """Every row is the oracle's row."""

    def holds(token_ids: TokenTuple) -> None:
        row = fixture.run(fixture.lm.next_token_logprobs(token_ids))
        fixture.check_row(row, token_ids, token_ids=token_ids)
        fixture.saw("longest sequence", len(token_ids) == fixture.max_length)
        fixture.saw("one token", len(token_ids) == 1)

    (one, *_) = fixture.some_sequences(1)
    longest = (one * fixture.max_length)[: fixture.max_length]
    for edge in (one[:1], longest):
        holds(edge)
    fixture.for_all(holds, token_ids=fixture.sequences())


@engine_check(cases=("cached row", "row of a batch", "row shared in flight"))
def rows_belong_to_the_caller(fixture: EngineFixture) -> None:
    """Modifying a row changes no other row, now or later."""

    def holds(token_ids: TokenTuple, other: TokenTuple) -> None:
        fixture.lm.clear_output_cache()
        first, *others = fixture.run(gathered(fixture.lm.next_token_logprobs, [token_ids] * 3))
        _overwrite(first)
        for row in others:
            fixture.check_row(row, token_ids, changed="a row of the same request in flight")
        fixture.saw("row shared in flight")
        for change in ("a row from the engine", "a row from the cache"):
            row = fixture.run(fixture.lm.next_token_logprobs(token_ids))
            fixture.check_row(row, token_ids, changed=change)
            _overwrite(row)
        fixture.saw("cached row")
        rows = fixture.run(fixture.lm.batch_next_token_logprobs([token_ids, token_ids, other]))
        _overwrite(rows[0])
        fixture.check_rows(rows[1:], [token_ids, other], changed="row 0 of the batch")
        _overwrite(rows)
        again = fixture.run(fixture.lm.batch_next_token_logprobs([token_ids, other]))
        fixture.check_rows(again, [token_ids, other], changed="a whole batch")
        fixture.saw("row of a batch")

    fixture.for_all(holds, token_ids=fixture.sequences(), other=fixture.sequences())


def _overwrite(rows: torch.Tensor) -> None:
    """Make rows uniform: other distributions, which no check of the core refuses."""
    rows.fill_(-math.log(rows.shape[-1]))


@engine_check(cases=("row of a shared forward pass",))
def rows_hold_no_more_than_themselves(fixture: EngineFixture) -> None:
    """A row keeps only its own memory alive."""
    lm, probe = fixture.load_probed()
    rows = fixture.run(gathered(lm.next_token_logprobs, fixture.some_sequences(8)))
    fixture.saw("row of a shared forward pass", max(probe.in_step) > 1)
    for row in rows:
        held = row.untyped_storage().nbytes()
        expect(held == row.nbytes, f"a row to hold {row.nbytes} bytes", f"{held} bytes")
        expect(not row.requires_grad, "a row without a graph", "requires_grad")
