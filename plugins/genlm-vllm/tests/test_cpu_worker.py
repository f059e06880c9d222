"""KV blocks that the CPU worker zeroes, planned on vLLM's descriptions of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from genlm_vllm.cpu_worker import newly_written_blocks


def plan(new: Any = (), running: Any = (), resumed: Any = ()) -> Any:
    """vLLM's plan of a step: its requests' blocks by group, and their computed tokens."""
    cached = [*running, *resumed]
    names = [str(place) for place in range(len(cached))]
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=blocks, num_computed_tokens=computed)
            for blocks, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names,
            resumed_req_ids=set(names[len(running) :]),
            new_block_ids=[blocks for blocks, _ in cached],
            num_computed_tokens=[computed for _, computed in cached],
        ),
    )


def test_blocks_of_a_cached_prefix_stay() -> None:
    assert newly_written_blocks(plan(new=[(([5, 6, 7],), 64)]), [32]) == [7]
    assert newly_written_blocks(plan(new=[(([5, 6],), 0)]), [32]) == [5, 6]
    assert newly_written_blocks(plan(new=[(([5, 6, 7],), 40)]), [32]) == [7]  # a block in part


def test_a_running_request_adds_blocks_and_a_preempted_one_begins_again() -> None:
    running, resumed = ((([9],), 64), ((None), 33)), ((([3, 4, 8],), 32),)
    assert newly_written_blocks(plan(running=running), [32]) == [9]
    assert newly_written_blocks(plan(running=running, resumed=resumed), [32]) == [9, 4, 8]


def test_each_group_of_layers_has_its_own_block_size() -> None:
    assert newly_written_blocks(plan(new=[(([1, 2], [0, 0, 3, 4]), 64)]), [64, 32]) == [2, 3, 4]
