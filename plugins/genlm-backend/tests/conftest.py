"""A tiny model, made here: nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from genlm.backend import AsyncTransformer

from .tiny import make_model, make_tokenizer

# SGLang is in an environment of its own; `make test-sgl` runs these there.
collect_ignore = [] if find_spec("sglang") else ["on_sglang"]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def model() -> Any:
    return make_model()


@pytest.fixture
def llm(model: Any, tokenizer: Any) -> Iterator[AsyncTransformer]:
    with AsyncTransformer(model, tokenizer) as llm:
        yield llm


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder as users have it: config, weights and tokenizer."""
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
