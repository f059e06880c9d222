"""The suite in three lines of a backend's own tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

from programs import run_program

ONLY = ["rows-are-right", "kept-prefixes-change-nothing"]


def run_pytest(folder: Path, *arguments: str, status: int = 0) -> CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "pytest", "-rA", "-p", "no:cacheprovider"]
    variables = os.environ | {"PYTHONPATH": str(folder)}
    return run_program(*command, *arguments, status=status, cwd=folder, env=variables)


def test_three_lines_in_the_tests_of_a_plugin_run_the_checks(tmp_path):
    (tmp_path / "xfail.txt").write_text("rows-are-right: it never did")
    (tmp_path / "test_ours.py").write_text(
        "from genlm.testing import conformance_tests\n"
        f"test_ours = conformance_tests('reference', only={ONLY})\n"
        f"test_wrong = conformance_tests('reference', only={ONLY}, xfail='xfail.txt')\n"
    )
    result = run_pytest(tmp_path, "test_ours.py", status=1)
    assert "1 failed, 1 passed, 2 skipped" in result.stdout
    assert "PASSED test_ours.py::test_ours[rows-are-right[6-gram]]" in result.stdout
    assert "not applicable: prefix_cache is not declared" in result.stdout
    assert "UNEXPECTED PASS rows-are-right[6-gram]" in result.stdout
