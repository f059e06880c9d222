"""`make mutants`: each mutant's fault, and for how many seeds its check kills it."""

from __future__ import annotations

import json
import sys

from genlm.testing import QUICK, Case, all_checks, run_case

from .baselines import NO_FAILURE, correct_targets
from .mutant import SEEDS, all_core_faults, all_mutants, quiet, statuses_of_hanging


def main() -> int:
    """Print the tables; 1 if a mutant survives a seed or a correct target fails."""
    mutants, survived = all_mutants(), 0
    print(f"{'killed':6}  {'mutant':34}  {'check that must kill it':42}  what is broken")
    for mutant in mutants:
        killed = sum(mutant.is_killed(mutant.outcome(seed)) for seed in SEEDS)
        survived += killed < len(SEEDS)
        count = f"{killed}/{len(SEEDS)}"
        print(
            f"{count:6}  {mutant.name:34}  {mutant.killed_by:42}  {mutant.breaks}", flush=True
        )
    print(f"\n{len(mutants)} mutants, {survived} survived a seed")
    missed = [fault for fault in all_core_faults() if not fault.is_found()]
    for fault in missed:
        print(f"not found by {fault.found_by}: {fault.breaks}")
    print(f"{len(all_core_faults())} faults of the core, {len(missed)} not found by its tests")
    return int(survived + len(missed) + failures_of_correct_targets() > 0)


def failures_of_correct_targets() -> int:
    """Print and count the checks that fail on what the mutants are derived from."""
    failures = 0
    for name, target in correct_targets().items():
        for seed in SEEDS:
            for check in all_checks(target.kind):
                outcome = run_case(Case(check, target), QUICK, seed)
                if outcome.status not in NO_FAILURE:
                    failures += 1
                    print(f"{name}, seed {seed}: {outcome}", flush=True)
    print(f"correct targets: {failures} failed checks on {len(SEEDS)} seeds")
    return failures


if __name__ == "__main__":
    if sys.argv[1:] == ["--hanging"]:  # for `found_hanging`
        print(json.dumps(statuses_of_hanging()))
        sys.exit()
    with quiet():
        sys.exit(main())
