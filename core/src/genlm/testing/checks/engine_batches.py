"""Checks that grouping requests never changes an answer, and that they are grouped."""

from __future__ import annotations

import asyncio

import torch
from hypothesis import strategies as st

from genlm import AsyncLM
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import expect
from genlm.testing.sequences import TokenTuple


@engine_check(cases=("ragged batch", "duplicates", "another order"))
def batch_equals_map(trial: EngineTrial) -> None:
    """Row i of a batch is that of sequence i, whatever else is in the batch."""

    def law(batch: list[TokenTuple], data: st.DataObject) -> None:
        shuffled = data.draw(st.permutations([*batch, *batch[:2]]))
        for asked in (batch, shuffled):
            trial.lm.clear_cache()
            rows = trial.run(trial.lm.batch_next_token_logprobs(asked))
            trial.check_rows(rows, asked, batch=asked)
        trial.saw("ragged batch", len({len(token_ids) for token_ids in batch}) > 1)
        trial.saw("duplicates")
        trial.saw("another order", shuffled[: len(batch)] != batch)

    trial.for_all(law, batch=trial.batches(), data=st.data())


async def _gathered(lm: AsyncLM, asked: list[TokenTuple]) -> list[torch.Tensor]:
    return list(await asyncio.gather(*map(lm.next_token_logprobs, asked)))


@engine_check(cases=("ragged batch", "duplicates"))
def concurrent_equals_alone(trial: EngineTrial) -> None:
    """A request answered together with others has the row that it has alone."""

    def law(batch: list[TokenTuple]) -> None:
        trial.lm.clear_cache()
        asked = [*batch, batch[0]]
        trial.check_rows(trial.run(_gathered(trial.lm, asked)), asked, asked=asked)
        trial.saw("ragged batch", len({len(token_ids) for token_ids in batch}) > 1)
        trial.saw("duplicates")

    trial.for_all(law, batch=trial.batches())


@engine_check(cases=("shared step",))
def concurrent_requests_share_steps(trial: EngineTrial) -> None:
    """Concurrent requests leave for the engine together, and it answers several a step."""
    lm, probe = trial.load_probed()
    asked = trial.some_sequences(16)
    trial.check_rows(trial.run(_gathered(lm, asked)), asked)
    trial.saw("shared step")
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
