"""Groups of query tokens: each token once, with its own past; prefixes shared where it pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Several
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from genlm.plugin import TokenSequence
from genlm.prefix import Paths, PrefixTree, TokenBatch
from genlm_hf.packed.plan import QueryGroup, SharedLengths, plan_pass

Sequence = tuple[int, ...]


def grown(*sequences: Sequence, trunk: int = 0) -> Several[QueryGroup]:
    """The groups of a pass over the last tokens of sequences, which are all cached.

    The first `trunk` tokens of all sequences are equal, and their slots are the trunk.
    """
    tree = PrefixTree(100_000)
    for ids in sequences:
        tree.insert(None, TokenSequence.of(ids))
    tree.commit()
    nodes = [tree.insert(None, TokenSequence.of(ids)) for ids in sequences]
    batch = TokenBatch.of_tree(tree, None, sequences, nodes)
    slots = batch.slots[0, :trunk].astype(np.int64), batch.slots[:, trunk:]
    batch = dataclasses.replace(batch, trunk=slots[0], slots=slots[1])
    plan = plan_pass(batch, SharedLengths())
    suffixes: list[tuple[QueryGroup, Any]] = [
        (group, suffix) for group in plan.groups for suffix in group.suffixes
    ]
    assert len(suffixes) == len(sequences)
    for ids, place in zip(sequences, plan.results, strict=True):
        group, suffix = suffixes[place]
        past = Paths().slots(tree.find(None, TokenSequence.of(ids)), len(ids))
        assert len(group.prefix) < len(past)  # the query's own slot is in its suffix
        slots = np.concatenate((group.prefix, suffix))
        assert np.array_equal(slots[: len(past)], past)
        assert (slots[len(past) :] == past[-1]).all()
    return plan.groups


@settings(max_examples=100, deadline=None)
@given(st.sets(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), min_size=1))
def test_prefix_and_suffix_of_a_token_are_its_past(sequences: set[Sequence]) -> None:
    # Each digit stands for 60 tokens, so that sharing pays.
    long = [tuple(np.repeat(ids, 60).tolist()) for ids in sequences]
    grown(*long)
    for trunk in (1, 30):
        grown(*((*[2] * trunk, *ids) for ids in long), trunk=trunk)


def test_particles_share_their_prompt_as_one_prefix() -> None:
    for trunk in (0, 10, 65):
        [group] = grown(*((*range(64), 1, i) for i in range(50)), trunk=trunk)
        assert len(group.prefix) == 65
        assert group.suffixes.shape == (50, 1)


def test_groups_bound_the_scores_of_their_prefix() -> None:
    prompt = range(2**14)
    groups = grown(*((*prompt, i) for i in range(600)))
    assert [len(group.members) for group in groups] == [256, 256, 88]


def test_a_token_that_all_prompts_begin_with_does_not_join_them() -> None:
    prompts = [(0, first, *range(100)) for first in (1, 2)]
    groups = grown(*((*prompt, i) for prompt in prompts for i in range(20)))
    assert [len(group.prefix) for group in groups] == [102, 102]


def test_short_contexts_of_different_prompts_share_a_group() -> None:
    assert len(grown(*((i, i + 1, i + 2) for i in range(0, 60, 3)))) == 1


def test_contexts_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    groups = grown(*((i, *range(120)) for i in range(5)), *((i, 7) for i in range(10, 20)))
    assert sum(group.suffixes.size for group in groups) <= 5 * 121 + 10 * 2


def test_a_plan_runs_uncached_tokens_once_and_known_ends_again() -> None:
    tree = PrefixTree(100)
    tree.insert(None, TokenSequence.of((1, 2, 3)))
    tree.commit()
    sequences: list[Any] = [(1, 2, 3, 4), (1, 2), tuple(range(20, 40)), (1, 2, 3, 4, 5)]
    nodes = [tree.insert(None, TokenSequence.of(ids)) for ids in sequences]
    plan = plan_pass(TokenBatch.of_tree(tree, None, sequences, nodes), SharedLengths())
    assert sorted(plan.tokens.tolist()) == [2, 4, 5, *range(20, 40)]
    assert plan.tokens[plan.results].tolist() == [4, 2, 39, 5]
    assert plan.positions[plan.results].tolist() == [3, 1, 19, 4]
    # The token that is known already writes to the scratch slot.
    assert (plan.writes == 0).tolist() == (plan.tokens == 2).tolist()
    assert [(chunk.past, chunk.length) for chunk in plan.chunks] == [(0, 20)]


def test_a_plan_keeps_the_order_of_the_sequences() -> None:
    tree = PrefixTree(1000)
    sequences = [(*range(64), i) for i in range(50)]
    tree.insert(None, TokenSequence.of(tuple(range(64))))
    tree.commit()
    nodes = [tree.insert(None, TokenSequence.of(ids)) for ids in sequences]
    plan = plan_pass(TokenBatch.of_tree(tree, None, sequences, nodes), SharedLengths())
    assert plan.tokens.tolist() == list(range(50))
    assert plan.results.tolist() == list(range(50))
