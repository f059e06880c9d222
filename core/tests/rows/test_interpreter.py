"""The Triton kernels of rows give the right results on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_interpreter import passed_in_the_interpreter


def test_kernels_of_rows_are_right_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert passed_in_the_interpreter(Path(__file__).with_name("test_device_rows.py")) >= 20
