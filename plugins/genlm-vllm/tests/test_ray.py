"""The Ray executor, whose workers are Ray's actors.

vLLM does not run it on the CPU, because the platform has no `ray_device_key`. In these tests,
vLLM's processes have a platform with a key that is otherwise the same, by vLLM's entry points
for platforms, and Ray has two such resources.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from vllm.platforms.cpu import CpuPlatform

from .traffic import largest_error, prompts, rows

PLATFORM = """
def name():
    return "platform_with_ray.Platform"

def __getattr__(attribute):
    if attribute != "Platform":
        raise AttributeError(attribute)
    from vllm.platforms.cpu import CpuPlatform
    return type("Platform", (CpuPlatform,), {"ray_device_key": "GPU"})
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray on this machine, without its dashboard, and vLLM allowed to use it."""
    (tmp_path / "platform_with_ray.py").write_text(PLATFORM)
    metadata = tmp_path / "platform_with_ray-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: platform_with_ray\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nray = platform_with_ray:name\n"
    )
    monkeypatch.setattr(CpuPlatform, "ray_device_key", "GPU")
    monkeypatch.syspath_prepend(tmp_path)  # inherited by vLLM's processes
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # and by Ray's
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # Or Ray kills workers when other processes have taken 95 % of the machine's memory.
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**27,
    )
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    yield
    ray.shutdown()


def test_ray_workers_give_the_rows_of_one_process(tiny: Any, cluster: None) -> None:
    options = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    engine = tiny.engine(multiprocess=None, **options)
    try:
        for name, path in tiny.adapters.items():
            engine.add_adapter(name, path)
        sequences = prompts(200, 3, 65, 33, 1, 90, 90)
        for name in (None, "red", "blue"):
            assert largest_error(tiny, rows(engine, sequences, name), sequences, name) <= 1e-4
    finally:
        engine.close()
