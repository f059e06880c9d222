"""The targets of `genlm check vllm`, which certifies the engine.

They serve a tiny Llama with random weights. Its class `genlm.testing.TinyModel` is also the
oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from genlm.testing import TINY_LLAMA, EngineTarget, TinyModel

TINY_KV_BYTES = 6 * 2**15
"""Size of six blocks of 32 tokens, one of which vLLM reserves, so that a batch must queue."""

# The smallest head size that vLLM's CPU build supports.
_SETTINGS = {**TINY_LLAMA, "head_dim": 32}


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target that computes in this process and one that computes in worker processes.

    Both compute in float32 and have adapters on the CPU. On a GPU, vLLM's kernels for adapters
    compute in bfloat16 only, so the first target has no adapters, and the second computes in
    bfloat16.

    Args:
        folder: Receives the model.
    """
    from vllm.platforms import current_platform

    model = TinyLlama(folder / "llama")
    on_cpu = current_platform.is_cpu()
    for name, multiprocess in {"one process": False, "own processes": True}.items():
        lora = on_cpu or multiprocess
        dtype = "float32" if on_cpu or not lora else "bfloat16"
        build = functools.partial(model.engine, multiprocess=multiprocess, lora=lora)
        yield EngineTarget(
            model=name,
            build=functools.partial(build, dtype=dtype),
            oracle=model.logprobs,
            adapters=model.adapters if lora else {},
            weights=model.weights,
            dtype=dtype,
            max_length=40,  # more than a KV block
            tight_options=[{"kv_cache_memory_bytes": TINY_KV_BYTES}],
            timeout_s=300,  # includes importing vLLM and starting its workers
            shared=True,
        )


class TinyLlama(TinyModel):
    """A tiny Llama with two adapters for vLLM.

    Args:
        folder: Receives the model.
        **settings: Additional settings of its config.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, {**_SETTINGS, **settings}, adapters=("red", "blue"))

    def engine(
        self, *, multiprocess: bool | None = False, lora: bool | None = None, **options: Any
    ) -> Any:
        """Serve the model, by default in float32 and, on the CPU, with its adapters."""
        from vllm.platforms import current_platform

        from genlm_vllm.engine import VLLMEngine

        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 64,
            "kv_cache_memory_bytes": 2**24,
        }
        on_cpu = current_platform.is_cpu()
        if not on_cpu:
            defaults["gpu_memory_utilization"] = 0.1  # several engines share the device
        if on_cpu if lora is None else lora:
            defaults |= {"enable_lora": True, "max_loras": len(self.adapters)}
        return VLLMEngine(self.path, engine_opts=defaults | options, multiprocess=multiprocess)
