"""The suite as pytest tests: `conformance_tests`, and a plugin for the packaged suite.

The plugin is loaded by name only:

    pytest -p genlm.testing.plugin --pyargs genlm.testing.suite --genlm-backend=NAME
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from genlm.testing.fixture import PROFILES
from genlm.testing.report import describe
from genlm.testing.run import Case, Run, Settings, prepared

__all__ = ["conformance_tests", "report_to_pytest"]


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

    @pytest.mark.parametrize(("run", "case"), _parameters(settings))
    def test_conformance(run: Run, case: Case) -> None:
        report_to_pytest(run, case)

    return test_conformance


def _parameters(settings: Settings) -> list[Any]:
    """The cases of a run as parameters of a test."""
    stack = ExitStack()
    run = stack.enter_context(prepared(settings))
    atexit.register(stack.close)  # the targets are used until the process ends
    return [pytest.param(run, case, id=case.id) for case in run.cases]


def report_to_pytest(run: Run, case: Case) -> None:
    """Run a case; fail, xfail or skip the current test by its outcome."""
    outcome = run.outcome(case)
    if run.fails(outcome):
        pytest.fail("\n".join(describe(outcome)), pytrace=False)
    if outcome.status == "expected failure":
        pytest.xfail(outcome.reason)
    if outcome.status != "passed":
        pytest.skip(f"{outcome.status}: {outcome.reason}")


# -- the plugin -----------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `genlm check`."""
    add = parser.getgroup("genlm", "conformance of genlm backends").addoption
    add("--genlm-backend", metavar="NAME", help="an installed engine or trie")
    add("--genlm-model", metavar="MODEL", help="a model to check without an oracle")
    add("--genlm-dtype", default="float32", help="dtype in which that model computes")
    add("--genlm-only", metavar="ID", action="append", default=[])
    add("--genlm-profile", choices=list(PROFILES), default="quick")
    add("--genlm-xfail", metavar="FILE", type=Path, help="expected failures")
    add("--genlm-seed", type=int, default=0)
    add("--genlm-no-skips", action="store_true")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the packaged suite's test one parameter per case."""
    if "genlm_case" in metafunc.fixturenames:
        settings = _settings(metafunc.config)
        metafunc.parametrize(("genlm_run", "genlm_case"), _parameters(settings))


def _settings(config: pytest.Config) -> Settings:
    options = ("backend", "model", "dtype", "only", "profile", "xfail", "seed", "no_skips")
    values = {name: config.getoption(f"genlm_{name}") for name in options}
    if values["backend"] is None:
        raise pytest.UsageError("name a backend: --genlm-backend=NAME")
    return Settings(**values)
