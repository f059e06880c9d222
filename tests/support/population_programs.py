"""Random programs of populations on a loaded model, as in the conformance suite."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import genlm
from genlm.testing import QUICK, EngineFixture, EngineTarget
from genlm.testing.population_program import CALLS, PopulationProgram

Oracle = Callable[..., torch.Tensor]
"""Function of the ids of one sequence and an adapter, which returns the row of the sequence."""


def run_population_programs(
    llm: genlm.AsyncLM,
    oracle: Oracle,
    *,
    seed: int = 0,
    programs: int = 3,
    steps: int = 20,
    tolerance: float = 1e-4,
    max_length: int = 50,
    adapters: Sequence[str | None] = (None,),
) -> None:
    """Run several programs concurrently.

    Args:
        llm: The model.
        oracle: Its rows.
        seed: Seed of the programs.
        programs: Number of programs.
        steps: Number of calls of each program.
        tolerance: Maximum error of a log-probability.
        max_length: Maximum number of tokens of a sequence.
        adapters: Adapters of the populations.
    """

    def row(token_ids: tuple[int, ...], adapter: str | None) -> torch.Tensor:
        found = oracle(token_ids) if adapter is None else oracle(token_ids, adapter)
        return found[: llm.vocab_size]

    def build(**_: Any) -> genlm.Engine:
        raise AssertionError("the model is loaded")

    target = EngineTarget(
        model=llm.name,
        build=build,
        oracle=row,
        dtype="float16",  # whose tolerances include those of quantised models
        tolerance=tolerance,
        token_ids=range(3, llm.vocab_size),
        max_length=max_length,
        timeout_s=600.0,
    )
    with EngineFixture(target, QUICK, seed) as fixture:
        fixture.lm = llm
        fixture.gather(
            PopulationProgram(fixture, llm, 100 * seed + number, adapters).run(
                ["create", *random.Random(100 * seed + number).choices(CALLS, k=steps)]
            )
            for number in range(programs)
        )
    assert llm.statistics().pending == 0
