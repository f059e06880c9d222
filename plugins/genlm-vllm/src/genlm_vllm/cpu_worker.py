"""`CPUWorker`: vLLM's worker for the CPU with two corrections.

vLLM's worker counts the file cache of a control group as used memory, and refuses a KV cache of
any size when the group has read many files. `CPUWorker` measures free memory with the core.

vLLM's attention reads whole KV blocks and multiplies entries beyond the context by 0. NaN times
0 is NaN, so NaN of one request would reach later requests that reuse its blocks. `CPUWorker`
zeroes blocks before they are reused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker import cpu_worker

from genlm.plugin import free_memory_bytes
from genlm_vllm.worker import RowWorker

__all__ = ["CPUWorker", "newly_written_blocks"]


class CPUWorker(cpu_worker.CPUWorker, RowWorker):  # type: ignore[misc]
    """vLLM's worker with two corrections and `RowWorker` as a base class.

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
        config = self.model_runner.kv_cache_config
        if not getattr(config, "needs_kv_cache_zeroing", False):  # otherwise vLLM zeroes them
            sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
            self._zero(newly_written_blocks(scheduler_output, sizes))
        return super().execute_model(scheduler_output)

    def _caches(self) -> Iterator[torch.Tensor]:
        """Yield the KV cache of each layer; its first dimension is the block."""
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            if isinstance(layer, Attention) and isinstance(layer.kv_cache, torch.Tensor):
                yield layer.kv_cache

    def _zero(self, blocks: list[int]) -> None:
        for cache in self._caches() if blocks else ():
            cache[blocks] = 0


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


def newly_written_blocks(scheduler_output: Any, block_sizes: Sequence[int]) -> list[int]:
    """Return the KV blocks that a step is the first to write.

    Args:
        scheduler_output: vLLM's plan of the step.
        block_sizes: Tokens in a block, for each group of layers.

    Returns:
        Ids of blocks, without those of cached prefixes.
    """
    begun = [
        (new.block_ids, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs
    ]
    cached = scheduler_output.scheduled_cached_reqs
    for name, groups, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        # A preempted request gets new blocks for all its tokens, others for further tokens.
        if groups is not None:
            begun.append((groups, computed if name in cached.resumed_req_ids else 0))
    return [
        block
        for groups, computed in begun
        for blocks, size in zip(groups, block_sizes, strict=True)
        for block in blocks[-(-computed // size) :]
        if block != 0  # vLLM's placeholder for freed blocks
    ]
