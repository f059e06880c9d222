"""Checks that concurrent requests are batched, and that batching changes no row."""

from __future__ import annotations

from hypothesis import strategies as st

from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture, gathered
from genlm.testing.strategies import TokenTuple


@engine_check(cases=("ragged batch", "duplicates", "another order", "concurrent requests"))
def batch_equals_map(fixture: EngineFixture) -> None:
    """Row i of a batch, or of concurrent requests, is that of sequence i."""

    def holds(batch: list[TokenTuple], data: st.DataObject) -> None:
        shuffled = data.draw(st.permutations([*batch, *batch[:2]]))
        for asked in (batch, shuffled):
            fixture.lm.clear_output_cache()
            rows = fixture.run(fixture.lm.batch_next_token_logprobs(asked))
            fixture.check_rows(rows, asked, batch=asked)
        fixture.lm.clear_output_cache()
        concurrent = fixture.run(gathered(fixture.lm.next_token_logprobs, shuffled))
        fixture.check_rows(concurrent, shuffled, concurrent=shuffled)
        fixture.saw("concurrent requests")
        fixture.saw("ragged batch", len({len(token_ids) for token_ids in batch}) > 1)
        fixture.saw("duplicates")
        fixture.saw("another order", shuffled[: len(batch)] != batch)

    fixture.for_all(holds, batch=fixture.batches(), data=st.data())


@engine_check(cases=("shared step",))
def concurrent_requests_share_steps(fixture: EngineFixture) -> None:
    """Concurrent requests reach the engine together, and a step answers several of them."""
    lm, probe = fixture.load_probed()
    asked = fixture.some_sequences(16)
    fixture.check_rows(fixture.run(gathered(lm.next_token_logprobs, asked)), asked)
    fixture.saw("shared step")
    expect(
        probe.in_step[0] == len(asked),
        f"{len(asked)} concurrent requests in the engine at its first step",
        f"{probe.in_step[0]}; queries at each step: {probe.in_step}",
    )
    answering = [count for count in probe.finished if count]
    expect(
        len(answering) <= len(asked) // 2,
        f"at most {len(asked) // 2} steps that answer {len(asked)} requests",
        f"{len(answering)}; answers of each step: {probe.finished}",
    )
