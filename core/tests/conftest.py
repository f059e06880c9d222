"""Models over engines that the test made, closed when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from genlm.core.engine.engine import Engine
from genlm.core.model.lm import AsyncLM

MakeModel = Callable[..., AsyncLM]


@pytest.fixture
def make_model() -> Iterator[MakeModel]:
    """`make_model(engine, **options)`: an `AsyncLM` over an engine, closed afterwards."""
    models: list[AsyncLM] = []

    def make(engine: Engine, **options: Any) -> AsyncLM:
        models.append(AsyncLM(lambda: engine, **options))
        return models[-1]

    yield make
    for model in models:
        model.close()
