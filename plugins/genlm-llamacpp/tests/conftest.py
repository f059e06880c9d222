"""Tiny models as GGUF, made here: nothing is downloaded, nothing is mocked."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

from collections.abc import Callable

import pytest

from genlm_llamacpp.conformance import TinyGguf

Make = Callable[..., TinyGguf]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Make a model of a family, with its oracle; each once."""
    made: dict[tuple[str, str], TinyGguf] = {}

    def model(name: str, weights: str = "F32") -> TinyGguf:
        if (name, weights) not in made:
            made[name, weights] = TinyGguf(tmp_path_factory.mktemp(name), name, weights=weights)
        return made[name, weights]

    return model


@pytest.fixture(scope="session")
def llama(make: Make) -> TinyGguf:
    return make("llama")
