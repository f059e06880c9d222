"""One test per check of one target of the backend named with `--genlm-backend`."""

from __future__ import annotations

from genlm.testing.pytest_form import judge
from genlm.testing.run import Run
from genlm.testing.selection import Case


def test_conformance(genlm_run: Run, genlm_case: Case) -> None:
    """The backend keeps the law that the case is about."""
    judge(genlm_run, genlm_case)
