"""The size of the KV cache on a CPU, independent of other uses of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.utils import cpu_resource_utils

import genlm
from genlm.engines import memory
from genlm_vllm import loading
from genlm_vllm.engine import VLLMEngine

from .traffic import largest_error, prompts, rows

GIB = 2**30
OWN_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def free(gib: float) -> Any:
    """Return a replacement of `memory._free` for this much free memory."""
    return lambda device="cpu", memory_nodes=None: memory._Bound(int(gib * GIB), "a test")


@pytest.mark.parametrize(
    ("gib", "options", "expected"),
    [
        (8, {}, 2 * GIB),
        (100, {}, 4 * GIB),
        (0.25, {}, GIB // 16),
        (8, {"tensor_parallel_size": 2}, GIB),
        (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, GIB // 2),
    ],
)
def test_the_workers_share_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, gib: float, options: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(memory, "_free", free(gib))
    assert loading.engine_arguments("m", options)["kv_cache_memory_bytes"] == expected


def test_the_memory_node_of_the_first_core_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(
        loading, "cache_budget_bytes", lambda memory_nodes, **_: measured.append(memory_nodes)
    )
    loading.engine_arguments("m", {})
    assert measured == [[cpu_resource_utils.get_allowed_cpu_list()[0].numa_node]]


def test_sizes_that_users_choose_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(memory, "_free", measure)
    size = {"kv_cache_memory_bytes": 2**24}
    assert loading.engine_arguments("m", size)["kv_cache_memory_bytes"] == 2**24
    share = loading.engine_arguments("m", {"gpu_memory_utilization": 0.2})
    assert "kv_cache_memory_bytes" not in share
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert "kv_cache_memory_bytes" not in loading.engine_arguments("m", {})


def test_too_little_memory_is_an_error_that_says_what_to_do(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_free", free(0.2))
    with pytest.raises(
        genlm.ModelLoadError,
        match=r"204 MiB are free.*cache of 64 MiB needs 256 MiB.*\['kv_cache_memory_bytes'\]",
    ):
        VLLMEngine(tiny.path)


@pytest.fixture
def full_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make vLLM read the figures of a container whose memory is full of file pages."""
    figures = {
        "/sys/fs/cgroup/memory.max": GIB,
        "/sys/fs/cgroup/memory.current": GIB,
    }
    forget = getattr(cpu_resource_utils.get_cgroup_memory_limit, "cache_clear", lambda: None)
    forget()
    with monkeypatch.context() as patched:
        patched.setattr(cpu_resource_utils, "_read_int_file", figures.get)
        yield
    forget()


@pytest.mark.usefixtures("full_group")
def test_file_pages_of_a_control_group_take_no_room_from_the_cache(tiny: Any) -> None:
    with pytest.raises(genlm.ModelLoadError, match=r"0\.0/1\.0 GiB.*kv_cache_memory_bytes"):
        tiny.engine(lora=False, worker_cls=OWN_WORKER)
    engine = tiny.engine(lora=False)
    try:
        sequences = prompts(5, 40)
        assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4
    finally:
        engine.close()


def test_a_number_of_blocks_is_a_size_too(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free", free(0.01))
    options = {"num_gpu_blocks_override": 32, "enforce_eager": True}
    with pytest.raises(genlm.ModelLoadError, match="kv_cache_memory_bytes"):
        VLLMEngine(tiny.path, engine_opts={"gpu_memory_utilization": 0.9})
    with genlm.load_model(Path(tiny.path), "vllm", engine_opts=options) as lm:
        assert lm.next_token_logprobs_sync([1, 2]).shape == (lm.vocabulary.size,)


def test_more_than_there_is_is_refused(tiny: Any) -> None:
    with pytest.raises(genlm.ModelLoadError, match="less than requested memory for kv"):
        tiny.engine(lora=False, kv_cache_memory_bytes=2**60)
