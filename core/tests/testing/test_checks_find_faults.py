"""The checks pass a right engine, and say what is wrong with a broken one."""

from __future__ import annotations

import pytest
import torch
from scripted import ScriptedEngine

from genlm.testing import all_checks

from .conftest import VOCAB_SIZE, RunCheck, scripted_target


@pytest.mark.parametrize("check_id", [check.id for check in all_checks("engine")])
def test_the_right_engine_passes(run_check: RunCheck, check_id: str) -> None:
    outcome = run_check(check_id, scripted_target())
    assert outcome.status in {"passed", "not applicable"}, outcome


def test_a_wrong_row_is_reported_with_the_smallest_example(run_check: RunCheck) -> None:
    class LastRowFirst(ScriptedEngine):
        def evaluate(self, queries):
            return super().evaluate(queries).flip(0)

    target = scripted_target(build=lambda: LastRowFirst(VOCAB_SIZE))
    outcome = run_check("batch-equals-map", target)
    assert outcome.status == "failed"
    assert outcome.expected.startswith("the row of (")
    assert "instead of" in outcome.found
    assert len(eval(outcome.example["batch"])) == 2


def test_a_check_that_raises_is_reported_with_its_traceback(run_check: RunCheck) -> None:
    class NoRows(ScriptedEngine):
        def evaluate(self, queries):
            raise ArithmeticError("no rows today")

    outcome = run_check("rows-are-right", scripted_target(build=lambda: NoRows(VOCAB_SIZE)))
    assert outcome.status == "failed"
    assert "no rows today" in outcome.found
    assert "evaluate" in outcome.details


def test_a_request_that_never_ends_is_a_failure_within_the_patience(
    run_check: RunCheck,
) -> None:
    class Silent(ScriptedEngine):
        def step(self):
            self._pending.clear()
            return []

    target = scripted_target(build=lambda: Silent(VOCAB_SIZE), patience_s=0.5)
    outcome = run_check("rows-are-right", target)
    assert (outcome.status, outcome.expected) == ("failed", "every request to end")
    assert "did not end within 0.5 s" in outcome.found


def test_a_check_fails_if_its_interesting_case_never_occurred(run_check: RunCheck) -> None:
    outcome = run_check("batch-equals-map", scripted_target(token_ids=[3], max_length=1))
    assert outcome.status == "failed"
    assert outcome.expected == "the check's interesting cases to occur"
    assert outcome.found == "none of: ragged batch, another order"


def test_the_same_seed_finds_the_same_example(run_check: RunCheck) -> None:
    class Rounded(ScriptedEngine):
        def evaluate(self, queries):
            return super().evaluate(queries).to(torch.float16).float()

    target = scripted_target(build=lambda: Rounded(VOCAB_SIZE))
    first, second = (run_check("batch-equals-map", target, seed=5) for _ in range(2))
    assert first.example == second.example
