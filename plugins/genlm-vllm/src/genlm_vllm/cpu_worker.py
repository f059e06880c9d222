"""`CPUWorker`: vLLM's worker on a CPU, which counts the file cache as free memory.

vLLM's own refuses a KV cache of any size where a control group has read as many bytes of
files as it may have memory: it counts them as used, though the kernel drops them on demand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker import cpu_worker

from genlm import free_memory_bytes
from genlm_vllm.worker import RowWorker

__all__ = ["CPUWorker"]


class CPUWorker(cpu_worker.CPUWorker, RowWorker):  # type: ignore[misc]
    """vLLM's worker with the core's measure of free memory.

    Derives from `RowWorker`, which vLLM would otherwise refuse to mix in if it has mixed it
    into its own class before.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with _measured_by_the_core():
            super().__init__(*arguments, **options)

    def determine_available_memory(self) -> int:
        """Return the size of the KV cache, as vLLM's does.

        Raises:
            ValueError: That much memory is not free.
        """
        with _measured_by_the_core():
            return int(super().determine_available_memory())


@contextmanager
def _measured_by_the_core() -> Iterator[None]:
    of_vllm = cpu_worker.get_memory_node_info

    def of_the_core(node_id: int) -> Any:
        free = free_memory_bytes(memory_nodes=[node_id])
        return dataclasses.replace(of_vllm(node_id), available_memory=free)

    cpu_worker.get_memory_node_info = of_the_core
    try:
        yield
    finally:
        cpu_worker.get_memory_node_info = of_vllm
