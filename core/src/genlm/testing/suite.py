"""The conformance suite as a test module, for `genlm.testing.plugin`."""

from __future__ import annotations

from genlm.testing.plugin import report_to_pytest
from genlm.testing.run import Case, Run


def test_conformance(genlm_run: Run, genlm_case: Case) -> None:
    """The backend has the property that the case tests."""
    report_to_pytest(genlm_run, genlm_case)
