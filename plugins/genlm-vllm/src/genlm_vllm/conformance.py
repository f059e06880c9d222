"""The targets by which `genlm check vllm` certifies the engine, and their tiny models.

A Llama with random weights, made on the spot; `genlm.testing.TinyModel` says what it is and
what its oracle is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from genlm.testing import TINY_LLAMA, EngineTarget, TinyModel

__all__ = ["TINY_KV_BYTES", "TinyLlama", "targets"]

TINY_KV_BYTES = 6 * 2**15
"""Six blocks of 32 tokens, one of which vLLM keeps for itself: a batch has to queue."""

# Heads as wide as the narrowest that vLLM's CPU build computes.
_SETTINGS = {**TINY_LLAMA, "head_dim": 32}


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target that computes in this process, and one that does in its own.

    Args:
        folder: Where the model is put.
    """
    model = TinyLlama(folder / "llama")
    for name, multiprocess in {"one process": False, "own processes": True}.items():
        yield EngineTarget(
            model=name,
            build=functools.partial(model.engine, multiprocess=multiprocess),
            oracle=model.logprobs,
            adapters=model.adapters,
            max_length=40,  # more than a KV block
            # In processes of its own: only one engine may compute in this one.
            tight_options={"kv_cache_memory_bytes": TINY_KV_BYTES, "multiprocess": True},
            timeout_s=300,  # importing vLLM and starting its processes counts too
            shared=True,
        )


class TinyLlama(TinyModel):
    """A tiny Llama with two adapters, as vLLM serves it.

    Args:
        folder: Where to put it.
        **settings: Of its config, beside the usual ones.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, {**_SETTINGS, **settings}, adapters=("red", "blue"))

    def engine(
        self, *, multiprocess: bool | None = False, lora: bool = True, **options: Any
    ) -> Any:
        """Serve the model in float32, with its adapters or without."""
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
