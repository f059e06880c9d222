"""Every mutant is killed by its check, for several seeds, and every check kills a mutant."""

from __future__ import annotations

import functools

import pytest

from genlm.testing import QUICK, Case, Outcome, all_checks, run_case

from .baselines import NO_FAILURE, correct_targets
from .mutant import (
    SEEDS,
    CoreFault,
    Mutant,
    all_core_faults,
    all_mutants,
    quiet,
    start_hanging,
)

MUTANTS = all_mutants()
CHECKS = [check for kind in ("engine", "trie") for check in all_checks(kind)]
CORRECT = correct_targets()


@pytest.fixture(scope="module", autouse=True)
def _hanging_tests_wait_beside_others(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        fault = None if callspec is None else callspec.params.get("fault")
        if isinstance(fault, CoreFault) and fault.hangs:  # others have parameters of this name
            start_hanging()  # once


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_by_its_check_on_several_seeds(mutant: Mutant) -> None:
    seeds = SEEDS if "population" in mutant.killed_by else SEEDS[:3]  # `make mutants` runs all
    with quiet():
        for seed in seeds:
            outcome = mutant.outcome(seed)
            assert mutant.is_killed(outcome), (seed, outcome)


@pytest.mark.parametrize("fault", all_core_faults(), ids=lambda fault: fault.name)
def test_a_fault_of_the_core_is_found_by_a_test_of_the_core(fault: CoreFault) -> None:
    assert fault.is_found()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_a_check_kills_a_mutant(check) -> None:
    assert check.id in {mutant.killed_by for mutant in MUTANTS if mutant.kind == check.kind}


@functools.cache
def outcomes(name: str, seed: int) -> list[Outcome]:
    """Every check of a correct target."""
    target = CORRECT[name]
    return [run_case(Case(check, target), QUICK, seed) for check in all_checks(target.kind)]


# `make mutants` runs all seeds, and tries; core/tests/trie/test_conformance.py runs tries too.
@pytest.mark.parametrize("name", ["cached", "plain", "resident"])
def test_correct_targets_pass_every_check(name: str) -> None:
    assert not [each for each in outcomes(name, 0) if each.status not in NO_FAILURE]


def test_every_check_of_an_engine_applies_to_one_of_the_correct_targets() -> None:
    found = [*outcomes("cached", 0), *outcomes("plain", 0)]
    passed = {each.id.partition("[")[0] for each in found if each.status == "passed"}
    assert passed == {check.id for check in all_checks("engine")}


def test_names_are_unique() -> None:
    names = [each.name for each in (*MUTANTS, *all_core_faults())]
    assert len(set(names)) == len(names)
