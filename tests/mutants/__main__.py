"""`make mutants`: what each mutant breaks, and on how many seeds its check sees it."""

from __future__ import annotations

import logging
import sys

from .mutant import SEEDS, all_mutants


def main() -> int:
    """Print the table; 1 if a mutant survives a seed."""
    logging.disable()  # engines that die on purpose log it
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
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
