"""The targets of `genlm check llamacpp`.

The targets are tiny transformers models with random weights, written as GGUF. Their oracle is
the forward pass of one sequence in transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from genlm.testing import EngineTarget, TinyModel, families

_TIGHT = (
    {"n_seq_max": 1},
    {"n_seq_max": 3, "n_ctx": 256, "n_batch": 7},
    {"n_seq_max": 4, "kv_unified": False},
)
"""Options without a cache, with few sequences and small batches, and with separate keys and
values per sequence."""


class _Adapted(NamedTuple):
    """A family, the target modules of its adapters, and the dtype of its computation."""

    family: str
    lora: tuple[str, ...]
    dtype: str = "float32"


FAMILIES: Mapping[str, _Adapted] = {
    "llama": _Adapted("llama", ("q_proj", "down_proj")),
    "qwen2": _Adapted("qwen2", ("k_proj", "o_proj")),
    "qwen3": _Adapted("qwen3", ("v_proj", "up_proj")),
    # llama.cpp computes GELU by a table of float16 on the CPU.
    "gemma2": _Adapted("gemma2 with capped scores", ("q_proj", "gate_proj"), "float16"),
    "gpt2": _Adapted("gpt2", ("c_attn",), "float16"),
    "mamba": _Adapted("mamba", ("x_proj",)),
}
"""Models with grouped-query attention, biases, norms of heads, windows and soft caps, learned
positions, and a recurrent state."""


CERTIFIED = ("llama", "gemma2", "mamba")
"""One family with full attention, one with windows, whose old keys llama.cpp frees, and one
with a recurrent state."""


class TinyGguf(TinyModel):
    """A tiny model in GGUF, its adapters, and its oracle.

    Args:
        folder: Folder for all files.
        name: One of `FAMILIES`.
        weights: Type of the matrices in the file.
    """

    def __init__(self, folder: Path, name: str, *, weights: str = "F32") -> None:
        self._name, self._weights = name, weights
        adapted = FAMILIES[name]
        family = families(head_dim=8)[adapted.family]
        lora = {
            "target_modules": list(adapted.lora),
            "fan_in_fan_out": name == "gpt2",  # its linear layers are transposed
        }
        super().__init__(
            folder,
            family.settings,
            model_type=family.model_type,
            adapters=("red", "blue"),
            lora=lora,
        )

    @functools.cached_property
    def file(self) -> Path:
        """The GGUF file, written on first use with the adapters."""
        from transformers import AutoConfig

        from genlm_llamacpp.checkpoint import write_adapter, write_model

        config = AutoConfig.from_pretrained(self.path)
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
    """Yield a target for each kind of memory; engines are built when they are first used.

    Args:
        folder: Folder for the models.
    """
    for name in CERTIFIED:
        model = TinyGguf(folder / name, name)
        yield EngineTarget(
            model=name,
            build=model.engine,
            oracle=model.logprobs,
            adapters=model.adapters,
            dtype=FAMILIES[name].dtype,
            tight_options=_TIGHT,
            timeout_s=240.0,  # the first call imports transformers
        )
