"""The layout is the trie that enumeration gives, for every kind of vocabulary."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given

from genlm import Token, VocabularyError
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.symbols import Symbols, symbols_of_codes
from genlm.testing.strategies import EOS, vocabularies
from genlm.testing.trie_oracle import symbols_of, tokens_below


def prefixes(layout: TrieLayout, symbols: Symbols) -> dict[int, tuple]:
    """The symbols of each prefix node, by following parents from the root."""
    prefix_of = {layout.root: ()}
    for node in range(layout.root - 1, layout.n_tokens - 1, -1):
        code = int(layout.symbol[node - layout.n_tokens])
        prefix_of[node] = (
            *prefix_of[layout.parent[node]],
            *symbols_of_codes([code], symbols.objects),
        )
    return prefix_of


def tokens(*words: bytes) -> list[Token]:
    return [Token(position, word) for position, word in enumerate(words)]


@given(vocabularies(other_items=True))
@example(tokens(b""))
@example(tokens(b"", b"", b""))
@example(tokens(b"a" * 1000, b"a" * 999, b"a" * 1000 + b"b"))
@example(tokens(*(b"a" * length for length in range(40, 0, -1))))
@example(tokens(b"abcdefg", b"abcdefg\x00", b"abcdefgh", b"abcdef"))
@example(tokens(*(bytes([byte]) for byte in range(256))))
@example([*tokens(b"abcd", b"abc"), EOS, ("a", "b", "c", "d"), "abc"])
def test_nodes_are_the_prefixes_and_their_intervals_the_tokens_below(items) -> None:
    symbols = Symbols.of(items)
    layout = TrieLayout.build(symbols)
    expected = tokens_below(items)
    prefix_of = prefixes(layout, symbols)
    assert sorted(map(repr, prefix_of.values())) == sorted(map(repr, expected))
    for node, prefix in prefix_of.items():
        below = layout.order[layout.lo[node] : layout.hi[node]]
        assert sorted(below) == expected[prefix]
    for token in range(layout.n_tokens):
        assert layout.order[layout.lo[token] : layout.hi[token]].tolist() == [token]
        assert prefix_of[layout.parent[token]] == symbols_of(items[token])


@given(vocabularies(other_items=True))
def test_children_precede_parents_and_prefix_children_are_consecutive(items) -> None:
    layout = TrieLayout.build(Symbols.of(items))
    n = layout.n_tokens
    assert layout.parent[layout.root] == -1
    assert (layout.parent[:-1] > np.arange(layout.n_nodes - 1)).all()
    for row in range(layout.n_prefixes):
        children = np.arange(layout.child_start[row], layout.child_start[row + 1])
        assert children.tolist() == (n + np.flatnonzero(layout.parent[n:] == n + row)).tolist()
        codes = layout.symbol[children - n].tolist()
        assert codes == sorted(set(codes))


@given(vocabularies(other_items=True))
def test_sources_name_the_interval_of_each_prefix(items) -> None:
    layout = TrieLayout.build(Symbols.of(items))
    n = layout.n_tokens
    assert (np.diff(layout.lo[layout.distinct]) >= 0).all()
    for row, source in enumerate(layout.source.tolist()):
        interval = (layout.lo[n + row], layout.hi[n + row])
        if interval[1] - interval[0] == 1:
            assert source == interval[0]
        else:
            same = layout.distinct[source - n]
            assert (layout.lo[same], layout.hi[same]) == interval
    assert len({(layout.lo[d], layout.hi[d]) for d in layout.distinct}) == len(layout.distinct)


@given(vocabularies(other_items=True))
def test_levels_hold_the_prefixes_of_each_length(items) -> None:
    symbols = Symbols.of(items)
    layout = TrieLayout.build(symbols)
    prefix_of = prefixes(layout, symbols)
    assert layout.level[0] == layout.n_nodes
    assert layout.level[-1] == layout.n_tokens
    for length in range(len(layout.level) - 1):
        nodes = range(layout.level[length + 1], layout.level[length])
        assert {len(prefix_of[node]) for node in nodes} == {length}


def test_equal_tokens_are_ordered_by_position() -> None:
    layout = TrieLayout.build(Symbols.of(tokens(b"b", b"a", b"a", b"", b"a")))
    assert layout.order.tolist() == [3, 1, 2, 4, 0]


def test_the_arrays_cannot_be_changed() -> None:
    layout = TrieLayout.build(Symbols.of(tokens(b"a")))
    with pytest.raises(ValueError, match="read-only"):
        layout.lo[0] = 1


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(VocabularyError, match="at least one token"):
        TrieLayout.build(Symbols.of([]))


@pytest.mark.parametrize("item", [7, [[1]], None])
def test_an_item_without_symbols_is_named(item: object) -> None:
    with pytest.raises(VocabularyError, match="item 1 of the vocabulary"):
        Symbols.of([Token(0, b"a"), item])


@pytest.mark.parametrize("item", [np.float64(1), np.int8(1)])
def test_numbers_of_numpy_are_no_items_although_they_are_buffers(item: object) -> None:
    with pytest.raises(VocabularyError, match="item 0 of the vocabulary"):
        Symbols.of([item, Token(0, b"a")])


@pytest.mark.parametrize(
    "item",
    [
        np.array([1, 300]),
        np.array([1, -1], np.int8),
        array("i", [1, 300]),
        memoryview(array("h", [1, 300])),
        np.array([True, False]),
    ],
)
@pytest.mark.parametrize("others", [[], [Token(0, b"a")], [("x",)]])
def test_symbols_of_an_array_are_its_elements(item: Any, others: list[Any]) -> None:
    symbols, expected = Symbols.of([*others, item]), Symbols.of([*others, tuple(item)])
    assert symbols.codes.tolist() == expected.codes.tolist()
    assert symbols.lengths.tolist() == expected.lengths.tolist()
    assert symbols.objects == expected.objects


def test_more_than_65536_distinct_symbols_still_sort() -> None:
    items = [Token(0, b"zz"), *((f"symbol {k}",) for k in range(1 << 16)), Token(1, b"a")]
    layout = TrieLayout.build(Symbols.of(items))
    assert layout.symbol.dtype == np.uint32
    assert layout.order[:3].tolist() == [(1 << 16) + 1, 0, 1]
    assert layout.n_prefixes == 1 + 2 + 1 + (1 << 16)
