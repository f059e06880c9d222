"""Checks of special vocabularies and of the nodes of a trie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genlm.testing.check import expect, trie_check
from genlm.testing.strategies import SPECIAL, vocabularies
from genlm.testing.trie_fixture import TrieFixture, nodes_by_symbols
from genlm.testing.trie_oracle import symbols_of


@trie_check()
def special_vocabularies_are_exact(fixture: TrieFixture) -> None:
    """Empty, equal, long, nested and non-UTF-8 tokens, and other items, are counted."""
    for salt, (case, vocabulary) in enumerate(SPECIAL.items()):
        trie = fixture.build(vocabulary)
        for operation, low in (("sum", 0.0), ("max", -2.0), ("logsumexp", -50.0)):
            ws = fixture.weights(len(vocabulary), salt=salt, low=low, high=low + 1)
            values = fixture.reduce(trie, ws, operation)
            fixture.check_values(trie, values, ws, operation, case=case)


@trie_check()
def nodes_are_the_prefixes_of_the_vocabulary(fixture: TrieFixture) -> None:
    """Every prefix and every token has one node, with the right parent, symbols and tokens."""

    def holds(vocabulary: Sequence[Any]) -> None:
        trie = fixture.build(vocabulary)
        expect(list(trie.decode) == list(vocabulary), "`decode`, the vocabulary", trie.decode)
        _check_tree(trie)
        words = [symbols_of(item) for item in vocabulary]
        fixture.saw("tokens with the same bytes", len(set(words)) < len(words))
        longest = max(words, key=len)
        fixture.saw("a token within another", longest[:-1] in words and len(longest) > 1)

    for vocabulary in SPECIAL.values():
        holds(vocabulary)
    fixture.for_all(holds, vocabulary=vocabularies())


def _check_tree(trie: Any) -> None:
    """Check the nodes of all prefixes, and the leaves of all tokens."""
    words = [symbols_of(item) for item in trie.decode]
    nodes = nodes_by_symbols(trie)
    numbers = sorted([*range(len(words)), *nodes.values()])
    expect(numbers == [*range(len(trie))], f"{len(trie)} nodes, each of them once", numbers)
    for symbols, node in nodes.items():
        prefix = tuple(trie.prefix_of(node))
        expect(prefix == symbols, f"prefix_of({node}) = {symbols}", prefix)
        found = trie.node_of(symbols)
        expect(found == node, f"node_of({symbols}) = {node}", found)
        leaves = [position for position, word in enumerate(words) if word == symbols]
        tokens = sorted(trie.tokens_at(node).tolist())
        expect(tokens == leaves, f"tokens_at({node}) = {leaves}", tokens)
        for child in (*leaves, *trie.child_prefixes(node)):
            parent = trie.parent(child)
            expect(parent == node, f"node {node} as the parent of {child}", parent)
            expect(child < node, f"child {child} before its parent", node)
