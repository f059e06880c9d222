"""The Triton kernels of captured steps give the right rows on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

from triton_interpreter import passed_in_the_interpreter


def test_captured_steps_are_right_in_the_interpreter() -> None:
    tests = Path(__file__).with_name("test_captured_steps.py")
    assert passed_in_the_interpreter(tests) >= 18
