"""`conformance_tests`: the suite as a pytest test."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from genlm.testing.report import describe
from genlm.testing.run import Case, Settings, prepared


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
    """Create a test function that runs every check of an installed backend.

        test_conformance = conformance_tests("toy")

    Args:
        backend: Name of the backend.
        models: Names of targets to run; by default all.
        only: Ids of checks or cases to run; by default all.
        profile: `"quick"` or `"full"`.
        xfail: File of expected failures.
        seed: Random seed of the examples.
        no_skips: Whether a skipped check counts as a failure.

    Raises:
        PluginError: The backend is not installed or cannot be used.
        LookupError: It has no target, or `only` or `models` has an unknown name.
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
    atexit.register(stack.close)  # the targets are used until the process ends

    @pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in run.cases])
    def test_conformance(case: Case) -> None:
        outcome = run.outcome(case)
        if run.fails(outcome):
            pytest.fail("\n".join(describe(outcome)), pytrace=False)
        if outcome.status == "expected failure":
            pytest.xfail(outcome.reason)
        if outcome.status != "passed":
            pytest.skip(f"{outcome.status}: {outcome.reason}")

    return test_conformance
