"""Padded batches of whole sequences and of segments, and the prefill stages of a tree."""

from __future__ import annotations

import dataclasses
import itertools
import random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from allocations import Allocations
from hypothesis import example, given, settings

from genlm.core.queries.generations import Integers64
from genlm.core.queries.sequence import TokenSequence
from genlm.prefix import (
    SCRATCH_SLOT,
    BatchLimits,
    PassLayout,
    PassLogits,
    PrefixTree,
    SegmentLimits,
    TokenBatch,
    plan_batches,
)
from genlm.prefix.padding import plan_segments


def plan(lengths: list[int], **limits: object) -> list[list[int]]:
    values = {"max_tokens": 1000, "max_rows": 100} | limits
    batches = plan_batches(lengths, BatchLimits(**values))  # type: ignore[arg-type]
    return [[lengths[i] for i in batch] for batch in batches]


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_is_in_exactly_one_batch_within_the_limits(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 400) for _ in range(rng.randint(1, 80))]
    limits = BatchLimits(max_tokens=1000, max_rows=7, equal_lengths=seed % 2 == 0)
    batches = list(plan_batches(lengths, limits))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        inside = [lengths[i] for i in batch]
        assert len(batch) <= 7
        assert len(batch) * max(inside) <= 1000
        assert all(max(inside) - n <= max(n, 64) for n in inside)
        assert not limits.equal_lengths or len(set(inside)) == 1


def test_similar_lengths_share_a_batch() -> None:
    assert plan([60, 50, 1, 64]) == [[64, 60, 50, 1]]


def test_a_short_sequence_is_not_padded_to_a_long_one() -> None:
    assert plan([5, 400, 6]) == [[400], [6, 5]]


def test_a_sequence_is_padded_to_at_most_twice_its_length() -> None:
    assert plan([300, 200, 150, 149]) == [[300, 200, 150], [149]]
    assert plan([301, 151, 150]) == [[301, 151], [150]]


def test_a_sequence_beyond_the_token_limit_goes_alone() -> None:
    assert plan([2000, 1500, 900]) == [[2000], [1500], [900]]


def test_equal_lengths_only_where_padding_is_not_allowed() -> None:
    assert plan([3, 2, 3, 1], equal_lengths=True) == [[3, 3], [2], [1]]


def test_nothing_pending_is_no_batch() -> None:
    assert plan([]) == []


LIMITS = SegmentLimits(max_tokens=200, max_context=90)
shapes = st.tuples(st.integers(0, 89), st.integers(1, 20)).filter(lambda s: sum(s) <= 90)


def arrays(shapes: list[tuple[int, int]]) -> tuple[Integers64, Integers64]:
    """Return the numbers of tokens and of pasts of segments."""
    pasts, counts = np.array(shapes).T
    return counts, pasts


@settings(max_examples=200, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=60))
def test_each_segment_is_in_one_pass_that_keeps_the_limits(
    wanted: list[tuple[int, int]],
) -> None:
    counts, pasts = arrays(wanted)
    passes = [part.tolist() for part in plan_segments(counts, pasts, LIMITS)]
    assert sorted(index for part in passes for index in part) == list(range(len(wanted)))
    for earlier, later in itertools.pairwise(passes):
        first = [wanted[index] for index in [*earlier, later[0]]]
        assert lengths_of_passes(first, LIMITS) == [len(earlier), 1]
    for part in passes:
        new = counts[part]
        assert new.max() * len(part) <= 200
        assert new.max() + pasts[part].max() <= 90
        assert new.max() * len(part) - new.sum() <= 64
        past = pasts[part]
        assert past.max() * len(part) - past.sum() <= max(past.sum(), 4096)


def lengths_of_passes(shapes: list[tuple[int, int]], limits: SegmentLimits) -> list[int]:
    return [len(part) for part in plan_segments(*arrays(shapes), limits)]


def test_a_segment_beyond_the_limits_runs_alone() -> None:
    assert lengths_of_passes([(40, 500), (0, 3)], LIMITS) == [1, 1]


@pytest.mark.parametrize(
    ("wanted", "limits", "lengths"),
    [
        ([(0, 20)] * 10, LIMITS, [10]),
        ([(0, 20)] * 11, LIMITS, [10, 1]),
        ([(70, 20), (0, 20)], LIMITS, [2]),
        ([(71, 20), (0, 20)], LIMITS, [1, 1]),
        ([(0, 1), (0, 65)], LIMITS, [2]),  # 64 tokens of padding
        ([(0, 1), (0, 66)], LIMITS, [1, 1]),
        ([(1023, 1)] * 64, SegmentLimits(2048, None), [64]),  # 2**16 slots
        ([(1023, 1)] * 65, SegmentLimits(2048, None), [64, 1]),
        ([(0, 1), (0, 1), (2048, 1)], SegmentLimits(200, None), [3]),  # 4096 slots of padding
        ([(0, 1), (0, 1), (2049, 1)], SegmentLimits(200, None), [2, 1]),
        (
            [(3000, 1), (3000, 1), (12000, 1)],
            SegmentLimits(200, None),
            [3],
        ),  # a half is padding
        ([(3000, 1), (3000, 1), (12001, 1)], SegmentLimits(200, None), [2, 1]),
    ],
)
def test_a_pass_of_segments_reaches_each_limit(
    wanted: list[tuple[int, int]], limits: SegmentLimits, lengths: list[int]
) -> None:
    assert lengths_of_passes(wanted, limits) == lengths


def test_long_pasts_are_not_gathered_for_short_ones() -> None:
    limits = SegmentLimits(max_tokens=1000, max_context=None)
    for count in (1, 2):
        assert lengths_of_passes([(5, count)] * 60 + [(900, count)], limits) == [60, 1]
        assert lengths_of_passes([(past, count) for past in range(20, 80)], limits) == [60]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(shapes, min_size=1, max_size=8),
    st.booleans(),
    st.integers(0, 9),
    st.integers(0, 9),
)
@example([(9, 1), (9, 2)], False, 9, 0)  # the trunk is longer than the other slots
def test_a_layout_reads_each_past_and_writes_each_token(
    wanted: list[tuple[int, int]], again: bool, trunk: int, shared: int
) -> None:
    trunk, shared = (min(n, *(past for past, _ in wanted)) for n in (trunk, shared))
    paths = [np.arange(1, past + count + 1) for past, count in wanted]
    tokens = [tuple(range(3, 3 + count)) for _, count in wanted]
    batch = TokenBatch.of_paths(None, paths, tokens, is_cached=[again] * len(paths))
    batch = dataclasses.replace(
        batch, trunk=batch.slots[0, :trunk].astype(np.int64), slots=batch.slots[:, trunk:]
    )
    layout = PassLayout(batch, batch.segments)
    layout.share(shared)
    assert layout.shared_slots.tolist() == [[*range(1, shared + 1)]]
    assert layout.is_even == (len({count for _, count in wanted}) == 1)
    assert layout.ends.tolist() == [path[-1] for path in paths]
    assert layout.past_ends.tolist() == [past or SCRATCH_SLOT for past, _ in wanted]
    for row, (path, (past, count)) in enumerate(zip(paths, wanted, strict=True)):
        assert np.array_equal(layout.reads[row][layout.is_token[row]], path[shared:])
        # The new tokens lie where the model appends them: after the longest past.
        assert np.array_equal(
            np.flatnonzero(layout.is_token[row])[-count:] - layout.past, range(count)
        )
        assert tuple(layout.tokens[row, :count]) == tokens[row]
        assert (layout.tokens[row, count:] == 0).all()
        writes = np.zeros(count) if again else path[past:]
        assert np.array_equal(layout.writes[row, :count], writes)
        assert (layout.writes[row, count:] == SCRATCH_SLOT).all()
        assert np.array_equal(layout.positions[row, :count], past + np.arange(count))
        assert set(layout.reads[row]) <= set(path)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1),
        min_size=1,
        max_size=3,
    )
)
def test_a_stage_needs_only_what_earlier_ones_wrote(
    steps: list[set[tuple[int, ...]]],
) -> None:
    tree = PrefixTree(10_000)
    known: set[int] = set()
    for step in steps:
        sequences = sorted(step)
        nodes = [tree.insert(None, TokenSequence.of(ids)) for ids in sequences]
        batch = TokenBatch.of_tree(tree, None, sequences, nodes)
        for ids, result in zip(sequences, batch.results.tolist(), strict=True):
            assert batch.tokens[result] == ids[-1]
            assert batch.positions[result] == len(ids) - 1
        uncached, stages = tree.uncached_tokens, batch.stages()
        segments = np.sort(np.concatenate([stage.tokens for stage in stages]))
        assert np.array_equal(segments, np.arange(len(batch.tokens)))
        for stage in stages:
            written = set()
            for first, count in zip(*stage, strict=True):
                row, past = batch.rows[first], batch.positions[first]
                assert set(batch.path(row, past).tolist()) <= known
                new = batch.path(row, past + count)[past:].tolist()
                written.update(set(new) - known)
                again = set(new) <= known
                writes = set(batch.writes[first : first + count].tolist())
                assert (writes == {SCRATCH_SLOT}) == again
            known |= written
            uncached -= len(written)
        assert uncached == 0
        tree.commit()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 20_000)), min_size=1, max_size=40),
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 9000),
)
def test_passes_of_single_tokens_have_each_token_once_earlier_positions_first(
    positions: list[int], max_rows: int, max_tokens: int, shared: int
) -> None:
    shared = min(shared, *positions)
    limits = SegmentLimits(max_tokens, None, max_rows)
    counts = np.ones(len(positions), np.int64)
    passes = list(plan_segments(counts, np.array(positions), limits, shared))
    assert sorted(np.concatenate(passes).tolist()) == list(range(len(positions)))
    lengths = [[positions[i] + 1 - shared for i in members] for members in passes]

    for members, own in zip(passes, lengths, strict=True):
        assert len(members) <= min(max_rows, max_tokens)
        assert len(own) == 1 or len(own) * max(own) <= 2**16
        gathered = sum(own) - len(own)
        assert (max(own) - 1) * len(own) - gathered <= max(gathered, 4096)
    for earlier, later in itertools.pairwise(lengths):
        assert max(earlier) <= min(later)


@pytest.mark.parametrize(("shared", "count"), [(0, 16), (980, 1)])
def test_shared_slots_do_not_divide_a_population(shared: int, count: int) -> None:
    pasts, limits = np.full(1000, 1000), SegmentLimits(2048, None)
    passes = plan_segments(np.ones_like(pasts), pasts, limits, shared)
    assert len(list(passes)) == count


def test_members_of_similar_lengths_share_a_pass_in_order() -> None:
    pasts = np.array([70, 70, 70, 70])
    [members] = plan_segments(np.ones_like(pasts), pasts, SegmentLimits(2048, None))
    assert members.tolist() == [0, 1, 2, 3]


def test_logits_of_passes_are_in_the_order_of_their_keys_and_copied_once() -> None:
    keys = np.array([7, 3, 9, 3, 5])
    logits = torch.randn(10, 3)
    for passes in ([[7, 3], [1, 9, 5]], [[5, 3, 9], [7]], [[4], [9, 7, 5, 3], [2]]):
        requested = PassLogits(keys)
        for pass_keys in passes:
            requested.add(np.array(pass_keys), logits[pass_keys])
        assert torch.equal(requested.logits, logits[keys])
    requested = PassLogits(keys[:3])
    requested.add(keys[:3], only := logits[keys[:3]])
    assert requested.logits is only
    parts = [logits[:4].clone(), logits[4:].clone()]
    with Allocations() as made:
        requested = PassLogits(np.arange(10))
        while parts:
            begin = 0 if len(parts) == 2 else 4
            requested.add(np.arange(begin, begin + len(parts[0])), parts.pop(0))
    assert torch.equal(requested.logits, logits)
    assert made.most == 1
