"""Targets over engines whose answers are a closed form, and a way to run one check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripted import ScriptedEngine, oracle_row

from genlm.testing import Case, EngineTarget, Outcome, all_checks, run_case

VOCAB_SIZE = 16


def scripted_target(**changes: Any) -> EngineTarget:
    """The scripted engine: its rows depend on every token, its place and the adapter."""
    settings: dict[str, Any] = {
        "model": "scripted",
        "build": lambda **options: ScriptedEngine(VOCAB_SIZE, max_context=12, **options),
        "oracle": lambda ids, adapter: oracle_row(ids, adapter, VOCAB_SIZE),
        "adapters": {"red": "red", "blue": "blue"},
        "max_length": 12,
        "texts": (),
        "patience_s": 10.0,
    }
    return EngineTarget(**(settings | changes))


RunCheck = Callable[..., Outcome]


@pytest.fixture
def run_check() -> RunCheck:
    """`run_check(id, target, **options)`: the outcome of one engine check."""

    def run(check_id: str, target: EngineTarget, **options: Any) -> Outcome:
        (check,) = [check for check in all_checks("engine") if check.id == check_id]
        return run_case(Case(check, target), **options)

    return run
