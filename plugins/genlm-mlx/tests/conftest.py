"""Tiny models on disk, made here: nothing is downloaded, nothing is mocked."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from mlx_lm.models import rope_utils

from genlm.prefix import shared_pasts
from genlm.testing import TINY_LLAMA, TinyModel

Make = Callable[..., TinyModel]

since_mlx_lm_0_32 = pytest.mark.skipif(
    not hasattr(rope_utils, "DynamicNTKScalingRoPE"),
    reason="mlx-lm before 0.32 has neither GPT-J nor dynamic NTK scaling",
)


def family_parameters(names: Iterable[str]) -> list[Any]:
    """Parameters of tests of families, without those that the installed mlx-lm lacks."""
    return [
        pytest.param(name, marks=since_mlx_lm_0_32) if name == "gptj" else name
        for name in names
    ]


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
