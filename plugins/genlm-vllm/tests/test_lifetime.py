"""One engine per process at a time, and a process whose state is restored."""

from __future__ import annotations

import gc
import os
import random
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genlm import EngineDiedError, ModelLoadError, VocabularyError
from genlm_vllm.conformance import TinyLlama
from genlm_vllm.engine import VLLMEngine
from genlm_vllm.process_state import Accelerator, log_variables

from . import frozen_modules
from .traffic import finish, largest_error, prompts, rows, submit


@pytest.fixture
def unfrozen() -> Iterator[None]:
    with frozen_modules.unfrozen():
        yield


@pytest.fixture
def serve(tiny: TinyLlama) -> Iterator[Any]:
    """Function that builds engines, which are closed at the end."""
    engines = []

    def build(**options: Any) -> Any:
        engines.append(tiny.engine(**({"lora": False} | options)))
        return engines[-1]

    yield build
    for engine in engines:
        if engine._final_statistics is None:
            engine.close()


def test_a_second_engine_in_the_process_is_refused(serve: Any, tiny: Any) -> None:
    first = serve()
    sequences = prompts(5, 40)
    with pytest.raises(ModelLoadError, match=r"second vLLM engine.*multiprocess=True"):
        serve()
    assert largest_error(tiny, rows(first, sequences), sequences) <= 1e-4
    first.close()
    second = serve()
    assert largest_error(tiny, rows(second, sequences), sequences) <= 1e-4


def test_an_engine_that_fails_to_build_leaves_room_for_another(
    serve: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadError, match=r"kv_cache_memory_bytes=1000.* raised"):
        serve(kv_cache_memory_bytes=1000)  # fails after the weights are loaded
    with pytest.raises(ModelLoadError, match="no such folder"):
        VLLMEngine(Path("nowhere"))
    with monkeypatch.context() as patch:
        patch.setattr("genlm.Vocabulary.from_tokenizer", _undecodable)
        with pytest.raises(VocabularyError):
            serve()
    sequences = prompts(5)
    assert largest_error(tiny, rows(serve(), sequences), sequences) <= 1e-4


def _undecodable(tokenizer: Any) -> None:
    raise VocabularyError("no bytes")


def test_an_engine_is_built_after_numba_was_imported(
    serve: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LikeLibrariesOfLlvmlite:
        def __getattribute__(self, name: str) -> Any:
            return lambda: None  # also for `__dict__`

    module = types.ModuleType("like_llvmlite")
    module.lib = LikeLibrariesOfLlvmlite()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "like_llvmlite", module)
    engine = serve()
    asked = prompts(5, 40)
    assert largest_error(tiny, rows(engine, asked), asked) <= 1e-4


@pytest.mark.usefixtures("unfrozen")
def test_building_and_stepping_change_nothing_around_them(serve: Any) -> None:
    def process_state() -> dict[str, Any]:
        return {
            "torch": torch.get_rng_state().tolist(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),
            "environment": dict(os.environ),
            "threads": torch.get_num_threads(),
            "set_num_threads": torch.set_num_threads,
            "dtype": torch.get_default_dtype(),
            "frozen": gc.get_freeze_count() > 0,
        }

    torch.manual_seed(5)
    random.seed(5)
    before = process_state()
    synchronize = torch.accelerator.synchronize
    engine = serve()
    assert process_state() | {"frozen": False} == before | {"frozen": False}
    rows(engine, prompts(5, 70))
    assert process_state() | {"frozen": False} == before | {"frozen": False}
    engine.close()
    assert process_state() == before
    assert torch.accelerator.synchronize is synchronize


def test_what_vllm_disables_once_is_disabled_for_the_next_engine_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Accelerator, "_vllm_functions", {})
    of_torch = torch.accelerator.synchronize
    first = Accelerator()
    monkeypatch.setattr(torch.accelerator, "synchronize", print)  # as importing vLLM does
    first.restore()
    assert torch.accelerator.synchronize is of_torch
    second = Accelerator()
    assert torch.accelerator.synchronize is print
    second.restore()
    assert torch.accelerator.synchronize is of_torch


@pytest.mark.usefixtures("unfrozen")
def test_closing_gives_the_memory_back(serve: Any) -> None:
    engine = serve()
    rows(engine, prompts(9))
    executor = engine._vllm.model_executor
    model = weakref.ref(executor.driver_worker.worker.model_runner.model)
    assert model() is not None
    del executor
    engine.close()
    assert model() is None


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # not closed
@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
@pytest.mark.parametrize("is_closed", [True, False])
def test_an_engine_in_other_processes_ends_without_the_one_of_this_process(
    serve: Any, tiny: Any, is_closed: bool
) -> None:
    engine, other = serve(), tiny.engine(multiprocess=True, lora=False)
    client = weakref.ref(other.llm_engine.engine_core)
    sequences = prompts(5, 40)
    for each in (engine, other):
        assert largest_error(tiny, rows(each, sequences), sequences) <= 1e-4
    if is_closed:
        other.close()
    del each, other
    gc.collect()
    assert client() is None
    sequences = prompts(6, 41)
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4


def test_figures_outlive_the_engine(serve: Any) -> None:
    engine = serve()
    rows(engine, prompts(9))
    figures = engine.statistics()
    engine.close()
    assert engine.statistics() == figures
    assert figures["tokens_evaluated"] == 9


@pytest.mark.usefixtures("unfrozen")
def test_an_engine_that_is_dropped_frees_the_process(serve: Any, tiny: Any) -> None:
    engine = tiny.engine(lora=False)
    del engine
    gc.collect()
    sequences = prompts(5)
    assert largest_error(tiny, rows(serve(), sequences), sequences) <= 1e-4


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


def test_an_engine_that_cannot_forget_a_failed_step_refuses_all_queries(
    serve: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve()
    waiting = submit(engine, prompts(9)[0])
    with monkeypatch.context() as patch:
        patch.setattr(engine._vllm, "reset_prefix_cache", lambda: False)
        patch.setattr("genlm_vllm.row_sampler.RowSampler.__call__", fails)
        with pytest.raises(EngineDiedError, match=r"ZeroDivisionError.*Load the model again"):
            finish(engine, [waiting])
    for call in (engine.step, lambda: submit(engine, (3, 4)), engine.clear_prefix_cache):
        with pytest.raises(EngineDiedError, match="ZeroDivisionError"):
            call()
    engine.close()
    sequences = prompts(5)
    assert largest_error(tiny, rows(serve(), sequences), sequences) <= 1e-4


@pytest.mark.parametrize(
    "variable", ["LOGGING_LEVEL", "LOGGING_CONFIG_PATH", "CONFIGURE_LOGGING"]
)
def test_the_log_is_limited_to_errors_unless_it_is_configured(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """`test_processes` has a program with and without a worker whose log is empty."""
    for name in list(os.environ):
        if "LOGGING" in name:
            monkeypatch.delenv(name)
    assert log_variables() == {"VLLM_LOGGING_LEVEL": "ERROR"}
    monkeypatch.setenv(f"VLLM_{variable}", "0")
    assert log_variables() == {}
