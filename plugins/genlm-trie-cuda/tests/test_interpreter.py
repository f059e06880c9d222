"""The Triton kernels give the right answers on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_interpreter import passed_in_the_interpreter


def test_every_kernel_is_exact_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert passed_in_the_interpreter(Path(__file__).with_name("test_reductions.py")) > 40
