"""Triton's compiler takes the kernels of captured steps, for NVIDIA and AMD, without a GPU.

The interpreter takes programs that the compiler refuses, so this is not the same test. On
NVIDIA's GPUs a thread keeps the values of half-precision models in registers.
"""

from __future__ import annotations

import pytest
from packaging.version import Version

pytest.importorskip("triton")

import triton
from triton_compiler import NVIDIA_AND_AMD, compiled, stack_bytes

from genlm_hf.packed import kernels
from genlm_hf.packed.step_attention import keys_at_once

KINDS = dict.fromkeys(("slots", "positions", "items", "offsets", "rows"), "*i64")
KINDS |= dict.fromkeys(("outputs", "logsums"), "*fp32")
KINDS |= dict.fromkeys(("scale", "softcap"), "fp32")
SIZES = {"fp32": 4, "fp16": 2, "bf16": 2}
SHARED = {"PER_HEAD": 4, "QUERIES": 16, "HEADS": 4, "ROWS": 64}
OWN = {"PER_HEAD": 4, "QUERIES": 1, "HEADS": 4, "ROWS": 16}

# Triton 3.7 stores up to four scalars of a thread, Triton 3.6 more on sm_80.
STORED_BYTES = 16 if Version(triton.__version__) >= Version("3.7") else 272

KERNELS = [
    ("bf16", 64, SHARED, {}),
    ("bf16", 64, OWN, {}),
    ("bf16", 128, SHARED, {"WINDOW": True}),
    ("fp16", 256, SHARED, {"SOFTCAP": True, "WINDOW": True}),
    ("fp32", 64, OWN, {}),
    ("fp32", 96, SHARED, {}),
]
# Of the architectures of NVIDIA, the older one is compared for its registers.
CASES = [
    (*kernel, target)
    for kernel in KERNELS
    for target in NVIDIA_AND_AMD
    if (kernel[0], target) != ("fp32", "sm_80")
]


@pytest.mark.parametrize(("dtype", "width", "rows", "features", "name"), CASES)
def test_attention_compiles(monkeypatch, tmp_path, dtype, width, rows, features, name) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    columns = 1 << (width - 1).bit_length()
    constants = {
        "SOFTCAP": False,
        "WINDOW": False,
        "KEY_WIDTH": width,
        "VALUE_WIDTH": width,
        "KEY_COLUMNS": columns,
        "VALUE_COLUMNS": columns,
        "KEYS": keys_at_once(columns, SIZES[dtype]),
    }
    kinds = KINDS | dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
    target = NVIDIA_AND_AMD[name]
    kernel = compiled(kernels.attend, target, kinds, constants | rows | features)
    if target[0] == "cuda" and dtype != "fp32":
        # Tiles would be kilobytes.
        assert stack_bytes(kernel.asm["cubin"], tmp_path) <= STORED_BYTES
        assert kernel.metadata.shared <= 2**16  # all GPUs of these architectures have more


@pytest.mark.parametrize("target", NVIDIA_AND_AMD.values(), ids=NVIDIA_AND_AMD)
@pytest.mark.parametrize("sinks", [False, True])
def test_joining_compiles(monkeypatch, tmp_path, sinks, target) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"VALUE_WIDTH": 80, "VALUE_COLUMNS": 128, "SINKS": sinks}
    kinds = KINDS | {"sinks": "*bf16", "out": "*bf16"}
    kernel = compiled(kernels.combine, target, kinds, constants)
    if target[0] == "cuda":
        assert stack_bytes(kernel.asm["cubin"], tmp_path) == 0
