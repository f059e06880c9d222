"""The plan covers every interval exactly once; `trie_traffic` counts its bytes."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.trie_traffic import floor_bytes, kernel_bytes
from hypothesis import given
from hypothesis import strategies as st

from genlm import TokenCharacterTrie
from genlm.testing.strategies import vocabularies
from genlm_trie_cuda.plan import TreePlan


def ranks_below_each_slot(plan: TreePlan) -> list[set[int]]:
    """By following the stages and pieces on sets instead of numbers."""
    n = len(plan.order)
    # Padding is a rank that no token has, so that an interval which reads it is found out.
    slots = [{min(slot, n)} for slot in range(plan.padded)]
    for stage in plan.stages:
        assert stage.upper == len(slots)
        entries = slots[stage.first : stage.first + stage.count]
        entries += [{n}] * (stage.padded - stage.count)
        while len(entries) > stage.padded // plan.block:
            pairs = zip(entries[::2], entries[1::2], strict=True)
            entries = [left | right for left, right in pairs]
            slots += entries
    assert plan.first_interval == len(slots)
    assert slots[-1] >= set(range(n))
    for interval, count in enumerate(plan.piece_count.tolist()):
        pieces = [slots[plan.piece[plan.piece_offset[k] + interval]] for k in range(count)]
        ranks = set().union(*pieces)
        assert len(ranks) == sum(map(len, pieces)), "a rank is in two pieces"
        slots.append(ranks)
    assert len(slots) == plan.n_slots
    return slots


@given(items=vocabularies(other_items=True), block=st.sampled_from([None, 2, 4, 16]))
def test_every_prefix_reads_the_tokens_below_it(items, block) -> None:
    layout = TokenCharacterTrie(items).layout
    plan = TreePlan.of_layout(layout, block)
    slots = ranks_below_each_slot(plan)
    n = layout.n_tokens
    for prefix, slot in enumerate(plan.source.tolist()):
        lo, hi = layout.lo[n + prefix], layout.hi[n + prefix]
        assert slots[slot] == set(range(lo, hi))
    np.testing.assert_array_equal(plan.rank_of[plan.order], np.arange(n))
    assert (np.diff(plan.piece_count) <= 0).all()


def test_an_interval_has_at_most_two_pieces_of_a_level() -> None:
    n = 4096
    lo, hi = np.array([1, 0, 5]), np.array([n - 1, n, 6])
    plan = TreePlan.of(np.arange(n), lo, hi, np.array([n, n + 1, n + 2]), block=64)
    assert plan.piece_count.tolist() == [22, 1, 1]
    assert len(plan.stages) == 2


@pytest.mark.parametrize("operation", ["sum", "max", "logsumexp"])
def test_bytes_are_counted_for_a_trie_small_enough_to_do_so_by_hand(operation) -> None:
    # Tokens a, ab, b: prefixes ab, a, b and the root; intervals a and the root.
    layout = TokenCharacterTrie([b"a", b"ab", b"b"]).layout
    plan = TreePlan.of_layout(layout)
    assert floor_bytes(plan, rows=2, weight_bytes=2, value_bytes=4) == 2 * (3 * 2 + 7 * 4)
    # Three ranks and a blank make a tree of three slots above; "a" is one slot, the root two.
    load = 2 * (3 * 2 + 3 * 4 + 3 * 4) + 3 * 4
    trees = 2 * (3 + 3) * 4
    intervals = 2 * (3 + 2) * 4 + 3 * 4 + 2 * 4 + 2 * 2 * 4
    prefixes = 2 * (4 + 4) * 4 + 4 * 4
    sums = 2 * (3 + 2) * 4 if operation == "logsumexp" else 0
    counted = kernel_bytes(plan, operation, rows=2, weight_bytes=2, value_bytes=4)
    assert counted == load + trees + intervals + prefixes + sums
