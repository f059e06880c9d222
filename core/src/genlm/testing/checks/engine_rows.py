"""Checks of single rows: their form, their values, and whose they are."""

from __future__ import annotations

import asyncio

import torch

from genlm import AsyncLM
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import expect
from genlm.testing.sequences import TokenTuple


@engine_check(cases=("row of one token", "row of a batch"))
def rows_are_distributions(trial: EngineTrial) -> None:
    """A row is float32 natural-log probabilities over the whole vocabulary that sum to 1."""

    def law(batch: list[TokenTuple]) -> None:
        single = trial.run(trial.lm.next_token_logprobs(batch[0]))
        rows = trial.run(trial.lm.batch_next_token_logprobs(batch))
        expect(
            tuple(rows.shape) == (len(batch), trial.lm.vocab_size),
            f"a batch of shape {(len(batch), trial.lm.vocab_size)}",
            tuple(rows.shape),
            batch=batch,
        )
        for row, token_ids in zip([single, *rows], [batch[0], *batch], strict=True):
            _check_form(trial.lm, row, token_ids)
            expect(
                row.device == single.device, f"every row on {single.device}", str(row.device)
            )
            trial.devices.add(str(row.device))
        trial.saw("row of one token", min(map(len, batch)) == 1)
        trial.saw("row of a batch", len(batch) > 1)

    trial.for_all(law, batch=trial.batches())
    empty = trial.run(trial.lm.batch_next_token_logprobs([]))
    expect(
        tuple(empty.shape) == (0, trial.lm.vocab_size) and empty.dtype == torch.float32,
        f"an empty batch of shape {(0, trial.lm.vocab_size)}, float32",
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
def rows_are_right(trial: EngineTrial) -> None:
    """A row is the oracle's."""

    def law(token_ids: TokenTuple) -> None:
        row = trial.run(trial.lm.next_token_logprobs(token_ids))
        trial.check_row(row, token_ids, token_ids=token_ids)
        trial.saw("longest sequence", len(token_ids) == trial.max_length)
        trial.saw("one token", len(token_ids) == 1)

    (one, *_) = trial.some_sequences(1)
    longest = (one * trial.max_length)[: trial.max_length]
    for edge in (one[:1], longest):
        law(edge)
    trial.for_all(law, token_ids=trial.sequences())


@engine_check(cases=("cached row", "row of a batch", "row shared in flight"))
def rows_belong_to_the_caller(trial: EngineTrial) -> None:
    """Changing a row changes no other row, now or later."""

    async def shared(token_ids: TokenTuple) -> list[torch.Tensor]:
        asked = (trial.lm.next_token_logprobs(token_ids) for _ in range(3))
        return list(await asyncio.gather(*asked))

    def law(token_ids: TokenTuple, other: TokenTuple) -> None:
        trial.lm.clear_cache()
        first, *others = trial.run(shared(token_ids))
        first.fill_(7.0)
        for row in others:
            trial.check_row(row, token_ids, changed="a row of the same request in flight")
        trial.saw("row shared in flight")
        for change in ("a row from the engine", "a row from the cache"):
            row = trial.run(trial.lm.next_token_logprobs(token_ids))
            trial.check_row(row, token_ids, changed=change)
            row.fill_(7.0)
        trial.saw("cached row")
        rows = trial.run(trial.lm.batch_next_token_logprobs([token_ids, token_ids, other]))
        rows[0].fill_(7.0)
        trial.check_rows(rows[1:], [token_ids, other], changed="row 0 of the batch")
        rows.fill_(7.0)
        again = trial.run(trial.lm.batch_next_token_logprobs([token_ids, other]))
        trial.check_rows(again, [token_ids, other], changed="a whole batch")
        trial.saw("row of a batch")

    trial.for_all(law, token_ids=trial.sequences(), other=trial.sequences())


@engine_check(cases=("row of a shared forward pass",))
def rows_hold_no_more_than_themselves(trial: EngineTrial) -> None:
    """A row keeps no memory alive but its own."""
    lm, probe = trial.load_probed()

    async def ask(batch: list[TokenTuple]) -> list[torch.Tensor]:
        return list(await asyncio.gather(*map(lm.next_token_logprobs, batch)))

    rows = trial.run(ask(trial.some_sequences(8)))
    trial.saw("row of a shared forward pass", max(probe.in_step) > 1)
    for row in rows:
        held = row.untyped_storage().nbytes()
        expect(held == row.nbytes, f"a row to hold {row.nbytes} bytes", f"{held} bytes")
        expect(not row.requires_grad, "a row without a graph", "requires_grad")
