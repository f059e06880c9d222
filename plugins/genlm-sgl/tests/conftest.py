"""Engines over one tiny model, made here: nothing is downloaded, nothing is mocked."""

from __future__ import annotations

import functools
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from genlm_sgl.conformance import TinyLlama
from genlm_sgl.exclusive import ExclusiveEngine

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
"""Engine options of the engines that reduce and score."""


def adapted_engine(tiny: TinyLlama, options: Mapping[str, Any]) -> Any:
    """Build an engine that has both adapters; the caller closes it."""
    if ExclusiveEngine.active is not None:
        ExclusiveEngine.active.suspend()
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
    model.logprobs = functools.cache(model.logprobs)  # walks ask for the same rows
    return model


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest) -> None:
    """Have the conformance suite's engine make way; it comes back when it is asked."""
    if request.module.__name__.endswith("test_conformance"):
        return
    if ExclusiveEngine.active is not None:
        ExclusiveEngine.active.suspend()


@pytest.fixture
def build(tiny: TinyLlama) -> Iterator[Callable[..., Any]]:
    """Build an engine with these SGLang options; closed when the test ends."""
    built: list[Any] = []

    def engine(**options: Any) -> Any:
        built.append(tiny.engine({"max_total_tokens": 4096}, **options))
        return built[-1]

    yield engine
    for each in built:
        if not each.closed:
            each.close()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End with the tests' exit status: the interpreter crashes after many of SGLang's."""
    status = getattr(config, "exit_status", None)
    if status is not None:
        sys.stdout.flush()
        os._exit(int(status))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.exit_status = exitstatus
