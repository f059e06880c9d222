"""Families of models: rows equal an unbatched forward pass of transformers, or loading refuses.

The tests cover a third of the families of docs/vllm-architectures.md.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import genlm
from genlm.testing import TinyModel, families, measure_family

HEAD_DIM = 64
OPTIONS = {"kv_cache_memory_bytes": 2**24, "max_num_seqs": 64}
REPRESENTATIVE = {
    name: family for name, family in families(HEAD_DIM).items() if family.representative
}

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
"""Maximum context of models whose longer contexts would have length-dependent frequencies."""


def load(folder: Path, unverified: str) -> genlm.AsyncLM:
    """Serve a model; `unverified` applies if its family is unverified."""
    return genlm.load_model(folder, "vllm", engine_opts=OPTIONS, unverified=unverified)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_rows_of_a_family_are_right_or_loading_refuses(name: str, tmp_path: Path) -> None:
    model = TinyModel.of(tmp_path, REPRESENTATIVE[name])
    unverified = "warn" if name in REFUSED else "refuse"  # otherwise the error would be this
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", genlm.UnverifiedModelWarning)
        report = measure_family(lambda folder: load(folder, unverified), model)
    if name in REFUSED:
        assert report.status == "refused", report
        assert REFUSED[name] in report.reason
    else:
        assert report.status == "right", report
        assert report.statistics["max_context"] == SHORTENED.get(
            name, report.statistics["max_context"]
        )
