"""Triton's compiler takes every kernel, for NVIDIA and AMD, on a machine without a GPU.

The interpreter takes programs that the compiler refuses, so this is not the same test. And
on NVIDIA's GPUs a thread of every float32 kernel keeps its values in registers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_program

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from genlm_trie_cuda import kernels  # noqa: E402
from genlm_trie_cuda.plan import BLOCK  # noqa: E402

TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]
INDICES = {"place", "piece", "piece_offset", "piece_count", "source"}
CONSTANTS = {
    "GROUP": 8,
    "TOKENS": 64,
    "INTERVALS": 64,
    "PREFIXES": 64,
    "ROWS": 8,
    "BLOCK": BLOCK,
    "LEVELS": BLOCK.bit_length() - 1,
}


@pytest.mark.parametrize("target", TARGETS, ids=["sm_80", "sm_90", "gfx942"])
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
    fixed = {key: value for key, value in CONSTANTS.items() if key in kernel.arg_names}
    fixed |= constants
    pointers = {"weights": weights} | dict.fromkeys(("slots", "sums", "out"), values)
    pointers |= dict.fromkeys(INDICES, "i32")
    signature = {
        argument: "constexpr" if argument in fixed else "i32" for argument in kernel.arg_names
    } | {key: f"*{kind}" for key, kind in pointers.items() if key in kernel.arg_names}
    places = {(kernel.arg_names.index(key),): value for key, value in fixed.items()}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=places),
        target=GPUTarget(*target),
        options={"enable_fp_fusion": True},
    )
    assert compiled.asm["cubin" if target[0] == "cuda" else "hsaco"]
    if target[0] == "cuda" and values == "fp32":
        assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0


def stack_bytes(binary: bytes, folder: Path) -> int:
    """Memory of a thread for what does not fit into its registers."""
    (folder / "kernel.cubin").write_bytes(binary)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")]
    usage = run_program(*command).stdout
    return int(usage.split("STACK:")[1].split()[0])
