"""`ForkedBlocks`: a request that begins with the context of another one copies its KV blocks.

vLLM's prefix cache serves whole blocks, so a request that forks from a context computes up to a
block of tokens again, 32 on the CPU. While the other request is there, its blocks are
copied instead, and the model computes only what differs. vLLM's scheduler does not know it:
the worker passes a plan of the step to the model runner in which those tokens are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["FORK", "Fork", "ForkedBlocks"]

FORK = "genlm_fork"
"""Key in `SamplingParams.extra_args`."""


class Fork(NamedTuple):
    """A request begins with the first tokens of another one.

    Attributes:
        source: The other request's id.
        length: How many tokens.
    """

    source: str
    length: int


class ForkedBlocks:
    """Plans copies from the plans of vLLM's steps, each given once and in order.

    For models whose requests keep one list of blocks to their end: not with sliding windows.

    Args:
        block_size: Tokens in a KV block.
        is_finite: Whether all that a block holds is finite. Tokens of the other request beyond
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
        """Return what to copy from, and the number of tokens that need not be computed."""
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
    """A request's blocks, and how many of its tokens they certainly have."""

    blocks: list[int]
    computed: int
