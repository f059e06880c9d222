"""Every usual spelling of a dtype gives the same name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from genlm.engines.dtypes import dtype_name

SPELLINGS: dict[str, list[Any]] = {
    "float32": ["float32", "fp32", "f32", "float", "torch.float32", torch.float32, np.float32],
    "float16": ["float16", "fp16", "f16", "half", "Half", torch.half, np.dtype("float16")],
    "bfloat16": ["bfloat16", "bf16", "BF16", "mlx.core.bfloat16", torch.bfloat16],
    "float64": ["float64", "fp64", "double", torch.double, np.float64],
    "auto": ["auto"],
}


@pytest.mark.parametrize(("name", "spellings"), SPELLINGS.items())
def test_a_dtype_has_one_name(name: str, spellings: list[Any]) -> None:
    assert {dtype_name(spelling) for spelling in spellings} == {name}


@pytest.mark.parametrize("wrong", ["float33", "int8", torch.int64, 3, None, ""])
def test_what_is_no_dtype_of_weights_is_refused(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"no dtype .*; use 'float32', 'bfloat16' or 'float16'"
    ):
        dtype_name(wrong)
