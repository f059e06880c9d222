"""The declarations of llama.cpp's structs are those of the library, or it is refused."""

from __future__ import annotations

import ctypes

import pytest

from genlm_llamacpp import library
from genlm_llamacpp.library import ContextParams, check_defaults, llama


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(library, "version", lambda name: "2026.9.11063")
    with pytest.raises(
        library.ModelLoadError, match=r"2026\.9\.11063 is installed.*pip install"
    ):
        llama.__wrapped__()


def test_a_struct_that_lacks_a_field_is_noticed():
    class Older(ctypes.Structure):
        _fields_ = tuple(f for f in ContextParams._fields_ if f[0] != "n_outputs_max_per_seq")

    found = llama().llama_context_default_params()
    check_defaults(found, library._CONTEXT_DEFAULTS)
    shifted = Older.from_buffer_copy(bytes(found))
    with pytest.raises(library.ModelLoadError, match="built from another"):
        check_defaults(shifted, library._CONTEXT_DEFAULTS)


def test_builds_for_gpus_have_a_suffix(monkeypatch):
    monkeypatch.setattr(library, "version", lambda name: f"{library.VERSION}+cu130")
    assert llama.__wrapped__() is not None
