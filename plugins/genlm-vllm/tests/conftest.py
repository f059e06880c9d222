"""One tiny model for all tests; nothing is downloaded.

These tests run in a separate pytest process: vLLM allows one engine per process and changes the
state of the process.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ["VLLM_NO_USAGE_STATS"] = "1"
# Workers of several engines share the cores; vLLM would bind each worker to its cores.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from genlm_vllm.conformance import TinyLlama
from genlm_vllm.loading import CPU_BLOCK_SIZE

from . import frozen_modules, interpreted_triton, preloaded_workers

frozen_modules.keep_frozen()
if not interpreted_triton.ON_GPU:
    preloaded_workers.fork_spawned_processes()

if interpreted_triton.SECOND_RUNNER:
    interpreted_triton.provide()

# Warnings of vLLM and its libraries when they are imported or started.
THIRD_PARTY = (
    "ignore:.*torch.jit.script_method.*:DeprecationWarning",
    "ignore:.*torch.distributed.reduce_op.*:FutureWarning",
    "ignore:Unclosed context:ResourceWarning",  # zmq's, of engines in other processes
)


def pytest_configure(config: pytest.Config) -> None:
    for warning in THIRD_PARTY:
        config.addinivalue_line("filterwarnings", warning)


def pytest_unconfigure() -> None:
    frozen_modules.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the conformance suite last: its engine lives until another target is checked."""
    last = {"test_accelerator.py", "test_conformance.py"}
    items.sort(key=lambda item: item.path.name in last)


@pytest.fixture(scope="session", autouse=True)
def _inspect_model_classes_in_this_process() -> Iterator[None]:
    """Replace the process that vLLM starts to inspect a class of models for the first time.

    The process takes 12 seconds of a core, because it imports vLLM. Its purpose is that CUDA is
    not initialised in this process.
    """
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        yield


class TinyLlamaOnGPU(TinyLlama):
    """Without adapters, which vLLM does not compute in float32 on a GPU.

    KV blocks have their size on the CPU, because tests count blocks and cached tokens.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.adapters = {}

    def engine(self, **options: Any) -> Any:
        return super().engine(**{"block_size": CPU_BLOCK_SIZE, **options})


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """The conformance suite's model with room for longer prompts."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    model = TinyLlamaOnGPU if interpreted_triton.ON_GPU else TinyLlama
    return model(folder, max_position_embeddings=256)


@pytest.fixture
def adapters(tiny: TinyLlama) -> Mapping[str, str]:
    """The model's adapters; skips the test if it has none."""
    if not tiny.adapters:
        pytest.skip("vLLM does not compute adapters in float32 on a GPU")
    return tiny.adapters
