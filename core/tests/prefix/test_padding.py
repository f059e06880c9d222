"""Padded batches of whole sequences and of segments, and the prefill stages of a tree."""

from __future__ import annotations

import itertools
import random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from allocations import Allocations
from hypothesis import given, settings

from genlm.core.queries.sequence import TokenSequence
from genlm.prefix import (
    SCRATCH_SLOT,
    BatchLimits,
    PassLayout,
    PassLogits,
    PrefixTree,
    Segment,
    SegmentLimits,
    TreeBatch,
    plan_batches,
)
from genlm.prefix.padding import group_segments, table_passes


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


def test_a_sequence_beyond_the_token_limit_goes_alone() -> None:
    assert plan([2000, 1500, 900]) == [[2000], [1500], [900]]


def test_equal_lengths_only_where_padding_is_not_allowed() -> None:
    assert plan([3, 2, 3, 1], equal_lengths=True) == [[3, 3], [2], [1]]


def test_nothing_pending_is_no_batch() -> None:
    assert plan([]) == []


def segment(past: int, length: int) -> Segment:
    slots = np.arange(1, past + length + 1)
    return Segment(tuple(range(3, 3 + length)), slots, slots[past:])


LIMITS = SegmentLimits(max_tokens=200, max_context=100)
shapes = st.tuples(st.integers(0, 80), st.integers(1, 20))


@settings(max_examples=200, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=60))
def test_each_segment_is_in_one_batch_that_keeps_the_limits(
    wanted: list[tuple[int, int]],
) -> None:
    segments = [segment(*shape) for shape in wanted]
    batches = list(group_segments(segments, LIMITS))
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, segments))
    for earlier, later in itertools.pairwise(batches):
        assert not is_one_batch([*earlier, later[0]])
    for members in batches:
        batch = PassLayout.of_segments(members)
        padding = batch.tokens.size - sum(len(member.tokens) for member in members)
        assert batch.tokens.size <= 200
        assert batch.reads.shape[1] <= 100
        assert padding <= 64


def is_one_batch(segments: list[Segment]) -> bool:
    counts, pasts = [len(s.tokens) for s in segments], [s.past for s in segments]
    return LIMITS.admit(
        len(segments),
        longest=max(counts),
        new=sum(counts),
        past=max(pasts),
        pasts=sum(pasts),
        shared=0,
    )


def test_a_segment_beyond_the_limits_runs_alone() -> None:
    long, short = segment(40, 500), segment(0, 3)
    assert sorted(map(len, group_segments([long, short], LIMITS))) == [1, 1]


def test_long_pasts_are_not_gathered_for_short_ones() -> None:
    limits = SegmentLimits(max_tokens=1000, max_context=None)
    short, long = [segment(5, 1) for _ in range(60)], [segment(900, 1)]
    assert sorted(map(len, group_segments(short + long, limits))) == [1, 60]
    similar = [segment(past, 1) for past in range(20, 80)]
    assert list(map(len, group_segments(similar, limits))) == [60]


@settings(max_examples=100, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=8))
def test_a_batch_reads_each_past_and_writes_each_token(wanted: list[tuple[int, int]]) -> None:
    members = [segment(*shape) for shape in wanted]
    batch = PassLayout.of_segments(members)
    for row, member in enumerate(members):
        count = len(member.tokens)
        read = batch.reads[row][batch.is_token[row]]
        assert np.array_equal(read, member.slots)
        # The new tokens lie where the model appends them: after the longest past.
        assert np.array_equal(
            np.flatnonzero(batch.is_token[row])[-count:] - batch.past, range(count)
        )
        assert tuple(batch.tokens[row, :count]) == member.tokens
        assert np.array_equal(batch.writes[row, :count], member.writes)
        assert (batch.writes[row, count:] == SCRATCH_SLOT).all()
        assert np.array_equal(batch.positions[row, :count], member.past + np.arange(count))
        assert set(batch.reads[row]) <= set(member.slots)


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
        batch = TreeBatch.of(tree, None, sequences, nodes)
        requested = dict(zip(batch.wanted.tolist(), sequences, strict=True))
        uncached = tree.uncached_tokens
        for stage in batch.stages:
            written = set()
            for member in stage:
                assert set(member.slots[: member.past].tolist()) <= known
                new = member.slots[member.past :].tolist()
                written.update(set(new) - known)
                for place, slot in enumerate(new):
                    if slot in requested:
                        assert requested.pop(slot)[-1] == member.tokens[place]
                again = set(new) <= known
                assert (set(member.writes.tolist()) == {SCRATCH_SLOT}) == again
            known |= written
            uncached -= len(written)
        assert uncached == 0
        assert not requested
        tree.commit()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 20_000)), min_size=1, max_size=40),
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 9000),
)
def test_passes_of_a_table_have_each_token_once_earlier_positions_first(
    positions: list[int], max_rows: int, max_tokens: int, shared: int
) -> None:
    shared = min(shared, *positions)
    limits = SegmentLimits(max_tokens, None, max_rows)
    passes = list(table_passes(np.array(positions), limits, shared))
    assert sorted(np.concatenate(passes).tolist()) == list(range(len(positions)))
    lengths = [[positions[i] + 1 - shared for i in members] for members in passes]

    for members, own in zip(passes, lengths, strict=True):
        assert len(members) <= min(max_rows, max_tokens)
        assert len(own) == 1 or len(own) * max(own) <= 2**16
        assert max(own) <= 2 * min(own) + 64
    for earlier, later in itertools.pairwise(lengths):
        assert max(earlier) <= min(later)


@pytest.mark.parametrize(("shared", "count"), [(0, 16), (980, 1)])
def test_shared_slots_do_not_divide_a_population(shared: int, count: int) -> None:
    passes = table_passes(np.full(1000, 1000), SegmentLimits(2048, None), shared)
    assert len(list(passes)) == count


def test_members_of_similar_lengths_share_a_pass_in_order() -> None:
    [members] = table_passes(np.array([70, 70, 70, 70]), SegmentLimits(2048, None))
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
