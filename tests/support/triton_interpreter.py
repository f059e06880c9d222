"""Triton's interpreter, which runs kernels on machines without a GPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from programs import run_program

__all__ = ["passed_in_the_interpreter"]

ROOT = Path(__file__).parents[2]

# Python stores frames in chunks of 16 KiB, and maps and unmaps one at each call that crosses
# the end of a chunk. The chunk of `main`, a large frame, has room for the interpreter's frames.
PYTEST = """
import sys, pytest
def main():
    return pytest.main(sys.argv[1:])
main.__code__ = main.__code__.replace(co_stacksize=2**15)
sys.exit(main())
"""


def passed_in_the_interpreter(tests: Path) -> int:
    """Run the tests of a file that are marked `gpu`; return how many passed, if all did.

    Triton decides at its import whether it interprets, so that needs a process of its own.
    """
    command = [sys.executable, "-c", PYTEST, "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    # numpy stands in for the GPU there, and warns of infinities and nan, and of Triton 3.6.
    warnings = ("RuntimeWarning", "DeprecationWarning")
    ignored = [
        word
        for kind in warnings
        for word in ("-W", f"ignore::{kind}:triton.runtime.interpreter")
    ]
    done = run_program(
        *(*command, *ignored, tests),
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert "skipped" not in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])
