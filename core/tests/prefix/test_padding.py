"""How pending sequences are cut into batches."""

from __future__ import annotations

import random

import pytest

from genlm.prefix.padding import BatchLimits, plan_batches


def plan(lengths: list[int], **limits: object) -> list[list[int]]:
    settings = {"max_tokens": 1000, "max_rows": 100} | limits
    batches = plan_batches(lengths, BatchLimits(**settings))  # type: ignore[arg-type]
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
