"""Engines of a tiny model with random weights; nothing is downloaded or mocked."""

from __future__ import annotations

import functools
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from genlm.testing.shared_engine import SharedEngine
from genlm_sgl.conformance import TinyLlama

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"max_total_tokens": 4096},
    # A pass has at most 48 new tokens, so most prompts are computed in chunks.
    "cramped": {
        "chunked_prefill_size": 48,
        "context_length": 150,
        "max_running_requests": 16,
        "max_total_tokens": 640,
    },
}
"""Options of the engines that compute reductions and scores."""


def adapted_engine(tiny: TinyLlama, options: Mapping[str, Any]) -> Any:
    """Build an engine with both adapters, which the caller closes."""
    SharedEngine.close_current()
    engine = tiny.engine(options, enable_lora=True, max_lora_rank=8)
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    return engine


def pytest_configure(config: pytest.Config) -> None:
    # SGLang uses what torch has deprecated, and SWIG's types have no module.
    for message in ("DeprecationWarning:torch", "DeprecationWarning:sglang"):
        config.addinivalue_line("filterwarnings", f"ignore::{message}")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """A Llama with a window of 512 positions."""
    model = TinyLlama(tmp_path_factory.mktemp("sgl") / "llama", max_position_embeddings=512)
    model.logprobs = functools.cache(model.logprobs)  # walks compute the same rows
    return model


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest) -> None:
    """Close the engine of the conformance suite, which is built again on its next use."""
    if not request.module.__name__.endswith("test_conformance"):
        SharedEngine.close_current()


@pytest.fixture
def build(tiny: TinyLlama) -> Iterator[Callable[..., Any]]:
    """Function that builds an engine with SGLang's options; engines are closed at the end."""
    engines: list[Any] = []

    def build_engine(**options: Any) -> Any:
        engines.append(tiny.engine({"max_total_tokens": 4096}, **options))
        return engines[-1]

    yield build_engine
    for engine in engines:
        if not engine.closed:
            engine.close()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Exit with the tests' status; the interpreter crashes after many engines of SGLang."""
    status = getattr(config, "exit_status", None)
    if status is not None:
        sys.stdout.flush()
        os._exit(int(status))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.exit_status = exitstatus
