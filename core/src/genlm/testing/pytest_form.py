"""The suite as pytest tests: `conformance_tests`, and how an outcome reaches pytest."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from genlm.testing.report import describe
from genlm.testing.run import Run, Settings, prepared
from genlm.testing.selection import Case

__all__ = ["conformance_tests", "judge", "parameters"]


def conformance_tests(
    backend: str,
    *,
    models: Sequence[str] = (),
    only: Sequence[str] = (),
    profile: str = "quick",
    xfail: str | Path | None = None,
    seed: int = 0,
    no_skips: bool = False,
) -> Callable[..., None]:
    """Make a test function that runs every check of an installed backend.

        test_conformance = conformance_tests("toy")

    Args:
        backend: Its name.
        models: Names of targets to run; by default all.
        only: Ids of checks or cases to run; by default all.
        profile: `"quick"` or `"full"`.
        xfail: File of expected failures.
        seed: Decides every example.
        no_skips: Whether a check that could not run is a failure.

    Raises:
        PluginError: The backend is not installed or cannot be used.
        LookupError: It brings no target, or what is to be run does not exist.
    """
    settings = Settings(
        backend,
        only=tuple(only),
        models=tuple(models),
        profile=profile,
        xfail=None if xfail is None else Path(xfail),
        seed=seed,
        no_skips=no_skips,
    )
    stack = ExitStack()
    run = stack.enter_context(prepared(settings))
    atexit.register(stack.close)  # targets live as long as the module of the test

    @pytest.mark.parametrize("case", parameters(run))
    def test_conformance(case: Case) -> None:
        judge(run, case)

    return test_conformance


def parameters(run: Run) -> list[Any]:
    """The cases of a run as parameters with readable ids."""
    return [pytest.param(case, id=case.id) for case in run.cases]


def judge(run: Run, case: Case) -> None:
    """Run a case and tell pytest what became of it."""
    outcome = run.outcome(case)
    if run.fails(outcome):
        pytest.fail("\n".join(describe(outcome)), pytrace=False)
    if outcome.status == "expected failure":
        pytest.xfail(outcome.reason)
    if outcome.status != "passed":
        pytest.skip(f"{outcome.status}: {outcome.reason}")
