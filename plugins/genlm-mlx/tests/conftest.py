"""Tiny models on disk, made here: nothing is downloaded, nothing is mocked."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from genlm.prefix import shared_pasts
from genlm.testing import TINY_LLAMA, TinyModel

Make = Callable[..., TinyModel]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Make a model of some architecture, with its oracle."""

    def model(
        model_type: str, settings: Mapping[str, Any] = TINY_LLAMA, **options: Any
    ) -> TinyModel:
        folder = tmp_path_factory.mktemp(model_type)
        return TinyModel(folder, settings, model_type=model_type, **options)

    return model


@pytest.fixture(scope="session")
def llama(make: Make) -> TinyModel:
    return make("llama", adapters=["red", "blue"])


@pytest.fixture
def eager_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share pasts of any length."""
    monkeypatch.setattr(shared_pasts, "_WORTH_SHARING", 1)
    monkeypatch.setattr(shared_pasts, "_WORTH_A_PASS", 3)
    monkeypatch.setattr(shared_pasts, "_LEAST_COMMON", 2)
