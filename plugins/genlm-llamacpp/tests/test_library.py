"""The library is of the version whose structs are declared, or it is refused."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch

from genlm import MissingRequirementError
from genlm_llamacpp import library
from genlm_llamacpp.library import llama


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "2026.9.11063")
    with pytest.raises(
        MissingRequirementError, match=r"found xllamacpp 2026\.9\.11063.*pip install"
    ):
        llama.__wrapped__()


def test_builds_for_gpus_have_a_suffix(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: f"{library.VERSION}+cu130")
    assert llama.__wrapped__() is not None


def test_a_library_without_the_functions_of_llama_cpp_is_refused(monkeypatch):
    """As on Windows, where the extension module exports its initialisation only."""
    monkeypatch.setattr(library, "_shared_library", lambda: Path(torch._C.__file__))
    with pytest.raises(library.ModelLoadError, match=r"does not export llama_.*Windows"):
        llama.__wrapped__()


def test_the_declared_structs_have_the_fields_of_the_library():
    """Distinctive defaults, which would be at other offsets if a field were missing."""
    model, context = (
        llama().llama_model_default_params(),
        llama().llama_context_default_params(),
    )
    assert (model.n_gpu_layers, model.split_mode, model.lazy_mode) == (-1, 1, 1)
    assert (model.vocab_only, model.use_extra_bufts, model.no_host) == (False, True, False)
    assert (context.n_ctx, context.n_batch, context.n_ubatch) == (512, 2048, 512)
    assert (context.n_seq_max, context.attention_type, context.flash_attn_type) == (1, -1, -1)
    assert (context.yarn_ext_factor, context.defrag_thold) == (-1.0, -1.0)
    assert (context.type_k, context.type_v, context.embeddings) == (1, 1, False)
    assert (context.no_perf, context.swa_full, context.kv_unified) == (True, True, False)
