"""`Run`: the checks of one run of the suite, each with each target of a backend."""

from __future__ import annotations

import difflib
import pkgutil
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis

from genlm import BackendInfo, Capability, find_backend, get_backend, get_trie, list_backends
from genlm.plugin import BrokenPluginError, GenlmError, describe_error
from genlm.testing.check import Check, CheckFailure, CheckTimeout, NotApplicable, Skipped
from genlm.testing.checks import all_checks
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.fixture import PROFILES, QUICK, Fixture
from genlm.testing.outcome import Outcome, read_expected_failures
from genlm.testing.shared_engine import SharedEngine
from genlm.testing.target import EngineTarget, Target, TrieTarget
from genlm.testing.trie_fixture import TrieFixture

_MAX_FRAMES = 3  # of the exception and of each of its causes
_MAX_NAMES = 3

_SUM_FAILURE = "a row that is not a distribution: a sum of"
_LOGITS_HINT = (
    "if the model gives logits, return genlm.plugin.rows_from_logits(logits, self.vocabulary)"
)

_TIMEOUT_HINT = (
    "if the engine implements step, the steps must return a Completion for each submitted "
    "query, with the query_id of the query"
)

MODEL_TIMEOUT_S = 600.0
"""Time limit for loading a user's model, and for each request to it."""


@dataclass(frozen=True)
class Case:
    """One check of one target, and the installed backend that the target belongs to."""

    check: Check
    target: Target
    info: BackendInfo | None = None

    @property
    def id(self) -> str:
        """`check[model]`, unique within a run."""
        return f"{self.check.id}[{self.target.model}]"


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


@dataclass(frozen=True)
class Run:
    """The cases of one run of the suite.

    Attributes:
        settings: The user's settings.
        info: The backend.
        cases: The cases to run, in order.
        expected: Reasons of the expected failures by id of a check or case.
    """

    settings: Settings
    info: BackendInfo
    cases: list[Case]
    expected: Mapping[str, str]

    def outcome(self, case: Case) -> Outcome:
        """Run one case and apply the expected failures."""
        profile = PROFILES[self.settings.profile]
        return run_case(case, profile, self.settings.seed).expecting(self.expected)

    def outcomes(self) -> Iterator[Outcome]:
        """Run all cases, one after another.

        Raises:
            Exception: Loading the user's model failed; every check would fail with it.
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
    """Find the backend, build its targets, and close their shared engine afterwards.

    Raises:
        PluginError: The backend is not installed or cannot be used, or
            `BackendSpec.conformance` does not name a target.
        LookupError: It has no target, or `only`, `models` or the file of expected failures has
            an unknown name.
        ValueError: The profile or dtype is unknown, or the file of expected failures is
            malformed.
    """
    if settings.profile not in PROFILES:
        expected = ", ".join(PROFILES)
        raise ValueError(f"profile={settings.profile!r}: expected one of {expected}")
    info = find(settings.backend)
    failures = read_expected_failures(settings.xfail)
    # Windows does not delete files of weights that are still mapped.
    temporary = tempfile.TemporaryDirectory(prefix="genlm-check-", ignore_cleanup_errors=True)
    with temporary as folder:
        targets = targets_of(info, Path(folder), settings.model, settings.dtype)
        all_cases = cases_of(targets, info)
        _refuse_unknown(f"check, named in {settings.xfail},", failures, _ids(all_cases))
        cases = select_cases(all_cases, settings.only, settings.models)
        try:
            yield Run(settings, info, cases, failures)
        finally:
            SharedEngine.close_current()


def _ids(cases: Iterable[Case]) -> set[str]:
    return {name for case in cases for name in (case.id, case.check.id)}


def run_case(case: Case, profile: hypothesis.settings = QUICK, seed: int = 0) -> Outcome:
    """Run one check of one target; exceptions become part of the outcome."""
    began = time.perf_counter()
    result: dict[str, Any] = {"status": "passed"}
    fixture: EngineFixture | TrieFixture | None = None
    try:
        with _fixture_of(case, profile, seed) as fixture:
            _require_applicable(case.check, fixture)
            case.check.function(fixture)
            _expect_cases(fixture)
    except NotApplicable as reason:
        result = {"status": "not applicable", "reason": str(reason)}
    except Skipped as reason:
        result = {"status": "skipped", "reason": str(reason)}
    except (Exception, CheckTimeout) as error:  # noqa: BLE001 - reported
        result = {"status": "failed", **_describe_error(error)}
    if fixture is not None:
        result["cases"] = {name: count for name, count in fixture.cases.items() if count}
        result["devices"] = tuple(sorted(fixture.devices))
    seconds = time.perf_counter() - began
    return Outcome(id=case.id, property=case.check.property, seconds=seconds, **result)


def _fixture_of(
    case: Case, profile: hypothesis.settings, seed: int
) -> EngineFixture | TrieFixture:
    if isinstance(case.target, EngineTarget):
        listed = None if case.info is None else frozenset(case.info.capabilities)
        return EngineFixture(case.target, profile, seed, listed)
    return TrieFixture(case.target, profile, seed)


def _require_applicable(check: Check, fixture: EngineFixture | TrieFixture) -> None:
    """Raise why a check cannot or need not run."""
    if check.member is not None:
        owner: object = (
            fixture.build([b"a"]) if isinstance(fixture, TrieFixture) else fixture.lm.engine
        )
        if not hasattr(owner, check.member):
            raise NotApplicable(f"the {check.kind} has no {check.member}")
    if isinstance(fixture, TrieFixture):
        return
    if check.needs is not None and check.needs not in fixture.lm.capabilities:
        hint = getattr(fixture.lm.engine, "capability_hints", {}).get(check.needs)
        raise NotApplicable(f"{check.needs} is not declared" + (f": {hint}" if hint else ""))
    if fixture.target.oracle is None:
        if check.oracle:
            raise Skipped("needs an oracle, and the target has none")
        if check.needs is Capability.LORA and not fixture.target.adapters:
            raise Skipped("needs adapters, and the target has none")


def _expect_cases(fixture: Fixture) -> None:
    missing = [case for case, count in fixture.cases.items() if not count]
    if missing:
        raise CheckFailure(
            "every case that the check must cover to occur",
            f"none of: {', '.join(missing)}",
            {"cases": dict(fixture.cases)},
        )


def _describe_error(error: BaseException) -> dict[str, Any]:
    error = _cause(error)
    if isinstance(error, CheckFailure):
        example = {name: repr(value) for name, value in error.example.items()}
        return {
            "expected": error.expected,
            "found": error.found,
            "example": example,
            "hint": error.diagnose(),
        }
    if isinstance(error, CheckTimeout):
        found = str(error)
        return {"expected": "every request to end", "found": found, "hint": _TIMEOUT_HINT}
    notes = "\n".join(getattr(error, "__notes__", ()))
    report = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES)
    report.__notes__ = None  # shown before the traceback
    frames = report.format()
    found = describe_error(error)
    return {
        "expected": "no exception",
        "found": found,
        "hint": _LOGITS_HINT if _SUM_FAILURE in found else "",
        "details": "\n".join(filter(None, [notes, "".join(frames)])),
    }


def _cause(error: BaseException) -> BaseException:
    """Return the error to report: of a flaky failure, Hypothesis raises a group of errors.

    A violated property comes before other errors.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_cause(part) for part in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, CheckFailure)), causes[0])


# -- backends, targets and cases -----------------------------------------------------------


def find(backend: str) -> BackendInfo:
    """Describe the installed engine or trie of a name; errors as `prepared`."""
    tries = {name for info in list_backends("trie") for name in (info.name, info.provider)}
    engines = {name for info in list_backends("engine") for name in (info.name, info.provider)}
    return find_backend(backend, "trie" if backend in tries - engines else "engine")


def targets_of(
    info: BackendInfo, folder: Path, model: str | None = None, dtype: str = "float32"
) -> list[Target]:
    """The targets of a backend, or a target of `model`; errors as `prepared`.

    Args:
        info: An installed backend.
        folder: An empty folder that exists until the run ends.
        model: See `Settings`.
        dtype: See `Settings`.
    """
    if model is not None:
        if info.kind == "trie":
            raise ValueError(f"{info.name!r} is a trie; only engines load a model")
        return [_target_without_oracle(info, model, dtype)]
    if info.conformance is None:
        raise LookupError(
            f"{info.provider} has no conformance target. Name one in its BackendSpec "
            f"(conformance='package.module:target'), or check it without an oracle: "
            f"genlm check {info.name} --model MODEL"
        )
    # The targets may build another object than `BackendSpec.target`, which users load.
    (get_trie if info.kind == "trie" else get_backend)(info.provider)
    try:
        conformance: Any = pkgutil.resolve_name(info.conformance)
    except GenlmError:
        raise
    except Exception as error:
        reason = f"importing {info.conformance!r} failed: {describe_error(error)}"
        raise BrokenPluginError(info.provider, reason) from error
    if callable(conformance):
        conformance = conformance(folder)
    targets = list(conformance) if isinstance(conformance, Iterable) else [conformance]
    for target in targets:
        if not isinstance(target, (EngineTarget, TrieTarget)) or target.kind != info.kind:
            reason = f"{info.conformance} gave {target!r}; expected a target of an {info.kind}"
            raise BrokenPluginError(info.provider, reason)
    return targets


def cases_of(targets: Sequence[Target], info: BackendInfo | None = None) -> list[Case]:
    """Every check with every target, target by target.

    Args:
        targets: Targets of one backend.
        info: That backend, if it is installed.
    """
    return [
        Case(check, target, info) for target in targets for check in all_checks(target.kind)
    ]


def select_cases(
    cases: Sequence[Case], only: Sequence[str], models: Sequence[str]
) -> list[Case]:
    """The cases that `Settings.only` and `Settings.models` select; errors as `prepared`."""
    _refuse_unknown("check", only, _ids(cases))
    _refuse_unknown("model", models, {case.target.model for case in cases})
    return [
        case
        for case in cases
        if (not only or case.id in only or case.check.id in only)
        and (not models or case.target.model in models)
    ]


def _refuse_unknown(kind: str, names: Iterable[str], known_names: set[str]) -> None:
    for name in names:
        if name not in known_names:
            raise LookupError(f"no {kind} {name!r}. {_suggestion(name, known_names)}")


def _suggestion(name: str, known_names: set[str]) -> str:
    """Return a message with the known names that are most similar."""
    checks = {known for known in known_names if "[" not in known}
    ids = known_names if "[" in name else checks or known_names
    close = difflib.get_close_matches(name, ids, n=_MAX_NAMES, cutoff=0.5)
    close = close or sorted(known for known in ids if name in known)[:_MAX_NAMES]
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"`genlm check BACKEND --list` prints all {len(ids)}"


def _target_without_oracle(info: BackendInfo, model: str, dtype: str) -> EngineTarget:
    build = get_backend(info.provider)
    return EngineTarget(
        model=model,
        build=lambda **options: build(model, **options),
        oracle=None,
        dtype=dtype,
        timeout_s=MODEL_TIMEOUT_S,
        shared=True,  # a large model fits into memory once and loads slowly
    )
