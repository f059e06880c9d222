"""Triton's compiler, on machines without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from programs import run_program
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["NVIDIA_AND_AMD", "compiled", "stack_bytes"]

NVIDIA_AND_AMD = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}


def compiled(
    kernel: Any,
    target: tuple[str, int | str, int],
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
) -> Any:
    """Compile a kernel.

    Args:
        kernel: A function of Triton.
        target: Kind of device, its architecture, threads of a warp.
        kinds: Kinds of the arguments, as `"*fp32"`; `"i32"` for those that are not named.
        constants: Values of compile-time constants; more than the kernel's own are ignored.
    """
    names = kernel.arg_names
    fixed = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names
    }
    places = {(names.index(name),): value for name, value in fixed.items()}
    found = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=places),
        target=GPUTarget(*target),
        options={"enable_fp_fusion": True},
    )
    assert found.asm["cubin" if target[0] == "cuda" else "hsaco"]
    return found


def stack_bytes(binary: bytes, folder: Path) -> int:
    """Memory of a thread for what does not fit into its registers, on NVIDIA's GPUs."""
    (folder / "kernel.cubin").write_bytes(binary)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")]
    usage = run_program(*command).stdout
    return int(usage.split("STACK:")[1].split()[0])
