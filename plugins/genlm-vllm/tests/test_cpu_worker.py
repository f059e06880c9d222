"""KV blocks that the CPU worker copies and zeroes, planned on vLLM's descriptions of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from genlm_vllm.cpu_worker import ForkedBlocks, newly_written_blocks
from genlm_vllm.requests import FORK, Fork

BLOCK = 4


def new(name: str, length: int, blocks: list[int], computed: int = 0, fork: Any = None) -> Any:
    params = SamplingParams(extra_args=None if fork is None else {FORK: fork})
    return NewRequestData(
        req_id=name,
        prompt_token_ids=list(range(length)),
        mm_features=[],
        sampling_params=params,
        pooling_params=None,
        block_ids=(blocks,),
        num_computed_tokens=computed,
        lora_request=None,
    )


def step(
    *requests: Any,
    scheduled: dict[str, int] | None = None,
    finished: Any = (),
    preempted: Any = None,
) -> SchedulerOutput:
    counts = {
        each.req_id: len(each.prompt_token_ids) - each.num_computed_tokens for each in requests
    }
    counts |= scheduled or {}
    return SchedulerOutput(
        scheduled_new_reqs=list(requests),
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(finished),
        free_encoder_mm_hashes=[],
        preempted_req_ids=preempted,
    )


@pytest.fixture
def forks() -> ForkedBlocks:
    forked = ForkedBlocks(BLOCK, lambda block: block != 99)
    assert forked.plan(step(new("a", 10, [5, 6, 7]))) == (step(new("a", 10, [5, 6, 7])), [])
    return forked


def computed(plan: SchedulerOutput, name: str) -> tuple[int, int]:
    """Tokens that a request has computed, and that it computes."""
    [request] = [each for each in plan.scheduled_new_reqs if each.req_id == name]
    total = plan.total_num_scheduled_tokens
    assert total == sum(plan.num_scheduled_tokens.values())
    return request.num_computed_tokens, plan.num_scheduled_tokens[name]


def test_a_fork_computes_what_differs_and_copies_the_rest(forks: ForkedBlocks) -> None:
    fork = new("b", 12, [5, 6, 8], 8, Fork("a", 10))  # two blocks from the prefix cache
    asked = step(fork, new("c", 3, [9]))
    before = step(fork, new("c", 3, [9]))
    plan, copies = forks.plan(asked)
    assert asked == before  # the scheduler's own plan
    assert copies == [(7, 8)]
    assert computed(plan, "b") == (10, 2)
    assert computed(plan, "c") == (0, 3)
    assert forks.tokens == 2


def test_without_a_prefix_cache_all_blocks_are_copied(forks: ForkedBlocks) -> None:
    plan, copies = forks.plan(step(new("b", 11, [1, 2, 3], 0, ["a", 10])))  # as from afar
    assert copies == [(5, 1), (6, 2), (7, 3)]
    assert computed(plan, "b") == (10, 1)


@pytest.mark.parametrize(
    ("fork", "scheduled"),
    [
        (Fork("nobody", 10), None),
        (Fork("a", 11), None),  # it has 10
        (Fork("a", 8), None),  # from the prefix cache already
        (Fork("a", 10), 2),  # a chunk that ends there
    ],
)
def test_nothing_is_copied(forks: ForkedBlocks, fork: Fork, scheduled: int | None) -> None:
    counts = None if scheduled is None else {"b": scheduled}
    asked = step(new("b", 13, [5, 6, 8, 9], 8, fork), scheduled=counts)
    assert forks.plan(asked) == (asked, [])
    assert forks.tokens == 0


@pytest.mark.parametrize("gone", [{"finished": {"a"}}, {"preempted": {"a"}}])
def test_requests_that_lost_their_blocks_are_not_copied(
    forks: ForkedBlocks, gone: dict[str, Any]
) -> None:
    asked = step(new("b", 12, [5, 6, 8], 8, Fork("a", 10)), **gone)
    assert forks.plan(asked) == (asked, [])


def test_a_request_that_went_on_is_copied_while_its_blocks_are_finite(
    forks: ForkedBlocks,
) -> None:
    forks.plan(step(new("a", 11, [5, 6, 7], 10)))
    _, copies = forks.plan(step(new("b", 12, [5, 6, 8], 8, Fork("a", 10))))
    assert copies == [(7, 8)]
    forks.plan(step(new("n", 10, [5, 6, 99])))
    _, copies = forks.plan(step(new("o", 12, [5, 6, 8], 8, Fork("n", 10))))
    assert copies == [(99, 8)]  # nothing beyond the 10 tokens was written
    forks.plan(step(new("n", 11, [5, 6, 99], 10)))
    _, copies = forks.plan(step(new("p", 12, [5, 6, 8], 8, Fork("n", 10))))
    assert copies == []


def test_what_the_same_step_computes_is_not_copied(forks: ForkedBlocks) -> None:
    asked = step(new("d", 10, [1, 2, 3]), new("e", 12, [1, 2, 4], 8, Fork("d", 10)))
    assert forks.plan(asked) == (asked, [])


def test_of_a_prompt_in_chunks_the_first_chunk_counts(forks: ForkedBlocks) -> None:
    forks.plan(step(new("d", 10, [1, 2], 0), scheduled={"d": 6}))
    asked = step(new("e", 12, [1, 2, 4], 4, Fork("d", 8)))
    assert forks.plan(asked) == (asked, [])
    _, copies = forks.plan(step(new("f", 12, [1, 3, 4], 4, Fork("d", 6))))
    assert copies == [(2, 3)]


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
