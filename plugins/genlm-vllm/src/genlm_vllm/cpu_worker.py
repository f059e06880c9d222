"""`CPUWorker`: vLLM's worker for the CPU with two corrections and cheaper forks.

vLLM's worker counts the file cache of a control group as used memory and refuses a KV cache
of any size once the group has read enough files. Here the core measures free memory.

vLLM's attention reads whole KV blocks and multiplies entries beyond the context by 0, which
NaN survives: NaN of one request would reach later requests that get its blocks. Here blocks
are zeroed before they are used again.

vLLM's prefix cache serves whole blocks, which have at least 32 tokens on the CPU, so a request
that forks from a context would compute up to a block of tokens again. While the other request
exists, its blocks are copied instead, and the model computes the remaining tokens only. vLLM's
scheduler is not involved: the model runner gets a plan of the step in which those tokens are
computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker import cpu_worker

from genlm.plugin import free_memory_bytes
from genlm_vllm.requests import FORK
from genlm_vllm.row_buffer import ROW_BUFFER
from genlm_vllm.worker import RowWorker

__all__ = ["CPUWorker", "ForkedBlocks", "newly_written_blocks"]


class CPUWorker(cpu_worker.CPUWorker, RowWorker):  # type: ignore[misc]
    """vLLM's worker with the corrections, and with `RowWorker` as a base class.

    vLLM cannot mix `RowWorker` into this class after mixing it into the class of vLLM.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with _measured_by_core():
            super().__init__(*arguments, **options)

    def determine_available_memory(self) -> int:
        """Return the size of the KV cache.

        Raises:
            ValueError: Less memory is free.
        """
        with _measured_by_core():
            return int(super().determine_available_memory())

    _forks: ForkedBlocks | None = None

    def execute_model(self, scheduler_output: Any) -> Any:
        """Zero the blocks that this step begins to use, copy forked ones, run the model."""
        config = self.model_runner.kv_cache_config
        if not getattr(config, "needs_kv_cache_zeroing", False):  # else vLLM zeroes them
            sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
            self._zero(newly_written_blocks(scheduler_output, sizes))
        if self._forks is not None:
            scheduler_output, copies = self._forks.plan(scheduler_output)
            self._copy(copies)
            ROW_BUFFER.tokens_copied = self._forks.tokens
        return super().execute_model(scheduler_output)

    def start_forks(self) -> bool:
        """Copy blocks of forked requests from now on; False if the model cannot."""
        context = self.vllm_config.compilation_config.static_forward_context
        config = self.model_runner.kv_cache_config
        groups = config.kv_cache_groups
        layers = [context[name] for group in groups for name in group.layer_names]
        keep_blocks = len(groups) == 1 and all(
            isinstance(layer, Attention)
            and layer.sliding_window is None
            and isinstance(layer.kv_cache, torch.Tensor)
            and layer.kv_cache.shape[0] == config.num_blocks
            for layer in layers
        )
        if keep_blocks:
            self._forks = ForkedBlocks(groups[0].kv_cache_spec.block_size, self._is_finite)
        return keep_blocks

    def _caches(self) -> Iterator[torch.Tensor]:
        """Yield the KV cache of each layer; its first dimension is the block."""
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            if isinstance(layer, Attention) and isinstance(layer.kv_cache, torch.Tensor):
                yield layer.kv_cache

    def _zero(self, blocks: list[int]) -> None:
        for cache in self._caches() if blocks else ():
            cache[blocks] = 0

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            sources, copies = map(list, zip(*pairs, strict=True))
            for cache in self._caches():
                cache[copies] = cache[sources]

    def _is_finite(self, block: int) -> bool:
        standard = {torch.float32, torch.bfloat16, torch.float16}
        return all(
            cache.dtype in standard and bool(cache[block].sum(dtype=torch.float32).isfinite())
            for cache in self._caches()
        )


@contextmanager
def _measured_by_core() -> Iterator[None]:
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
        # A preempted request gets all its blocks again, others only additional ones.
        if groups is not None:
            begun.append((groups, computed if name in cached.resumed_req_ids else 0))
    return [
        block
        for groups, computed in begun
        for blocks, size in zip(groups, block_sizes, strict=True)
        for block in blocks[-(-computed // size) :]
        if block != 0  # vLLM's placeholder for blocks that are no longer needed
    ]


class ForkedBlocks:
    """Plans copies from the plans of vLLM's steps, each given once and in order.

    For models whose requests keep one list of blocks to their end: not with sliding windows.

    Args:
        block_size: Tokens in a KV block.
        is_finite: Whether all values of a block are finite. Tokens of the other request beyond
            the common ones are copied too, and attention multiplies them by 0.

    Attributes:
        tokens: Tokens that were copied instead of computed.
    """

    def __init__(self, block_size: int, is_finite: Callable[[int], bool]) -> None:
        self._block_size = block_size
        self._is_finite = is_finite
        self._sources: dict[str, _Source] = {}
        self.tokens = 0

    def plan(self, step: Any) -> tuple[Any, list[tuple[int, int]]]:
        """Return the plan for the model runner, and the blocks to copy before it runs.

        Args:
            step: vLLM's `SchedulerOutput`, which is not changed.

        Returns:
            The plan; pairs of a block and the one that becomes its copy.
        """
        for gone in (step.finished_req_ids, step.preempted_req_ids or ()):
            for name in gone:
                self._sources.pop(name, None)
        lengths: dict[str, int] = {}
        copies: list[tuple[int, int]] = []
        for new in step.scheduled_new_reqs:
            source, length = self._source(new, step.num_scheduled_tokens[new.req_id])
            if source is not None:
                lengths[new.req_id] = length
                first, last = new.num_computed_tokens, length - 1
                places = range(first // self._block_size, last // self._block_size + 1)
                copies += [(source.blocks[i], new.block_ids[0][i]) for i in places]
        for new in step.scheduled_new_reqs:  # not before: this step computes them
            computed = new.num_computed_tokens + step.num_scheduled_tokens[new.req_id]
            self._sources[new.req_id] = _Source(new.block_ids[0], computed)
        return (self._shortened(step, lengths) if lengths else step), copies

    def _source(self, new: Any, scheduled: int) -> tuple[_Source | None, int]:
        """Return the source of a copy, and the number of tokens that it saves."""
        arguments = None if new.sampling_params is None else new.sampling_params.extra_args
        fork = (arguments or {}).get(FORK)
        if fork is None:
            return None, 0
        name, length = fork
        source, computed = self._sources.get(name), new.num_computed_tokens
        if source is None or not computed < length < computed + scheduled:
            return None, 0
        if source.computed < length:
            return None, 0
        last = source.blocks[(length - 1) // self._block_size]
        if source.computed > length and not self._is_finite(last):
            return None, 0
        return source, length

    def _shortened(self, step: Any, lengths: dict[str, int]) -> Any:
        """Return a plan in which requests have computed the tokens that are copied."""
        scheduled, changed = dict(step.num_scheduled_tokens), []
        for new in step.scheduled_new_reqs:
            length = lengths.get(new.req_id, new.num_computed_tokens)
            copied = length - new.num_computed_tokens
            scheduled[new.req_id] -= copied
            self.tokens += copied
            changed.append(dataclasses.replace(new, num_computed_tokens=length))
        return dataclasses.replace(
            step,
            scheduled_new_reqs=changed,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
        )


class _Source(NamedTuple):
    """A request's blocks, and the number of tokens that they are known to contain."""

    blocks: list[int]
    computed: int
