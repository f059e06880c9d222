"""Segments of a tree's fresh tokens, and the padded batches that they make."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from genlm.prefix import (
    SCRATCH_SLOT,
    PrefixTree,
    Segment,
    SegmentBatch,
    SegmentLimits,
    TreeBatch,
    group_segments,
    waves_of,
)


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
    for members in batches:
        batch = SegmentBatch(members, pad_id=0)
        padding = batch.tokens.size - sum(len(member.tokens) for member in members)
        assert batch.tokens.size <= 200
        assert batch.reads.shape[1] <= 100
        assert padding <= 64


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
    batch = SegmentBatch(members, pad_id=0)
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
def test_a_wave_needs_only_what_earlier_ones_wrote(
    steps: list[set[tuple[int, ...]]],
) -> None:
    tree = PrefixTree(10_000)
    known: set[int] = set()
    for step in steps:
        sequences = sorted(step)
        last_slots = [tree.insert(None, ids) for ids in sequences]
        asked = dict(zip(last_slots, sequences, strict=True))
        fresh = tree.fresh_tokens
        for wave in waves_of(TreeBatch(tree, None, sequences, last_slots)):
            written = set()
            for member in wave:
                assert set(member.slots[: member.past].tolist()) <= known
                new = member.slots[member.past :].tolist()
                written.update(set(new) - known)
                for place, slot in enumerate(new):
                    if slot in asked:
                        assert asked.pop(slot)[-1] == member.tokens[place]
                again = set(new) <= known
                assert (set(member.writes.tolist()) == {SCRATCH_SLOT}) == again
            known |= written
            fresh -= len(written)
        assert fresh == 0
        assert not asked
        tree.commit()
