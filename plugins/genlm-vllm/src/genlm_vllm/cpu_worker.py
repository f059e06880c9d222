"""`CPUWorker`: vLLM's worker on a CPU, with two of its defects mended.

vLLM's own refuses a KV cache of any size where a control group has read as many bytes of
files as it may have memory: it counts them as used, though the kernel drops them on demand.

Its attention reads whole KV blocks and weighs what lies beyond the context with 0, which NaN
survives: a request whose activations are NaN would spoil the rows of those that get its
blocks afterwards. So blocks are zeroed before they are used again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker import cpu_worker

from genlm import free_memory_bytes
from genlm_vllm.fresh_blocks import fresh_blocks
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

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the model on a batch, as vLLM's does, in blocks that hold nothing."""
        config = self.model_runner.kv_cache_config
        if not getattr(config, "needs_kv_cache_zeroing", False):  # else vLLM does it itself
            sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
            self._zero(fresh_blocks(scheduler_output, sizes))
        return super().execute_model(scheduler_output)

    def _zero(self, blocks: list[int]) -> None:
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        for layer in layers if blocks else ():
            if isinstance(layer, Attention) and isinstance(layer.kv_cache, torch.Tensor):
                layer.kv_cache[blocks] = 0


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
