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

__all__ = ["TINY_KV_BYTES", "TinyLlama", "targets"]

TINY_KV_BYTES = 6 * 2**15
"""Size of six blocks of 32 tokens, one of which vLLM reserves, so that a batch must queue."""

# The smallest head size that vLLM's CPU build supports.
_SETTINGS = {**TINY_LLAMA, "head_dim": 32}


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target that computes in this process and one that computes in worker processes.

    Args:
        folder: Receives the model.
    """
    model = TinyLlama(folder / "llama")
    for name, multiprocess in {"one process": False, "own processes": True}.items():
        yield EngineTarget(
            model=name,
            build=functools.partial(model.engine, multiprocess=multiprocess),
            oracle=model.logprobs,
            adapters=model.adapters,
            max_length=40,  # more than a KV block
            # In other processes, because this process may have only one engine.
            tight_options=[{"kv_cache_memory_bytes": TINY_KV_BYTES, "multiprocess": True}],
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
        self, *, multiprocess: bool | None = False, lora: bool = True, **options: Any
    ) -> Any:
        """Serve the model in float32, with or without its adapters."""
        from genlm_vllm.engine import VLLMEngine

        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 64,
            "kv_cache_memory_bytes": 2**24,
        }
        if lora:
            defaults |= {"enable_lora": True, "max_loras": len(self.adapters)}
        return VLLMEngine(self.path, engine_opts=defaults | options, multiprocess=multiprocess)
