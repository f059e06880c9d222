"""The fixture `run_check`, which runs one check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from genlm.testing import Case, EngineTarget, Outcome, all_checks, run_case

RunCheck = Callable[..., Outcome]


@pytest.fixture
def run_check() -> RunCheck:
    """`run_check(id, target, **options)`: the outcome of one engine check."""

    def run(check_id: str, target: EngineTarget, **options: Any) -> Outcome:
        (check,) = [check for check in all_checks("engine") if check.id == check_id]
        return run_case(Case(check, target), **options)

    return run
