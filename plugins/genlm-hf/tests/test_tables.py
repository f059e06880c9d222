"""Plans of passes over block tables: tokens read their own slots, clusters share theirs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from genlm.prefix import SCRATCH_SLOT, TokenBatch
from genlm_hf.packed import plan as packed_plan
from genlm_hf.packed.plan import PackedPlan, SharedLengths, plan_pass


def batch_of(paths: list[list[int]], trunk: int = 0, tokens: int = 1) -> TokenBatch:
    """The last tokens of sequences whose slots are given; a long one fills shorter rows."""
    slots = np.tile(np.array(max(paths, key=len)[trunk:], np.int32), (len(paths), 1))
    queries = []
    for row, path in enumerate(paths):
        slots[row, : len(path) - trunk] = path[trunk:]
        queries += [(row, i, path[i]) for i in range(max(trunk, len(path) - tokens), len(path))]
    order = random.sample(range(len(paths)), len(paths))
    queries.sort(key=lambda query: (order[query[0]], query[1]))
    rows, positions, writes = map(np.array, zip(*queries, strict=True))
    results = [queries.index((i, len(path) - 1, path[-1])) for i, path in enumerate(paths)]
    return TokenBatch(
        adapter=None,
        tokens=writes * 10,
        positions=positions,
        writes=writes,
        trunk=np.array(paths[0][:trunk], np.int64),
        slots=slots,
        rows=rows,
        results=np.array(results),
    )


def check(plan: PackedPlan, batch: TokenBatch, paths: list[list[int]]) -> None:
    members = np.concatenate([group.members for group in plan.groups])
    assert sorted(members.tolist()) == list(range(len(batch.tokens)))
    assert plan.tokens.tolist() == batch.tokens[members].tolist()
    assert plan.writes.tolist() == batch.writes[members].tolist()
    assert plan.positions.tolist() == batch.positions[members].tolist()
    assert members[plan.results].tolist() == batch.results.tolist()
    for group in plan.groups:
        for query, suffix in zip(group.members.tolist(), group.suffixes.tolist(), strict=True):
            path = paths[batch.rows[query]][: batch.positions[query] + 1]
            slots = [*group.prefix.tolist(), *suffix]
            assert len(group.prefix) < len(path)
            assert slots[: len(path)] == path
            assert set(slots[len(path) :]) <= {path[-1]}


def prefixes(plan: PackedPlan) -> list[list[int]]:
    return sorted(group.prefix.tolist() for group in plan.groups)


def divided(paths: list[list[int]], before: int, walked: int) -> Iterator[list[int]]:
    """The prefix of each path's group, found node by node of the tree of slots.

    The paths have the first `walked` slots in common, and a group for the first `before`.
    """
    longer = [path for path in paths if len(path) - 1 > walked]
    yield from (path[:before] for path in paths if len(path) - 1 <= walked)
    for slot in {path[walked] for path in longer}:
        below = [path for path in longer if path[walked] == slot]
        end, limit = walked + 1, min(len(path) for path in below) - 1
        while end < limit and len({path[end] for path in below}) == 1:
            end += 1
        added = end - before
        is_contiguous = below[0][end - 1] - below[0][before] == added - 1
        saves = packed_plan._saves_gathering(len(below), before, added, is_contiguous)
        yield from divided(below, end if saves else before, end)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_every_token_reads_the_slots_of_its_sequence(
    seed: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(seed)
    monkeypatch.setattr(packed_plan, "_GROUP_COST", random.choice([50, 2000]))
    numbers = iter(random.sample(range(1, 10**6), 10**5))
    begin = [[next(numbers) for _ in range(random.choice([1, 90]))]]
    paths = list(begin)
    for _ in range(random.randrange(60)):  # each continues the beginning of another
        before = random.choice(paths)
        stem = before[: random.randint(len(begin[0]), len(before))]
        count = random.choice([0, 1, 40]) if tokens == 1 else 5
        paths.append(stem + [next(numbers) for _ in range(count)])
    paths = [[*path, next(numbers), next(numbers), next(numbers)] for path in paths]
    trunk = random.choice([0, len(begin[0])])
    batch = batch_of(paths, trunk, tokens)
    plan = plan_pass(batch, SharedLengths())
    check(plan, batch, paths)
    queries = zip(batch.rows.tolist(), batch.positions.tolist(), strict=True)
    pasts = [paths[row][: position + 1] for row, position in queries]
    found = [group.prefix.tolist() for group in plan.groups for _ in group.members]
    assert sorted(found) == sorted(divided(pasts, trunk, trunk))


def test_prefixes_are_searched_for_again_only_after_members_were_resampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches = []

    def search(*arguments: Any) -> Any:
        searches.append(step)
        return find(*arguments)

    find = packed_plan._shared_lengths
    monkeypatch.setattr(packed_plan, "_shared_lengths", search)
    kept, numbers = SharedLengths(), iter(range(100, 10**6))
    paths = [list(range(1, 65))] * 60
    for step in range(130):
        if step in {60, 100}:
            paths = [paths[i // 20 * 20 + i % 2] for i in range(60)]
        paths = [[*path, next(numbers)] for path in paths]
        random.seed(1)  # the same order of tokens
        batch = batch_of(paths, trunk=64)
        plan = plan_pass(batch, kept)
        check(plan, batch, paths)
        assert prefixes(plan) == prefixes(plan_pass(batch, SharedLengths()))
    assert len(plan.groups) > 3
    assert [step for step in range(130) if searches.count(step) > 1] == [0, 60, 100]


def test_a_single_sequence_becomes_a_prefix_when_it_is_long() -> None:
    kept = SharedLengths()
    batches = [batch_of([[*range(1, end)]], trunk=64) for end in range(1000, 1200)]
    lengths = [len(plan_pass(batch, kept).groups[0].prefix) for batch in batches]
    assert lengths == [len(plan_pass(b, SharedLengths()).groups[0].prefix) for b in batches]
    assert (lengths[0], lengths[-1]) == (64, 1197)


def test_members_read_their_slots_although_other_members_ended_in_the_same_ones() -> None:
    kept, ends = SharedLengths(), range(1000, 1050)
    random.seed(1)  # the same order of tokens
    plan_pass(batch_of([[*range(1, 400), end] for end in ends]), kept)
    random.seed(1)
    paths = [[500, end, end + 100] for end in ends]
    batch = batch_of(paths)
    check(plan_pass(batch, kept), batch, paths)


def test_members_of_several_prompts_read_each_prompt_once() -> None:
    prompts = [list(range(first, first + 300)) for first in (1000, 2000, 3000)]
    paths = [[*prompts[i % 3], 1 + i] for i in range(60)]
    batch = batch_of(paths)
    plan = plan_pass(batch, SharedLengths())
    check(plan, batch, paths)
    assert prefixes(plan) == prompts
    assert {group.suffixes.shape for group in plan.groups} == {(20, 1)}


def test_clusters_within_a_cluster_are_found() -> None:
    prompt = list(range(1000, 1400))
    halves = [[*prompt, *range(first, first + 400)] for first in (2000, 3000)]
    paths = [[*halves[i % 2], 1 + i] for i in range(80)] + [
        [*prompt, 100 + i] for i in range(9)
    ]
    batch = batch_of(paths)
    plan = plan_pass(batch, SharedLengths())
    check(plan, batch, paths)
    assert prefixes(plan) == [prompt, *halves]


def test_few_tokens_with_short_suffixes_are_one_group() -> None:
    paths = [[*range(1, 65), 100 + i % 2, 200 + i] for i in range(50)]
    plan = plan_pass(batch_of(paths, trunk=64), SharedLengths())
    assert [group.suffixes.shape for group in plan.groups] == [(50, 2)]
    assert SCRATCH_SLOT not in plan.groups[0].suffixes


def test_clusters_after_a_short_common_part_are_found() -> None:
    """The slots that both clusters share are too few for a separate group."""
    begins = [[*range(1, 65), 100], [*range(1, 65), 100], [*range(1, 65), 101]]
    paths = [
        [*begin, *range(first, first + 90), 300 + first + i]
        for begin, first in zip(begins, (1000, 2000, 3000), strict=True)
        for i in range(10)
    ]
    batch = batch_of(paths, trunk=64)
    plan = plan_pass(batch, SharedLengths())
    check(plan, batch, paths)
    assert prefixes(plan) == sorted({tuple(path[:-1]): path[:-1] for path in paths}.values())


@pytest.mark.parametrize("are_contiguous", [True, False])
def test_single_tokens_read_long_suffixes_as_prefixes_if_slots_are_contiguous(
    are_contiguous: bool,
) -> None:
    count, length = 6, 1500
    stride, step = (length, 1) if are_contiguous else (1, count)
    begins = [65 + i * stride for i in range(count)]
    paths = [[*range(1, 65), *range(n, n + length * step, step), 20_000 + n] for n in begins]
    batch = batch_of(paths, trunk=64)
    plan = plan_pass(batch, SharedLengths())
    check(plan, batch, paths)
    assert len(plan.groups) == (count if are_contiguous else 1)
