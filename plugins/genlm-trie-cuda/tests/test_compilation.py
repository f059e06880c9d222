"""Triton's compiler takes every kernel, for NVIDIA and AMD, on a machine without a GPU.

The interpreter takes programs that the compiler refuses, so this is not the same test. And
on NVIDIA's GPUs a thread of every float32 kernel keeps its values in registers.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton_compiler import NVIDIA_AND_AMD, compiled, stack_bytes

from genlm_trie_cuda import kernels
from genlm_trie_cuda.plan import BLOCK
from genlm_trie_cuda.triton_path import TREE_ROWS

INDICES = {"ranks", "piece", "piece_offset", "piece_count", "source"}
CONSTANTS = {
    "GROUP": 32,
    "TOKENS": 64,
    "INTERVALS": 64,
    "PREFIXES": 64,
    "ROWS": TREE_ROWS,
    "BLOCK": BLOCK,
    "LEVELS": BLOCK.bit_length() - 1,
}


@pytest.mark.parametrize("target", NVIDIA_AND_AMD.values(), ids=NVIDIA_AND_AMD)
@pytest.mark.parametrize(
    ("name", "constants", "weights", "values"),
    [
        ("load_weights", {}, "bf16", "fp32"),
        ("load_weights", {}, "fp64", "fp64"),
        ("build_trees", {"OPERATION": 0, "OVER_RANKS": True}, "fp32", "fp32"),
        ("build_trees", {"OPERATION": 1, "OVER_RANKS": False}, "fp32", "fp32"),
        ("build_trees", {"OPERATION": 2, "OVER_RANKS": True}, "fp32", "fp64"),
        ("build_trees", {"OPERATION": 2, "OVER_RANKS": False}, "fp32", "fp32"),
        ("combine_intervals", {"OPERATION": 1}, "fp32", "fp32"),
        ("combine_intervals", {"OPERATION": 2}, "fp32", "fp32"),
        ("gather_prefixes", {}, "fp32", "fp32"),
    ],
)
def test_a_kernel_compiles(
    monkeypatch, tmp_path, name, constants, weights, values, target
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(kernels, name)
    pointers = {"weights": weights} | dict.fromkeys(("slots", "sums", "out"), values)
    pointers |= dict.fromkeys(INDICES, "i32")
    kinds = {key: f"*{kind}" for key, kind in pointers.items()}
    binary = compiled(kernel, target, kinds, CONSTANTS | constants)
    if target[0] == "cuda" and values == "fp32":
        assert stack_bytes(binary.asm["cubin"], tmp_path) == 0
