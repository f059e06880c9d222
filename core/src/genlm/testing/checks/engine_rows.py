"""Checks of rows, alone and in batches: their form, values and memory."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.target import TokenTuple


@engine_check()
def rows_are_distributions(fixture: EngineFixture) -> None:
    """A row is float32 natural-log probabilities over the whole vocabulary that sum to 1."""
    missing = list(fixture.lm.vocabulary.missing_ids)

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
            # The core refuses rows of another shape, dtype or sum.
            expect(
                row.device == single.device, f"every row on {single.device}", str(row.device)
            )
            expect(
                bool(row[missing].isneginf().all()),
                "-inf at the ids that no token has",
                row[missing].tolist(),
                token_ids=token_ids,
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


@engine_check(oracle=True)
def rows_are_right(fixture: EngineFixture) -> None:
    """Every row equals the oracle's row."""

    def holds(token_ids: TokenTuple) -> None:
        fixture.check_request(fixture.lm, token_ids)

    (sequence,) = fixture.some_sequences(1)
    longest = (sequence * fixture.max_length)[: fixture.max_length]
    for token_ids in (sequence[:2], sequence[:1], longest):
        holds(token_ids)
    fixture.for_all(holds, token_ids=fixture.sequences())


@engine_check()
def the_context_can_be_filled(fixture: EngineFixture) -> None:
    """A request with exactly `max_context` tokens returns a row."""
    limit = fixture.lm.max_context
    length = fixture.max_length if limit is None else limit
    (sequence,) = fixture.some_sequences(1)
    full = (sequence * length)[:length]
    row = fixture.run(fixture.lm.next_token_logprobs(full))
    expect(
        tuple(row.shape) == (fixture.lm.vocab_size,) and not bool(row.isnan().any()),
        f"a row for a sequence of {length} tokens",
        tuple(row.shape),
    )
    if length <= fixture.target.max_length:
        fixture.check_row(row, full)


@engine_check()
def batch_equals_map(fixture: EngineFixture) -> None:
    """Row i of a batch, or of concurrent requests, is the row of sequence i."""

    def holds(batch: list[TokenTuple], data: st.DataObject) -> None:
        shuffled = data.draw(st.permutations([*batch, *batch[:2]]))
        for sequences in (batch, shuffled):
            fixture.lm.clear_output_cache()
            fixture.check_batch(fixture.lm, sequences, batch=sequences)
        fixture.lm.clear_output_cache()
        concurrent = fixture.gather(map(fixture.lm.next_token_logprobs, shuffled))
        fixture.check_rows(concurrent, shuffled, concurrent=shuffled)
        fixture.saw("ragged batch", len({len(token_ids) for token_ids in batch}) > 1)
        fixture.saw("another order", shuffled[: len(batch)] != batch)

    fixture.for_all(holds, batch=fixture.batches(), data=st.data())


@engine_check()
def concurrent_requests_share_steps(fixture: EngineFixture) -> None:
    """Concurrent requests reach the engine together; without `wake`, steps complete several."""
    lm, probe = fixture.load_probed()
    sequences = fixture.some_sequences(16)
    rows = fixture.gather(map(lm.next_token_logprobs, sequences))
    fixture.check_rows(rows, sequences)
    expect(
        probe.in_step[0] == len(sequences),
        f"{len(sequences)} concurrent requests in the engine at its first step",
        f"{probe.in_step[0]}; queries at each step: {probe.in_step}",
    )
    if hasattr(probe.engine, "wake"):  # a step returns results of others as they arrive
        return
    answering = [count for count in probe.finished if count]
    expect(
        len(answering) <= len(sequences) // 2,
        f"at most {len(sequences) // 2} steps that answer {len(sequences)} requests",
        f"{len(answering)}; answers of each step: {probe.finished}",
    )


@engine_check()
def rows_belong_to_the_caller(fixture: EngineFixture) -> None:
    """Modifying a row changes no other row, now or later."""

    def holds(token_ids: TokenTuple, other: TokenTuple) -> None:
        fixture.lm.clear_output_cache()
        first, *others = fixture.gather(map(fixture.lm.next_token_logprobs, [token_ids] * 3))
        _overwrite(first)
        for row in others:
            fixture.check_row(row, token_ids, changed="a row of the same request in flight")
        for change in ("a row from the engine", "a row from the cache"):
            row = fixture.run(fixture.lm.next_token_logprobs(token_ids))
            fixture.check_row(row, token_ids, changed=change)
            _overwrite(row)
        rows = fixture.run(fixture.lm.batch_next_token_logprobs([token_ids, token_ids, other]))
        _overwrite(rows[0])
        fixture.check_rows(rows[1:], [token_ids, other], changed="row 0 of the batch")
        _overwrite(rows)
        fixture.check_batch(fixture.lm, [token_ids, other], changed="a whole batch")

    fixture.for_all(holds, token_ids=fixture.sequences(), other=fixture.sequences())


def _overwrite(rows: torch.Tensor) -> None:
    """Make rows uniform: other distributions, which no check of the core refuses."""
    rows.fill_(-math.log(rows.shape[-1]))


@engine_check()
def rows_hold_no_more_than_themselves(fixture: EngineFixture) -> None:
    """A row keeps only its own memory alive."""
    lm, probe = fixture.load_probed()
    rows = fixture.gather(map(lm.next_token_logprobs, fixture.some_sequences(8)))
    fixture.saw("row of a shared forward pass", max(probe.in_step) > 1)
    for row in rows:
        nbytes = row.untyped_storage().nbytes()
        expect(nbytes == row.nbytes, f"a row to hold {row.nbytes} bytes", f"{nbytes} bytes")
        expect(not row.requires_grad, "a row without a graph", "requires_grad")
