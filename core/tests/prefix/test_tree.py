"""The prefix tree against a dictionary that knows where every prefix is."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from genlm.core.queries.sequence import TokenSequence
from genlm.prefix.node import FreeSlots, Node, Paths
from genlm.prefix.tree import OutOfSlotsError, PrefixTree

Key = tuple[str | None, tuple[int, ...]]


def prefixes(tree: PrefixTree) -> dict[Key, int]:
    """The slot of every prefix in a tree, and nothing the tree itself looks up."""
    slot_of: dict[Key, int] = {}
    for adapter, root in tree._roots.items():
        path = {id(root): ()}
        for node in root.descendants():
            assert node.parent is not None
            tokens = path[id(node.parent)]
            assert len(tokens) == node.start
            assert len(node.tokens) == len(node.slots) > 0
            assert node.parent.children[node.tokens[0]] is node
            for token, slot in zip(node.tokens, node.slots, strict=True):
                tokens = (*tokens, token)
                slot_of[adapter, tokens] = int(slot)
            path[id(node)] = tokens
    return slot_of


def check(tree: PrefixTree) -> dict[Key, int]:
    """Every invariant of the tree; what is in it."""
    slot_of = prefixes(tree)
    slots = list(slot_of.values())
    assert len(set(slots)) == len(slots)
    assert tree._free.numbers() | set(slots) == set(range(1, tree.capacity + 1))
    assert len(tree._free) + len(slots) == tree.capacity
    nodes = {node for root in tree._roots.values() for node in root.descendants()}
    retained = {node for node in nodes if node.pinned or node in tree._in_use}
    assert set(tree._idle) == nodes - retained
    assert tree._idle_slots == sum(len(node.tokens) for node in tree._idle)
    assert tree._in_use <= nodes
    assert len(tree._places) <= tree.capacity
    order = {node: place for place, node in enumerate(tree._idle)}
    for node in nodes:
        assert node.parent is not None
        # Ancestors are evicted after their descendants, and kept with them.
        if node.parent in order:
            assert order[node] < order[node.parent]
        assert (node.computed < len(node.tokens)) == (node in tree._uncached)
    return slot_of


SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
KEY = st.tuples(st.sampled_from([None, "red"]), SEQUENCE)
BATCH = st.tuples(
    st.lists(KEY, min_size=1, max_size=6), st.booleans(), st.booleans(), st.booleans()
)
SEEN: dict[str, int] = {}


@settings(max_examples=160, deadline=None)
@given(st.integers(3, 25), st.lists(BATCH, max_size=8))
def test_a_tree_is_a_dictionary_of_prefixes_with_slots(capacity: int, batches: Any) -> None:
    tree = PrefixTree(capacity)
    pinned: set[Key] = set()
    for keys, commits, pins, releases in batches:
        before = check(tree)
        inserted: dict[Key, int] = {}
        uncached: set[Key] = set()
        during = before
        for adapter, tokens in keys:
            known = during.keys()
            with contextlib.suppress(OutOfSlotsError):
                missing = len(
                    [t for t in range(len(tokens)) if (adapter, tokens[: t + 1]) not in known]
                )
                assert tree.missing(adapter, TokenSequence.of(tokens)) == missing
                node = tree.insert(adapter, TokenSequence.of(tokens))
                inserted[adapter, tokens] = int(node.slots[len(tokens) - 1 - node.start])
                SEEN["inserted"] = SEEN.get("inserted", 0) + 1
            during = check(tree)
            uncached |= during.keys() - known
            for (name, ids), slot in inserted.items():
                assert during[name, ids] == slot
                # Nothing in use is evicted, and forks and splits keep slots.
                for end in range(1, len(ids)):
                    assert (name, ids[:end]) in during
        assert sum(len(n.tokens) - n.computed for n in tree.uncached()) == len(uncached)
        assert tree.uncached_tokens == len(uncached)
        tree.commit() if commits else tree.roll_back()
        after = check(tree)
        assert not tree.uncached()
        assert all(before[key] == slot for key, slot in after.items() if key not in uncached)
        assert (uncached <= after.keys()) if commits else not (uncached & after.keys())
        if pins and commits and inserted:
            adapter, tokens = next(iter(inserted))
            tree.pin(adapter, TokenSequence.of(tokens))
            pinned |= {(adapter, tokens[:end]) for end in range(1, len(tokens) + 1)}
        for adapter, tokens in inserted if releases else ():
            tree.release(adapter, TokenSequence.of(tokens).key)
        assert pinned <= check(tree).keys()
        SEEN["evicted"] = SEEN.get("evicted", 0) + tree.tokens_evicted
    tree.clear()
    assert check(tree) == {}
    assert tree.slots_used == 0


def test_the_random_trees_were_full_at_times() -> None:
    assert SEEN["inserted"] > 100
    assert SEEN["evicted"] > 100


def test_a_released_end_is_evicted_first_unless_it_is_continued() -> None:
    tree = PrefixTree(6)
    first, second, third = ((1, 2), (3, 4), (5, 6))
    for ids in (first, second, third):
        tree.insert(None, TokenSequence.of(ids))
    tree.commit()
    tree.release(None, TokenSequence.of(second).key)
    tree.insert(None, TokenSequence.of((7, 8)))
    tree.commit()
    assert [tree.missing(None, TokenSequence.of(ids)) for ids in (first, second, third)] == [
        0,
        2,
        0,
    ]
    tree.insert(None, TokenSequence.of((*third, 9)))  # the oldest is evicted for it
    tree.commit()
    tree.release(None, TokenSequence.of(third).key)
    tree.insert(None, TokenSequence.of((10, 11)))
    tree.commit()
    assert tree.missing(None, TokenSequence.of((*third, 9))) == 0


def test_a_place_is_remembered_when_others_split_the_node() -> None:
    tree = PrefixTree(20)
    first = TokenSequence.of([1, 2, 3])
    tree.insert(None, first)
    tree.insert(None, TokenSequence.of((1, 2, 3, 4, 5, 6)))
    tree.insert(None, TokenSequence.of((1, 2, 3, 4, 7)))
    tree.commit()
    assert tree._end_of((None, first.key)) is tree.find(None, TokenSequence.of((1, 2, 3)))


def test_places_are_forgotten_with_what_was_there() -> None:
    """A node that was cut and extended by other tokens is not taken for the old one."""
    tree = PrefixTree(8)
    tree.insert(None, TokenSequence.of([1, 2, 3, 4, 5, 6]))
    tree.commit()
    tree.insert(None, TokenSequence.of((7, 8, 9, 9)))  # cuts the end of the first
    tree.commit()
    cached = 6 - tree.missing(None, TokenSequence.of((1, 2, 3, 4, 5, 6)))
    assert 0 < cached < 6
    tree.insert(None, TokenSequence.of((*range(1, cached + 1), 6)))
    tree.commit()
    assert tree.missing(None, TokenSequence.of([1, 2, 3, 4, 5, 6])) == 6 - cached


def add(tree: PrefixTree, *sequences: str) -> None:
    for sequence in sequences:
        tree.insert(None, TokenSequence.of(tuple(map(ord, sequence))))
    tree.commit()


def texts(tree: PrefixTree) -> set[str]:
    """The sequences that end in a leaf."""
    strings = {"".join(map(chr, tokens)) for _, tokens in prefixes(tree)}
    return {
        text for text in strings if not any(o != text and o.startswith(text) for o in strings)
    }


def test_the_least_recently_used_sequence_goes_first() -> None:
    tree = PrefixTree(9)
    add(tree, "abc")
    add(tree, "def")
    add(tree, "ghi")
    add(tree, "abc")
    add(tree, "xyz")
    assert texts(tree) == {"abc", "ghi", "xyz"}
    assert tree.tokens_evicted == 3


def test_a_long_leaf_is_trimmed_from_its_end() -> None:
    tree = PrefixTree(12)
    add(tree, "abcdefghijkl")
    add(tree, "x")
    assert texts(tree) == {"abcdefghi", "x"}


def test_a_trunk_outlives_its_branches() -> None:
    tree = PrefixTree(6)
    add(tree, "abcd", "abce")
    add(tree, "xyz")
    assert texts(tree) == {"abc", "xyz"}


def test_a_pinned_prefix_is_cut_out_exactly_and_survives() -> None:
    tree = PrefixTree(6)
    add(tree, "abcdef")
    tree.pin(None, TokenSequence.of((97, 98)))
    add(tree, "wxyz")
    assert texts(tree) == {"ab", "wxyz"}
    with pytest.raises(OutOfSlotsError, match="5 slots requested; 0 of 6 are free and 4"):
        tree.insert(None, TokenSequence.of((1, 2, 3, 4, 5)))
    tree.roll_back()
    assert texts(tree) == {"ab", "wxyz"}  # nothing is evicted in vain


@given(st.lists(SEQUENCE, min_size=1, max_size=12), st.lists(st.booleans(), min_size=12))
def test_paths_are_the_slots_of_every_prefix(sequences: list[Any], pins: list[bool]) -> None:
    """Also after other sequences were read, and after nodes were split by `pin`."""
    tree = PrefixTree(100)
    for tokens in sequences:
        tree.insert(None, TokenSequence.of(tokens))
    tree.commit()
    slot_of, paths = prefixes(tree), Paths()
    for tokens, is_pinned in zip(sequences, pins, strict=False):
        slots = paths.slots(tree.find(None, TokenSequence.of(tokens)), len(tokens))
        assert slots.tolist() == [slot_of[None, tokens[: i + 1]] for i in range(len(tokens))]
        if is_pinned:
            tree.pin(None, TokenSequence.of(tokens))


@given(st.lists(SEQUENCE, min_size=1, max_size=12), SEQUENCE)
def test_followers_are_the_next_tokens_of_a_sequence(sequences: list[Any], tokens: Any) -> None:
    tree = PrefixTree(100)
    for sequence in sequences:
        tree.insert(None, TokenSequence.of(sequence))
    tree.commit()
    correct = {key[-1] for _, key in prefixes(tree) if key[:-1] == tokens}
    assert sorted(tree.followers(None, TokenSequence.of(tokens))) == sorted(correct)


def test_what_a_batch_uses_is_not_evicted_for_another_member() -> None:
    tree = PrefixTree(4)
    tree.insert(None, TokenSequence.of((1, 2, 3)))
    with pytest.raises(OutOfSlotsError):
        tree.insert(None, TokenSequence.of((4, 5)))
    tree.commit()
    assert tree.slots_used == 3


def test_a_growing_leaf_keeps_its_node() -> None:
    tree = PrefixTree(8)
    add(tree, "ab")
    node = tree.find(None, TokenSequence.of((97, 98)))
    add(tree, "abc")
    assert tree.find(None, TokenSequence.of((97, 98, 99))) is node
    assert isinstance(node, Node)
    assert node.slots.tolist() == [1, 2, 3]


def test_removed_nodes_hold_no_tokens() -> None:
    tree = PrefixTree(50)
    for i in range(20):
        tree.insert(None, TokenSequence.of([i] * 40))
        tree.commit()
    nodes = [node for node, _, _ in tree._places.values()]
    assert len(nodes) == 20
    assert sum(len(node.tokens) for node in nodes) <= 50


def test_a_long_use_leaves_nothing_behind() -> None:
    tree = PrefixTree(50)
    for i in range(3000):
        tree.insert(None, TokenSequence.of((1, 2, i % 7, i, i % 3)))
        tree.commit() if i % 5 else tree.roll_back()
    check(tree)
    assert sum(1 for root in tree._roots.values() for _ in root.descendants()) <= 50


def test_runs_that_were_freed_together_are_taken_together() -> None:
    free = FreeSlots(6)
    first, second = free.allocate(2), free.allocate(3)
    free.free(first)
    free.free(second)
    assert free.allocate(3).tolist() == second.tolist() == [3, 4, 5]
    assert len(free) == 3
