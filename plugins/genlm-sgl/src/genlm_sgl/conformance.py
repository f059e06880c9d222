"""The targets of `genlm check sgl`, which certifies the engine.

They serve a tiny Llama with random weights, with settings that lead to different passes. Its
class `genlm.testing.TinyModel` is also the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from genlm.testing import TINY_LLAMA, EngineTarget, TinyModel

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"enable_lora": True, "max_total_tokens": 4096},
    # A pass has at most 40 new tokens and 8 sequences, the cache holds a few prompts.
    "cramped": {
        "chunked_prefill_size": 40,
        "context_length": 30,
        "enable_lora": True,
        "max_running_requests": 8,
        "max_total_tokens": 160,
    },
}
"""Engine options of each target."""

_TIGHT = (
    {"max_total_tokens": 40},
    {"max_total_tokens": 64, "chunked_prefill_size": 16, "max_running_requests": 2},
)
"""Options for a cache of the longest sequence only, and for passes of 16 tokens."""


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target for each of `SETTINGS`; all serve one model.

    Args:
        folder: Receives the model.
    """
    model = TinyLlama(folder / "llama")
    for name, options in SETTINGS.items():
        yield EngineTarget(
            model=name,
            build=functools.partial(model.engine, options),
            oracle=model.logprobs,
            adapters=model.adapters,
            weights=model.weights,
            timeout_s=240.0,  # the first engine imports SGLang
            tight_options=_TIGHT,
            shared=True,
        )


class TinyLlama(TinyModel):
    """A tiny Llama with two adapters for SGLang.

    Args:
        folder: Receives the model.
        **settings: Additional settings of its config.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        # On a CPU, SGLang pads inner layers to a multiple of 64, which adapters must match. An
        # adapter of `q_proj` must also have `v_proj`.
        super().__init__(
            folder,
            {**TINY_LLAMA, "intermediate_size": 64, **settings},
            adapters=("red", "blue"),
            lora={"target_modules": ["q_proj", "v_proj", "down_proj"]},
        )

    def engine(self, options: Mapping[str, Any], **overrides: Any) -> Any:
        """Serve the model in float32, on a CUDA device if there is one."""
        from genlm_sgl.engine import SGLEngine

        device = "cuda" if torch.cuda.is_available() else "cpu"
        engine_opts = {"device": device, "dtype": "float32", **options, **overrides}
        return SGLEngine(self.path, engine_opts=engine_opts)
