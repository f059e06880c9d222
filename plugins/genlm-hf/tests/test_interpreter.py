"""The Triton kernels of captured steps give the right rows on a machine without a GPU.

Triton decides at its import whether it interprets, so that needs a process of its own.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from programs import run_program

ROOT = Path(__file__).parents[3]


def test_captured_steps_are_right_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    # numpy stands in for the GPU there, and warns of infinities.
    numpy_warns = ["-W", "ignore::RuntimeWarning:triton.runtime.interpreter"]
    done = run_program(
        *(*command, *numpy_warns, Path(__file__).with_name("test_captured_steps.py")),
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 12, done.stdout
    assert "skipped" not in done.stdout
