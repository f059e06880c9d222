"""`Mutant`: a correct target or core with one fault, and the check that must detect it.

`CoreFault`: a fault of the core that no engine could have, and the test of the core that must
detect it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import hypothesis
import hypothesis.core
import pytest

from genlm import Engine, TokenCharacterTrie
from genlm.testing import QUICK, Case, Outcome, all_checks, run_case
from genlm.testing.target import Kind, Target, TrieTarget

from .baselines import cached_target, plain_target
from .cached_engine import CachedEngine

ShowsAs = Literal["violated property", "lost request", "exception"]

SEEDS = range(5)

PROFILE = hypothesis.settings(QUICK, phases=[hypothesis.Phase.generate])
"""The quick profile without shrinking, which takes long."""

TIMEOUTS_S = (0.6, 6.0, 60.0)
"""Time limits for mutants that lose requests: the first with which the correct target passes
the same check is used, so that a busy machine is never mistaken for a lost request."""

_MODULES = (
    "rows",
    "prefixes",
    "batches",
    "sampling",
    "adapters",
    "weights",
    "vocabularies",
    "output_caches",
    "requests",
    "contexts",
    "reductions",
    "text_reductions",
    "populations",
    "schedulers",
    "closing",
    "statistics",
    "tries",
    "nodes",
    "async_tries",
)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A target with one fault.

    Attributes:
        name: Names it in the table.
        breaks: The fault, in one line.
        killed_by: Id of the check that must fail on it, whatever the seed.
        kind: What is broken.
        target: Makes the broken target with a time limit.
        correct: Makes the correct target that it is derived from.
        patched: Attribute of the core that is replaced during the check: owner, name, value.
        shows_as: How that check must fail. Most faults violate its property; some
            can only show as a request that never ends or raises.
    """

    name: str
    breaks: str
    killed_by: str
    kind: Kind
    target: Callable[[float], Target]
    correct: Callable[[float], Target]
    patched: tuple[Any, str, Any] | None = None
    shows_as: ShowsAs = "violated property"

    def outcome(self, seed: int) -> Outcome:
        """Run the check that must kill it."""
        (check,) = (c for c in all_checks(self.kind) if c.id == self.killed_by)
        for timeout_s in TIMEOUTS_S if self.shows_as == "lost request" else (60.0,):
            if timeout_s < TIMEOUTS_S[-1]:
                control = run_case(Case(check, self.correct(timeout_s)), PROFILE, seed)
                if control.status != "passed":
                    continue
            with self._broken():
                outcome = run_case(Case(check, self.target(timeout_s)), PROFILE, seed)
            if self.is_killed(outcome):
                break
        return outcome

    def is_killed(self, outcome: Outcome) -> bool:
        """Whether the check failed, and in the way that it should."""
        return outcome.status == "failed" and how_it_shows(outcome) == self.shows_as

    @contextlib.contextmanager
    def _broken(self) -> Iterator[None]:
        if self.patched is None:
            yield
            return
        owner, name, value = self.patched
        with mock.patch.object(owner, name, value):
            yield


def how_it_shows(outcome: Outcome) -> ShowsAs:
    """Which kind of failure an outcome is."""
    shown = {"every request to end": "lost request", "no exception": "exception"}
    return shown.get(outcome.expected, "violated property")  # type: ignore[return-value]


@dataclass(frozen=True)
class CoreFault:
    """A fault of the core.

    Attributes:
        name: Names it in the table.
        breaks: The fault, in one line.
        found_by: The test that must fail: its file in `core/tests` and its name.
        patched: Attribute of the core that is replaced during the test: owner, name, value.
        hangs: Whether the test waits for ever. It is then run in a process of its own, whose
            time limit counts as a failure (`found_hanging`).
    """

    name: str
    breaks: str
    found_by: str
    patched: tuple[Any, str, Any]
    hangs: bool = False

    def is_found(self) -> bool:
        """Whether the test fails with the fault, for one of five seeds of its examples."""
        if self.hangs:
            return self.name in found_hanging()
        return any(
            self.test("signal", seed) == pytest.ExitCode.TESTS_FAILED for seed in range(5)
        )

    def test(self, timeout_method: str, seed: int = 0) -> int:
        """Run the test with the fault; return the exit code of pytest."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=20"]
        options += [f"--hypothesis-seed={seed}"]
        options += [f"--timeout-method={timeout_method}"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        if self.hangs:
            options += ["--timeout=10"]  # eight tests at once
        # The option would hold for the tests that follow in this process, too.
        own_seed = mock.patch.object(hypothesis.core, "global_force_seed", None)
        with own_seed, mock.patch.object(*self.patched):
            return int(pytest.main([*options, f"core/tests/{self.found_by}"]))


@functools.cache
def start_hanging() -> subprocess.Popen[str]:
    """Start a program that runs the tests that hang, all at once."""
    command = [sys.executable, "-m", "tests.mutants", "--hanging"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@functools.cache
def found_hanging() -> frozenset[str]:
    """Names of the faults whose tests hang and fail."""
    program = start_hanging()
    printed, _ = program.communicate()
    assert program.returncode == 0
    statuses = json.loads(printed)
    return frozenset(
        name for name, status in statuses.items() if status == pytest.ExitCode.TESTS_FAILED
    )


def statuses_of_hanging() -> dict[str, int]:
    """Run the tests that hang, each with its fault in a fork of this process."""
    children = {}
    for fault in all_core_faults():
        if fault.hangs:
            children[fault.name] = os.fork()
            if not children[fault.name]:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                os._exit(fault.test("thread"))
    return {
        name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for name, child in children.items()
    }


_mutants: list[Mutant] = []
_core_faults: list[CoreFault] = []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Print no logs: engines that die on purpose log it, for the checks to see."""
    loggers = [logging.getLogger(name) for name in ("genlm", "asyncio")]
    for logger in loggers:
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.propagate = True


def all_mutants() -> list[Mutant]:
    """Every mutant, in reading order."""
    for module in _MODULES:
        importlib.import_module(f"{__package__}.{module}")
    return list(_mutants)


def all_core_faults() -> list[CoreFault]:
    """Every fault of the core that its own tests must find."""
    all_mutants()
    return list(_core_faults)


def engine_mutant(
    *, killed_by: str, shows_as: ShowsAs = "violated property"
) -> Callable[[type], type]:
    """Register a class derived from `CachedEngine`, `ResidentEngine` or `PlainEngine`."""

    def decorate(engine: type[Engine]) -> type[Engine]:
        made_of = cached_target if issubclass(engine, CachedEngine) else plain_target
        _register(
            engine,
            killed_by=killed_by,
            kind="engine",
            target=lambda timeout_s: made_of(engine, timeout_s=timeout_s),
            correct=lambda timeout_s: made_of(timeout_s=timeout_s),
            shows_as=shows_as,
        )
        return engine

    return decorate


def core_mutant(
    owner: Any,
    attribute: str,
    *,
    killed_by: str,
    on: Callable[..., Target] = plain_target,
    kind: Kind = "engine",
    shows_as: ShowsAs = "violated property",
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a function that makes a broken `owner.attribute` of the right one.

    Args:
        owner: A class or module of the core.
        attribute: What is replaced in it, for all instances.
        killed_by: Id of the check.
        on: Makes the correct target that the broken core runs.
        kind: Of that target.
        shows_as: See `Mutant`.
    """

    def decorate(broken: Callable[[Any], Any]) -> Callable[[Any], Any]:
        _register(
            broken,
            killed_by=killed_by,
            kind=kind,
            target=lambda timeout_s: on(timeout_s=timeout_s),
            correct=lambda timeout_s: on(timeout_s=timeout_s),
            patched=(owner, attribute, broken(getattr(owner, attribute))),
            shows_as=shows_as,
        )
        return broken

    return decorate


def core_fault(
    owner: Any, attribute: str, *, found_by: str, hangs: bool = False
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a function that makes a broken `owner.attribute` of the right one.

    Args:
        owner: A class or module of the core.
        attribute: What is replaced in it, for all instances.
        found_by: The test of the core that must fail.
        hangs: Whether it waits for ever.
    """

    def decorate(broken: Callable[[Any], Any]) -> Callable[[Any], Any]:
        patched = (owner, attribute, broken(getattr(owner, attribute)))
        _core_faults.append(CoreFault(*_described(broken), found_by, patched, hangs))
        return broken

    return decorate


def trie_mutant(*, killed_by: str) -> Callable[[type], type]:
    """Register a class derived from `TokenCharacterTrie`."""

    def decorate(trie: type) -> type:
        _register(
            trie,
            killed_by=killed_by,
            kind="trie",
            target=lambda timeout_s: TrieTarget(model="numpy", build=trie, timeout_s=timeout_s),
            correct=lambda timeout_s: TrieTarget(
                model="numpy", build=TokenCharacterTrie, timeout_s=timeout_s
            ),
        )
        return trie

    return decorate


def _register(definition: Any, **fields: Any) -> None:
    name, breaks = _described(definition)
    _mutants.append(Mutant(name=name, breaks=breaks, **fields))


def _described(definition: Any) -> tuple[str, str]:
    """The name and the fault of a class or function."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=A)(?=[A-Z])|_", " ", definition.__name__).lower()
    return words, " ".join((inspect.getdoc(definition) or "").split())
