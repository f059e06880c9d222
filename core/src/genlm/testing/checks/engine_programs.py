"""The check that runs random programs; see `genlm.testing.stateful`."""

from __future__ import annotations

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from genlm import Capability, OutputCache
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.stateful import CACHE_SIZE, machine_of
from genlm.testing.trial import hypothesis_settings


@engine_check(
    cases=(
        "query",
        "near_miss",
        "batch",
        "bad_token",
        "spoil",
        "cancel",
        "reset",
        "clear_cache",
    )
)
def random_programs_agree_with_the_oracle(trial: EngineTrial) -> None:
    """In any program of requests, faults, cancellations and clearings every row is right."""
    lora = Capability.LORA in trial.lm.capabilities and bool(trial.target.adapters)
    lm = trial.load(adapters=lora, output_cache=OutputCache(CACHE_SIZE))
    machine = hypothesis.seed(trial.seed)(machine_of(trial, lm))
    profile = trial.profile
    settings = hypothesis_settings(
        profile.programs, profile.program_steps, shrink=profile.shrink
    )
    run_state_machine_as_test(machine, settings=settings)
