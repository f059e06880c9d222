"""Work items of a pass: together they hold each query token's whole past, each slot once."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from genlm.plugin import TokenSequence
from genlm.prefix import SCRATCH_SLOT, Paths, PrefixTree, TokenBatch
from genlm_hf.packed.plan import PackedPlan, SharedLengths, plan_pass
from genlm_hf.packed.work_items import (
    FIELDS,
    StepSize,
    WorkItems,
    flattened,
    graph_size,
    sections,
    work_items,
)

from .test_packed_plan import Sequence


def planned(*sequences: Sequence) -> tuple[PackedPlan, list[np.ndarray]]:
    """The plan of a pass over the last tokens of sequences, and the past of each token."""
    tree = PrefixTree(100_000)
    for ids in sequences:
        tree.insert(None, TokenSequence.of(ids))
    tree.commit()
    packed = [TokenSequence.of(ids) for ids in sequences]
    last = [tree.insert(None, sequence) for sequence in packed]
    plan = plan_pass(TokenBatch.of_tree(tree, None, packed, last), SharedLengths())
    pasts = [
        Paths().slots(tree.find(None, TokenSequence.of(ids)), len(ids)) for ids in sequences
    ]
    return plan, [pasts[number] for number in np.argsort(plan.results)]


def check(items: WorkItems, tile: int, plan: PackedPlan, pasts: list[np.ndarray]) -> None:
    slots_by_position: list[dict[int, int]] = [{} for _ in plan.tokens]
    for first, count, begin, length, position in np.concatenate(
        [items.prefix_items, items.suffix_items]
    ):
        assert 1 <= count <= tile
        assert length >= 1
        for query in range(first, first + count):
            for offset in range(length):
                assert position + offset not in slots_by_position[query]
                slots_by_position[query][position + offset] = items.slots[begin + offset]
    for by_position, past in zip(slots_by_position, pasts, strict=True):
        assert [by_position[position] for position in range(len(by_position))] == past.tolist()


def partial_results(items: WorkItems, tile: int) -> list[int]:
    """The query token of each row of partial results, -1 for none."""
    owners = [-1] * (len(items.prefix_items) * tile + len(items.suffix_items))
    for number, (first, count, *_) in enumerate(items.prefix_items):
        owners[number * tile : number * tile + count] = range(first, first + count)
    for number, (first, *_) in enumerate(items.suffix_items):
        owners[len(items.prefix_items) * tile + number] = first
    return owners


@pytest.mark.parametrize("tile", [1, 4, 16])
@settings(max_examples=30, deadline=None)
@given(st.sets(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), min_size=1))
def test_items_hold_the_past_of_each_token_once(tile: int, sequences: set[Sequence]) -> None:
    # Each digit stands for 70 tokens, so that sharing pays and items are cut.
    plan, pasts = planned(*[tuple(np.repeat(ids, 70).tolist()) for ids in sequences])
    check(work_items(plan, tile), tile, plan, pasts)


@pytest.mark.parametrize("count", [1, 3, 16, 17, 40, 100])
def test_particles_after_one_prompt_share_its_items(count: int) -> None:
    prompt = tuple(range(300))
    plan, pasts = planned(*[(*prompt, 1000 + i, 2000 + i) for i in range(count)])
    items = work_items(plan, 16)
    check(items, 16, plan, pasts)
    if count > 1:
        assert len(items.suffix_items) == count
        tiles = -(-count // 16)
        assert len(items.prefix_items) == tiles * min(5, 64 // tiles)
    else:
        assert len(items.prefix_items) == 0
        assert len(items.suffix_items) == 5


@pytest.mark.parametrize("count", [1, 7, 50])
def test_the_numbers_of_a_pass_are_padded_with_nothing_to_do(count: int) -> None:
    prompt = tuple(range(200))
    plan, _ = planned(*[(*prompt, 1000 + i) for i in range(count)])
    items = work_items(plan, 16)
    size = graph_size(len(plan.tokens), 16)
    assert items.fit(size)
    ranges, numbers = sections(size), flattened(plan, items, size)

    def part(section: slice, used: int) -> tuple[list[int], list[int]]:
        values = numbers[section].tolist()
        return values[:used], values[used:]

    for section, expected, padding in (
        (ranges.tokens, plan.tokens, 0),
        (ranges.positions, plan.positions, 0),
        (ranges.writes, plan.writes, SCRATCH_SLOT),
        (ranges.results, plan.results, 0),
        (ranges.prefix_items, items.prefix_items.reshape(-1), 0),
        (ranges.suffix_items, items.suffix_items.reshape(-1), 0),
        (ranges.slots, items.slots, 0),
    ):
        values, padding_values = part(section, len(expected))
        assert values == expected.tolist()
        assert set(padding_values) <= {padding}
    padded = WorkItems(
        numbers[ranges.prefix_items].reshape(-1, FIELDS),
        numbers[ranges.suffix_items].reshape(-1, FIELDS),
        items.slots,
    )
    is_suffix_item = (padded.suffix_items[:, 1] > 0).tolist()
    owners = partial_results(padded, size.tile)
    offsets, rows = numbers[ranges.offsets].tolist(), numbers[ranges.rows].tolist()
    expected_rows = len(items.prefix_items) and int(items.prefix_items[:, 1].sum())
    assert offsets[-1] == expected_rows + sum(is_suffix_item)
    for token in range(size.tokens):
        token_rows = rows[offsets[token] : offsets[token + 1]]
        assert len(set(token_rows)) == len(token_rows)
        assert all(owners[row] == token for row in token_rows)
        assert bool(token_rows) == (token < count)


def test_sections_begin_at_multiples_of_16_numbers_and_do_not_overlap() -> None:
    plan, _ = planned(*[(*range(200), 1000 + i) for i in range(5)])
    parts = list(sections(graph_size(len(plan.tokens), 16)))
    assert all(part.start % 16 == 0 for part in parts)
    assert all(a.stop <= b.start for a, b in pairwise(parts))
    assert parts[-1].stop is None


@pytest.mark.parametrize(
    ("tokens", "padded"),
    [
        (1, 8),
        (8, 8),
        (9, 16),
        (16, 16),
        (50, 64),
        (64, 64),
        (65, 72),
        (200, 208),
        (513, 576),
        (1000, 1024),
    ],
)
def test_tokens_are_padded_little(tokens: int, padded: int) -> None:
    assert graph_size(tokens, 16).tokens == padded


@pytest.mark.parametrize(
    ("prefixes", "suffixes", "fit"), [(3, 5, True), (4, 5, False), (3, 6, False), (0, 0, True)]
)
def test_items_fit_if_there_is_room_for_those_of_prefixes_and_of_suffixes(
    prefixes: int, suffixes: int, fit: bool
) -> None:
    items = [np.zeros((count, FIELDS), np.int64) for count in (prefixes, suffixes)]
    size = StepSize(tokens=8, prefix_items=3, suffix_items=5, tile=4)
    assert WorkItems(*items, np.empty(0, np.int64)).fit(size) == fit


@pytest.mark.parametrize("tile", [1, 4, 16])
@pytest.mark.parametrize("count", [1, 2, 17, 64, 100])
@pytest.mark.parametrize("length", [1, 65, 900])
def test_items_of_a_population_fit_whatever_their_lengths_are(
    tile: int, count: int, length: int
) -> None:
    prompt = tuple(range(200))
    sequences = [(*prompt, *range(1000 * i, 1000 * i + length)) for i in range(1, count + 1)]
    plan, _ = planned(*sequences)
    assert work_items(plan, tile).fit(graph_size(len(plan.tokens), tile))
