"""Groups of rows: every row once, with exactly its own past, trunks where they pay."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from genlm.prefix import PrefixTree
from genlm_hf.packed.plan import plan_forward
from genlm_hf.packed.rows import Row, RowGroup, group_rows

Sequence = tuple[int, ...]


def grown(*sequences: Sequence) -> tuple[PrefixTree, list[Row]]:
    """A tree of sequences, and the row of the last token of each."""
    tree = PrefixTree(100_000)
    for ids in sequences:
        tree.insert(None, ids)
    tree.commit()
    rows = [Row(ids[-1], len(ids) - 1, 0, tree.find(None, ids)) for ids in sequences]
    return tree, rows


def check(groups: list[RowGroup], rows: list[Row]) -> None:
    assert sorted(map(id, rows)) == sorted(id(row) for group in groups for row in group.rows)
    for group in groups:
        for row, tail in zip(group.rows, group.tails, strict=True):
            past = row.node.path_slots(0, row.position + 1)
            assert len(group.trunk) <= row.position  # the row's own slot is in its tail
            seen = np.concatenate((group.trunk, tail))
            assert np.array_equal(seen[: len(past)], past)
            assert (seen[len(past) :] == past[-1]).all()


@settings(max_examples=100, deadline=None)
@given(st.sets(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), min_size=1))
def test_trunk_and_tail_of_a_row_are_its_past(sequences: set[Sequence]) -> None:
    # Each digit stands for 60 tokens, so that trunks pay.
    long = [tuple(np.repeat(ids, 60).tolist()) for ids in sequences]
    _, rows = grown(*long)
    check(list(group_rows(rows)), rows)


def test_particles_share_their_prompt_as_one_trunk() -> None:
    _, rows = grown(*((*range(64), 1, i) for i in range(50)))
    [group] = group_rows(rows)
    assert len(group.trunk) == 65
    assert group.tails.shape == (50, 1)


def test_a_token_that_all_prompts_begin_with_does_not_join_them() -> None:
    prompts = [(0, first, *range(100)) for first in (1, 2)]
    _, rows = grown(*((*prompt, i) for prompt in prompts for i in range(20)))
    groups = list(group_rows(rows))
    check(groups, rows)
    assert [len(group.trunk) for group in groups] == [102, 102]


def test_short_contexts_of_different_prompts_share_a_group() -> None:
    _, rows = grown(*((i, i + 1, i + 2) for i in range(0, 60, 3)))
    assert len(list(group_rows(rows))) == 1


def test_contexts_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    _, rows = grown(*((i, *range(120)) for i in range(5)), *((i, 7) for i in range(10, 20)))
    groups = list(group_rows(rows))
    check(groups, rows)
    assert sum(group.tails.size for group in groups) <= 5 * 121 + 10 * 2


def test_a_plan_runs_what_is_fresh_once_and_known_ends_again() -> None:
    tree = PrefixTree(100)
    tree.insert(None, (1, 2, 3))
    tree.commit()
    sequences: list[Any] = [(1, 2, 3, 4), (1, 2), tuple(range(20, 40)), (1, 2, 3, 4, 5)]
    slots = [tree.insert(None, ids) for ids in sequences]
    plan = plan_forward(tree, None, sequences, slots)
    assert sorted(plan.tokens.tolist()) == [2, 4, 5, *range(20, 40)]
    assert plan.tokens[plan.results].tolist() == [4, 2, 39, 5]
    assert plan.positions[plan.results].tolist() == [3, 1, 19, 4]
    # The token that is known already writes to the scratch slot.
    assert (plan.writes == 0).tolist() == (plan.tokens == 2).tolist()
    assert [(run.past, run.length) for run in plan.runs] == [(0, 20)]
