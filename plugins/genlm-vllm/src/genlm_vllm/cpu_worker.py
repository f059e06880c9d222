"""`CPUWorker`: vLLM's worker for the CPU with three corrections.

vLLM's worker counts the file cache of a control group as used memory, and refuses a KV cache of
any size when the group has read many files. `CPUWorker` measures free memory with the core.

vLLM's attention reads whole KV blocks and multiplies entries beyond the context by 0. NaN times
0 is NaN, so NaN of one request would reach later requests that reuse its blocks. `CPUWorker`
zeroes blocks before they are reused. vLLM's scheduler lists them (`lifecycle`), as it does
for recurrent models, for which vLLM zeroes them itself.

vLLM's `reload_weights` leaves the packed copies of some weights as they were (`cpu_packing`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker import cpu_worker

from genlm.plugin import free_memory_bytes
from genlm_vllm.cpu_packing import packing_again
from genlm_vllm.worker import RowWorker


class CPUWorker(cpu_worker.CPUWorker, RowWorker):  # type: ignore[misc]
    """vLLM's worker with three corrections and `RowWorker` as a base class.

    vLLM cannot mix `RowWorker` into this class after mixing it into the class of vLLM.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with _core_memory_figures():
            super().__init__(*arguments, **options)

    def determine_available_memory(self) -> int:
        """Return the size of the KV cache.

        Raises:
            ValueError: Too little memory is free.
        """
        with _core_memory_figures():
            return int(super().determine_available_memory())

    def execute_model(self, scheduler_output: Any) -> Any:
        """Zero the blocks that this step is the first to write, and run the model."""
        blocks = scheduler_output.new_block_ids_to_zero
        if blocks and not self.model_runner.kv_cache_config.needs_kv_cache_zeroing:
            for layer in self.vllm_config.compilation_config.static_forward_context.values():
                if isinstance(layer, Attention) and isinstance(layer.kv_cache, torch.Tensor):
                    layer.kv_cache[blocks] = 0  # the first dimension is the block
            scheduler_output.new_block_ids_to_zero = None
        return super().execute_model(scheduler_output)

    def reload_weights(self, *arguments: Any, **options: Any) -> None:
        """Replace the weights of the model, packed copies included."""
        with packing_again(self.model_runner.get_model()):
            super().reload_weights(*arguments, **options)


@contextmanager
def _core_memory_figures() -> Iterator[None]:
    """Make vLLM use the free memory that the core measures."""
    original = cpu_worker.get_memory_node_info

    def measured(node_id: int) -> Any:
        free = free_memory_bytes(memory_nodes=[node_id])
        return dataclasses.replace(original(node_id), available_memory=free)

    cpu_worker.get_memory_node_info = measured
    try:
        yield
    finally:
        cpu_worker.get_memory_node_info = original
