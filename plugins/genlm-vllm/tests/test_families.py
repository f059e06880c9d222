"""Families of models: rows equal an unbatched forward pass of transformers, or loading refuses.

A third of the families of docs/vllm-architectures.md, which says what the others are.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import genlm
from genlm.testing import TinyModel, families, measure_family

HEAD_DIM = 64
OPTIONS = {"kv_cache_memory_bytes": 2**24, "max_num_seqs": 64}
REPRESENTATIVE = {name: one for name, one in families(HEAD_DIM).items() if one.representative}

REFUSED = {
    "bloom": "computes the exact GELU",
    "cohere2": "sliding windows that differ from its config",
    "deepseek_v3": "e_score_correction_bias",
    "gpt_neo": "are not supported",
    "jamba": "selective_scan_fwd",
    "lfm2": "conv_dim",
    "llama4_text with chunks of 16": "16 is not divisible by block_size 32",
    "mamba": "selective_scan_fwd",
    "mpt": "not supported anymore",
    "qwen2 with a window of 16": "window for some but all layers is not supported",
    "recurrent_gemma": "no other way to handle it",
    "rwkv": "are not supported",
}

SHORTENED = {"llama with dynamic rope": 15, "phi3 with longrope": 15}
"""Contexts beyond would depend on their own length."""


def load(folder: Path, unverified: str) -> genlm.AsyncLM:
    """Serve a model of a verified family; what happens to others is told."""
    return genlm.load_model(folder, "vllm", engine_opts=OPTIONS, unverified=unverified)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_rows_of_a_family_are_right_or_loading_refuses(name: str, tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, REPRESENTATIVE[name])
    unverified = "warn" if name in REFUSED else "refuse"  # else that would be the reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", genlm.UnverifiedModelWarning)
        found = measure_family(lambda folder: load(folder, unverified), model)
    if name in REFUSED:
        assert found.status == "refused", found
        assert REFUSED[name] in found.reason
    else:
        assert found.status == "right", found
        assert found.statistics["max_context"] == SHORTENED.get(
            name, found.statistics["max_context"]
        )
