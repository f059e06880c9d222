"""A pytest plugin for the packaged suite, loaded by name and never by itself.

pytest -p genlm.testing.plugin --pyargs genlm.testing.suite --genlm-backend=NAME
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from genlm.testing.profile import PROFILES
from genlm.testing.pytest_form import parameters
from genlm.testing.run import Run, Settings, prepared

_RUN = pytest.StashKey[Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `genlm check`."""
    group = parser.getgroup("genlm", "conformance of genlm backends")
    group.addoption("--genlm-backend", metavar="NAME", help="an installed engine or trie")
    group.addoption("--genlm-model", metavar="MODEL", help="a model, without an oracle")
    group.addoption("--genlm-dtype", default="float32", help="in which that model computes")
    group.addoption("--genlm-only", metavar="ID", action="append", default=[])
    group.addoption("--genlm-profile", choices=list(PROFILES), default="quick")
    group.addoption("--genlm-xfail", metavar="FILE", type=Path, help="expected failures")
    group.addoption("--genlm-seed", type=int, default=0)
    group.addoption("--genlm-no-skips", action="store_true")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the suite's test one parameter per case."""
    if "genlm_case" in metafunc.fixturenames:
        metafunc.parametrize("genlm_case", parameters(_run_of(metafunc.config)))


@pytest.fixture(scope="session")
def genlm_run(request: pytest.FixtureRequest) -> Run:
    """The run that the options ask for."""
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
        raise pytest.UsageError("which backend? --genlm-backend=NAME")
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
