"""The targets of `genlm check llamacpp`.

Tiny models with random weights, made by transformers, whose forward pass of one sequence is
the oracle, and written as GGUF.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from genlm.testing import TINY_LLAMA, TINY_LOGITS, EngineTarget, TinyModel

__all__ = ["CERTIFIED", "FAMILIES", "TinyGguf", "targets"]

_TIGHT = (
    {"n_seq_max": 1},
    {"n_seq_max": 3, "n_ctx": 256, "n_batch": 7},
    {"n_seq_max": 4, "kv_unified": False},
)
"""Nothing is kept; few sequences and small batches; a copy of keys and values for each."""


class _Family(NamedTuple):
    """Settings of a model and of its adapters; the dtype in which it is computed."""

    settings: Mapping[str, Any]
    lora: tuple[str, ...]
    dtype: str = "float32"


_COMMON = {
    "vocab_size": TINY_LOGITS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(TINY_LLAMA, ("q_proj", "down_proj")),
    "qwen2": _Family(TINY_LLAMA, ("k_proj", "o_proj")),
    "qwen3": _Family({**TINY_LLAMA, "head_dim": 8}, ("v_proj", "up_proj")),
    # llama.cpp computes GELU by a table of float16 on the CPU.
    "gemma2": _Family(
        {
            **TINY_LLAMA,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        ("q_proj", "gate_proj"),
        "float16",
    ),
    "gpt2": _Family(
        {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        ("c_attn",),
        "float16",
    ),
    "mamba": _Family(
        {**_COMMON, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        ("x_proj",),
    ),
}
"""Grouped-query attention, biases, norms of heads, windows and soft caps, learned positions, a
recurrent state."""


CERTIFIED = ("llama", "gemma2", "mamba")
"""Every token is kept; windows, whose keys llama.cpp gives up; a state."""


class TinyGguf(TinyModel):
    """A tiny model in GGUF, its adapters, and its oracle.

    Args:
        folder: Receives all files.
        name: One of `FAMILIES`.
        weights: Type of its matrices in the file.
    """

    def __init__(self, folder: Path, name: str, *, weights: str = "F32") -> None:
        family = FAMILIES[name]
        self._name, self._weights = name, weights
        super().__init__(
            folder,
            family.settings,
            model_type=name,
            adapters=("red", "blue"),
            lora={
                "target_modules": list(family.lora),
                "fan_in_fan_out": name == "gpt2",  # its linear layers are transposed
            },
        )

    @functools.cached_property
    def file(self) -> Path:
        """The GGUF file, written on first use with the adapters."""
        from genlm_llamacpp.checkpoint import write_adapter, write_model

        config = json.loads((self.path / "config.json").read_text())
        for folder in self.adapters.values():
            write_adapter(Path(folder), Path(folder) / "adapter.gguf", config)
        file = self.path / f"{self._name}-{self._weights}.gguf"
        write_model(self.path, file, weights=self._weights)
        return file

    def engine(self, **options: Any) -> Any:
        """Serve the model."""
        from genlm_llamacpp.engine import LlamaCppEngine

        sizes = {"n_ctx": 2048, "n_seq_max": 32, "threads": 1}
        return LlamaCppEngine(self.file, **{**sizes, **options})


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target for each kind of memory; each is built when it is first used.

    Args:
        folder: Folder for the models.
    """
    for name in CERTIFIED:
        family = FAMILIES[name]
        model = TinyGguf(folder / name, name)
        yield EngineTarget(
            model=name,
            build=model.engine,
            oracle=model.logprobs,
            adapters=model.adapters,
            dtype=family.dtype,
            tight_options=_TIGHT,
        )
