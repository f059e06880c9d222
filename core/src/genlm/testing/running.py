"""Running a case: from a check and a target to an outcome."""

from __future__ import annotations

import time
import traceback
from typing import Any

from genlm import Capability
from genlm.testing.check import Check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import CheckFailure, NeverEnded, NotApplicable, Skipped
from genlm.testing.outcome import Outcome
from genlm.testing.profile import QUICK, Profile
from genlm.testing.selection import Case
from genlm.testing.target import EngineTarget
from genlm.testing.trial import Trial
from genlm.testing.trie_trial import TrieTrial

__all__ = ["run_case"]

_SHOWN_FRAMES = 3  # of the exception and of each of its causes


def run_case(case: Case, profile: Profile = QUICK, seed: int = 0) -> Outcome:
    """Run one check of one target. Never raises because of what it finds."""
    began = time.perf_counter()
    found: dict[str, Any] = {"status": "passed"}
    trial: EngineTrial | TrieTrial | None = None
    try:
        with _trial(case, profile, seed) as trial:
            found = _why_not(case.check, trial) or found
            if found["status"] == "passed":
                case.check.function(trial)
                _demand_cases(case.check, trial)
    except NotApplicable as reason:
        found = {"status": "not applicable", "reason": str(reason)}
    except Skipped as reason:
        found = {"status": "skipped", "reason": str(reason)}
    except (Exception, NeverEnded) as error:  # noqa: BLE001 - whatever it is, it is reported
        found = {"status": "failed", **_described(error)}
    if trial is not None:
        found["cases"] = {name: count for name, count in trial.cases.items() if count}
        found["devices"] = tuple(sorted(trial.devices))
    seconds = time.perf_counter() - began
    return Outcome(id=case.id, law=case.check.law, seconds=seconds, **found)


def _trial(case: Case, profile: Profile, seed: int) -> EngineTrial | TrieTrial:
    if isinstance(case.target, EngineTarget):
        listed = None if case.info is None else frozenset(case.info.capabilities)
        return EngineTrial(case.target, profile, seed, listed)
    return TrieTrial(case.target, profile, seed)


def _why_not(check: Check, trial: EngineTrial | TrieTrial) -> dict[str, Any] | None:
    """Why a check cannot or need not run, None if it should."""
    if isinstance(trial, EngineTrial):
        return _why_not_engine(check, trial)
    if check.member is None or hasattr(trial.build([b"a"]), check.member):
        return None
    return {"status": "not applicable", "reason": f"the trie has no {check.member}"}


def _why_not_engine(check: Check, trial: EngineTrial) -> dict[str, Any] | None:
    if check.needs is not None or check.unless is not None:
        declared: frozenset[Capability] = trial.lm.capabilities
        if check.needs is not None and check.needs not in declared:
            return {"status": "not applicable", "reason": f"{check.needs} is not declared"}
        if check.unless in declared:
            return {"status": "not applicable", "reason": f"{check.unless} is declared"}
    if check.oracle and trial.target.oracle is None:
        return {"status": "skipped", "reason": "needs an oracle, and the target has none"}
    if (
        check.needs is Capability.LORA
        and trial.target.oracle is None
        and not trial.target.adapters
    ):
        return {"status": "skipped", "reason": "needs adapters, and none were given"}
    return None


def _demand_cases(check: Check, trial: Trial) -> None:
    absent = [case for case in check.cases if not trial.cases[case]]
    if absent:
        raise CheckFailure(
            "the check's interesting cases to occur",
            f"none of: {', '.join(absent)}",
            {"cases": dict(trial.cases)},
        )


def _described(error: BaseException) -> dict[str, Any]:
    failure = _first_failure(error)
    if failure is not None:
        example = {name: repr(value) for name, value in failure.example.items()}
        return {"expected": failure.expected, "found": failure.found, "example": example}
    notes = "\n".join(getattr(error, "__notes__", ()))
    frames = traceback.format_exception(error, limit=-_SHOWN_FRAMES)
    if isinstance(error, NeverEnded):
        return {"expected": "every request to end", "found": str(error)}
    return {
        "expected": "no exception",
        "found": f"{type(error).__name__}: {error}",
        "details": "\n".join(filter(None, [notes, "".join(frames)])),
    }


def _first_failure(error: BaseException) -> CheckFailure | None:
    """Find the broken law, also in the group that Hypothesis makes of a flaky one."""
    if isinstance(error, CheckFailure):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            failure = _first_failure(inner)
            if failure is not None:
                return failure
    return None
