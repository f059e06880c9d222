"""The suite inside pytest: by the plugin, and in three lines of somebody's own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ONLY = ["rows-are-right", "declared-sampling-is-native"]


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "pytest", "-rA", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_packaged_suite_runs_a_backend_by_its_name(tmp_path):
    options = [f"--genlm-only={check}" for check in ONLY]
    done = run_pytest(
        tmp_path,
        *("-p", "genlm.testing.plugin", "--pyargs", "genlm.testing.suite"),
        *("--genlm-backend=reference", "--genlm-seed=4", *options),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conformance[rows-are-right[6-gram]]" in done.stdout
    assert "not applicable: sample is not declared" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout


def test_the_packaged_suite_asks_which_backend(tmp_path):
    done = run_pytest(tmp_path, "-p", "genlm.testing.plugin", "--pyargs", "genlm.testing.suite")
    assert done.returncode != 0
    assert "--genlm-backend=NAME" in done.stdout + done.stderr


def test_three_lines_in_the_tests_of_a_plugin_do_the_same(tmp_path):
    (tmp_path / "xfail.txt").write_text("rows-are-right: it never did")
    (tmp_path / "test_ours.py").write_text(
        "from genlm.testing import conformance_tests\n"
        f"test_ours = conformance_tests('reference', only={ONLY})\n"
        f"test_wrong = conformance_tests('reference', only={ONLY}, xfail='xfail.txt')\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 2 skipped" in done.stdout
    assert "PASSED test_ours.py::test_ours[rows-are-right[6-gram]]" in done.stdout
    assert "UNEXPECTED PASS rows-are-right[6-gram]" in done.stdout
