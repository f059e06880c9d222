"""`Run`: the cases of one run of the suite against a backend; `run_case` runs one of them."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genlm import BackendInfo, Capability
from genlm.testing.check import Check
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.failure import CheckFailure, CheckTimeout, NotApplicable, Skipped
from genlm.testing.fixture import PROFILES, QUICK, Fixture, Profile
from genlm.testing.outcome import ExpectedFailures, Outcome
from genlm.testing.selection import Case, cases_of, chosen, find, targets_of
from genlm.testing.target import EngineTarget
from genlm.testing.trie_fixture import TrieFixture

__all__ = ["Run", "Settings", "prepared", "run_case"]

_SHOWN_FRAMES = 3  # of the exception and of each of its causes


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        backend: Name of an installed engine or trie.
        model: A model for the engine to load, checked without an oracle; by default the
            backend's targets are checked.
        dtype: Dtype in which that model computes; sets the tolerance.
        only: Ids of checks or cases to run; by default all.
        models: Names of targets to run; by default all.
        profile: `"quick"` or `"full"`.
        xfail: File of expected failures.
        seed: Random seed of the examples.
        no_skips: Whether a skipped check counts as a failure.
    """

    backend: str
    model: str | None = None
    only: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    profile: str = "quick"
    xfail: Path | None = None
    seed: int = 0
    no_skips: bool = False
    dtype: str = "float32"

    @property
    def numbers(self) -> Profile:
        """The profile itself.

        Raises:
            ValueError: The name is unknown.
        """
        if self.profile not in PROFILES:
            raise ValueError(f"profile={self.profile!r}: expected one of {', '.join(PROFILES)}")
        return PROFILES[self.profile]


@dataclass(frozen=True)
class Run:
    """The cases of one run of the suite.

    Attributes:
        settings: The user's settings.
        info: The backend.
        cases: The cases to run, in order.
        expected: The expected failures.
    """

    settings: Settings
    info: BackendInfo
    cases: list[Case]
    expected: ExpectedFailures

    def outcome(self, case: Case) -> Outcome:
        """Run one case and apply the expected failures."""
        found = run_case(case, self.settings.numbers, self.settings.seed)
        return self.expected.applied_to(found)

    def outcomes(self) -> Iterator[Outcome]:
        """Run all cases, one after another.

        Raises:
            Exception: Loading the user's own model failed; every check would fail with it.
        """
        target = self.cases[0].target
        if self.settings.model is not None and isinstance(target, EngineTarget):
            target.load().close()  # the only target: its engine is shared and stays loaded
        return map(self.outcome, self.cases)

    def fails(self, outcome: Outcome) -> bool:
        """Whether an outcome counts as a failure of the backend."""
        if outcome.status == "skipped":
            return self.settings.no_skips
        return outcome.status in {"failed", "unexpected pass"}


@contextmanager
def prepared(settings: Settings) -> Iterator[Run]:
    """Find the backend, build its targets, and close them afterwards.

    Raises:
        PluginError: The backend is not installed or cannot be used.
        LookupError: It has no target, or `only` or `models` has an unknown name.
        TypeError: `BackendSpec.conformance` names something other than a target.
        ExpectationError: The file of expected failures is malformed or names an unknown check.
        ValueError: The profile or dtype is unknown.
    """
    _ = settings.numbers
    info = find(settings.backend)
    with tempfile.TemporaryDirectory(prefix="genlm-check-") as folder:
        targets = targets_of(info, Path(folder), settings.model, settings.dtype)
        everything = cases_of(targets, info)
        expected = ExpectedFailures.read(settings.xfail)
        expected.refuse_unmatched(_ids(everything))
        cases = chosen(everything, settings.only, settings.models)
        try:
            yield Run(settings, info, cases, expected)
        finally:
            for target in targets:
                if isinstance(target, EngineTarget):
                    target.close()


def _ids(cases: Iterable[Case]) -> Iterator[str]:
    for case in cases:
        yield case.id
        yield case.check.id


def run_case(case: Case, profile: Profile = QUICK, seed: int = 0) -> Outcome:
    """Run one check of one target; exceptions become part of the outcome."""
    began = time.perf_counter()
    found: dict[str, Any] = {"status": "passed"}
    fixture: EngineFixture | TrieFixture | None = None
    try:
        with _fixture_of(case, profile, seed) as fixture:
            found = _why_not(case.check, fixture) or found
            if found["status"] == "passed":
                case.check.function(fixture)
                _expect_cases(case.check, fixture)
    except NotApplicable as reason:
        found = {"status": "not applicable", "reason": str(reason)}
    except Skipped as reason:
        found = {"status": "skipped", "reason": str(reason)}
    except (Exception, CheckTimeout) as error:  # noqa: BLE001 - reported
        found = {"status": "failed", **_described(error)}
    if fixture is not None:
        found["cases"] = {name: count for name, count in fixture.cases.items() if count}
        found["devices"] = tuple(sorted(fixture.devices))
    seconds = time.perf_counter() - began
    return Outcome(id=case.id, property=case.check.property, seconds=seconds, **found)


def _fixture_of(case: Case, profile: Profile, seed: int) -> EngineFixture | TrieFixture:
    if isinstance(case.target, EngineTarget):
        listed = None if case.info is None else frozenset(case.info.capabilities)
        return EngineFixture(case.target, profile, seed, listed)
    return TrieFixture(case.target, profile, seed)


def _why_not(check: Check, fixture: EngineFixture | TrieFixture) -> dict[str, Any] | None:
    """Return why a check cannot or need not run; None if it should run."""
    if isinstance(fixture, EngineFixture):
        return _why_not_engine(check, fixture)
    if check.member is None or hasattr(fixture.build([b"a"]), check.member):
        return None
    return {"status": "not applicable", "reason": f"the trie has no {check.member}"}


def _why_not_engine(check: Check, fixture: EngineFixture) -> dict[str, Any] | None:
    if check.needs is not None or check.unless is not None:
        declared: frozenset[Capability] = fixture.lm.capabilities
        if check.needs is not None and check.needs not in declared:
            return {"status": "not applicable", "reason": f"{check.needs} is not declared"}
        if check.unless in declared:
            return {"status": "not applicable", "reason": f"{check.unless} is declared"}
    if check.oracle and fixture.target.oracle is None:
        return {"status": "skipped", "reason": "needs an oracle, and the target has none"}
    if (
        check.needs is Capability.LORA
        and fixture.target.oracle is None
        and not fixture.target.adapters
    ):
        return {"status": "skipped", "reason": "needs adapters, and none were given"}
    return None


def _expect_cases(check: Check, fixture: Fixture) -> None:
    absent = [case for case in check.cases if not fixture.cases[case]]
    if absent:
        raise CheckFailure(
            "every case that the check must cover to occur",
            f"none of: {', '.join(absent)}",
            {"cases": dict(fixture.cases)},
        )


def _described(error: BaseException) -> dict[str, Any]:
    failure = _first_failure(error)
    if failure is not None:
        example = {name: repr(value) for name, value in failure.example.items()}
        return {"expected": failure.expected, "found": failure.found, "example": example}
    if isinstance(error, CheckTimeout):
        return {"expected": "every request to end", "found": str(error)}
    notes = "\n".join(getattr(error, "__notes__", ()))
    frames = traceback.format_exception(error, limit=-_SHOWN_FRAMES)
    return {
        "expected": "no exception",
        "found": f"{type(error).__name__}: {error}",
        "details": "\n".join(filter(None, [notes, "".join(frames)])),
    }


def _first_failure(error: BaseException) -> CheckFailure | None:
    """Find the violated property, also in Hypothesis' exception group of a flaky failure."""
    if isinstance(error, CheckFailure):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            failure = _first_failure(inner)
            if failure is not None:
                return failure
    return None
