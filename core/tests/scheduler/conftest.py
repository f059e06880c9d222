from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator

import pytest
from scripted import ScriptedEngine

from genlm import AsyncLM, OutputCache


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[AsyncLM, ScriptedEngine]]]:
    """Starts a language model over a scripted engine, by default without an output cache."""
    started: list[tuple[AsyncLM, ScriptedEngine]] = []
    numbers = itertools.count()

    def _start(
        engine: ScriptedEngine | None = None, **options
    ) -> tuple[AsyncLM, ScriptedEngine]:
        engine = engine or ScriptedEngine()
        options.setdefault("output_cache", OutputCache(0))
        llm = AsyncLM(lambda: engine, name=f"scripted-{next(numbers)}", **options)
        started.append((llm, engine))
        return llm, engine

    yield _start
    for llm, engine in started:
        engine.release()
        llm.close()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disables the collection of reference cycles."""
    collects = gc.isenabled()
    gc.disable()
    yield
    if collects:
        gc.enable()
