"""A tiny model for SGLang itself, which serves one at a time in a process."""

from __future__ import annotations

from typing import Any

import pytest

from genlm.testing import TinyModel


def pytest_configure(config: pytest.Config) -> None:
    # SGLang uses what torch has deprecated, and SWIG's types have no module.
    for message in ("DeprecationWarning:torch", "DeprecationWarning:sglang"):
        config.addinivalue_line("filterwarnings", f"ignore::{message}")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("sglang") / "llama")


@pytest.fixture(scope="session")
def options() -> dict[str, Any]:
    """Engine options: room for eight contexts, and a window below the model's."""
    return {"max_total_tokens": 512, "context_length": 50}
