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
from genlm.testing.run import Run, Settings, prepared
from genlm.testing.selection import Case

__all__ = ["conformance_tests", "report_to_pytest"]

_RUN = pytest.StashKey[Run]()


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
        backend: Name of the backend.
        models: Names of targets to run; by default all.
        only: Ids of checks or cases to run; by default all.
        profile: `"quick"` or `"full"`.
        xfail: File of expected failures.
        seed: Decides every example.
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

    @pytest.mark.parametrize("case", _parameters(run))
    def test_conformance(case: Case) -> None:
        report_to_pytest(run, case)

    return test_conformance


def _parameters(run: Run) -> list[Any]:
    """The cases of a run as parameters of a test."""
    return [pytest.param(case, id=case.id) for case in run.cases]


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
    group = parser.getgroup("genlm", "conformance of genlm backends")
    group.addoption("--genlm-backend", metavar="NAME", help="an installed engine or trie")
    group.addoption("--genlm-model", metavar="MODEL", help="a model to check without an oracle")
    group.addoption(
        "--genlm-dtype", default="float32", help="dtype in which that model computes"
    )
    group.addoption("--genlm-only", metavar="ID", action="append", default=[])
    group.addoption("--genlm-profile", choices=list(PROFILES), default="quick")
    group.addoption("--genlm-xfail", metavar="FILE", type=Path, help="expected failures")
    group.addoption("--genlm-seed", type=int, default=0)
    group.addoption("--genlm-no-skips", action="store_true")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the suite's test one parameter per case."""
    if "genlm_case" in metafunc.fixturenames:
        metafunc.parametrize("genlm_case", _parameters(_run_of(metafunc.config)))


@pytest.fixture(scope="session")
def genlm_run(request: pytest.FixtureRequest) -> Run:
    """The run with the given options."""
    return _run_of(request.config)


def _run_of(config: pytest.Config) -> Run:
    if _RUN not in config.stash:
        stack = ExitStack()
        config.stash[_RUN] = stack.enter_context(prepared(_settings(config)))
        config.add_cleanup(stack.close)
    return config.stash[_RUN]


def _settings(config: pytest.Config) -> Settings:
    backend = config.getoption("genlm_backend")
    if backend is None:
        raise pytest.UsageError("name a backend: --genlm-backend=NAME")
    return Settings(
        backend,
        model=config.getoption("genlm_model"),
        dtype=config.getoption("genlm_dtype"),
        only=tuple(config.getoption("genlm_only")),
        profile=config.getoption("genlm_profile"),
        xfail=config.getoption("genlm_xfail"),
        seed=config.getoption("genlm_seed"),
        no_skips=config.getoption("genlm_no_skips"),
    )
