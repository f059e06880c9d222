"""Tiny models and tokenizers, made here: nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genlm.testing import tiny_tokenizer
from genlm_hf.engine import HFEngine

from .tiny import build_model, llama_settings


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def llama() -> Any:
    return build_model("llama", **llama_settings())


@pytest.fixture
def engine(llama: Any, tokenizer: Any) -> HFEngine:
    return HFEngine.from_model(llama, tokenizer)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder as users have it: config, weights and tokenizer of a tiny Llama."""
    path = tmp_path_factory.mktemp("llama")
    build_model("llama", **llama_settings()).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def save_model(tmp_path: Path, tokenizer: Any) -> Callable[[Any], Path]:
    """Save a model beside the tokenizer and return the folder."""

    def save(model: Any) -> Path:
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save
