"""Which KV blocks a step of vLLM is the first to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["fresh_blocks"]


def fresh_blocks(scheduler_output: Any, block_sizes: Sequence[int]) -> list[int]:
    """List the KV blocks that a step is the first to write for its requests.

    Args:
        scheduler_output: vLLM's plan of the step.
        block_sizes: Tokens in a block, for each group of layers.

    Returns:
        Ids of blocks, without those that prefixes had been found in.
    """
    begun = [
        (new.block_ids, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs
    ]
    cached = scheduler_output.scheduled_cached_reqs
    for name, groups, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        # One that was preempted gets all its blocks again, others those that are added.
        if groups is not None:
            begun.append((groups, computed if name in cached.resumed_req_ids else 0))
    return [
        block
        for groups, computed in begun
        for blocks, size in zip(groups, block_sizes, strict=True)
        for block in blocks[-(-computed // size) :]
        if block != 0  # what stands for blocks that are no longer needed
    ]
