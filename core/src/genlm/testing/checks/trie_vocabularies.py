"""Checks of special vocabularies and of the dict-shaped views that clients read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genlm.testing.check import expect, trie_check
from genlm.testing.strategies import SPECIAL, vocabularies
from genlm.testing.trie_fixture import TrieFixture, leaf_of, nodes_by_symbols, symbols_of


@trie_check()
def special_vocabularies_are_exact(fixture: TrieFixture) -> None:
    """Empty, equal, long, nested and non-UTF-8 tokens, and other items, are counted."""
    for salt, (case, vocabulary) in enumerate(SPECIAL.items()):
        trie = fixture.build(vocabulary)
        for operation, low in (("sum", 0.0), ("max", -2.0), ("logsumexp", -50.0)):
            ws = fixture.weights(len(vocabulary), salt=salt, low=low, high=low + 1)
            values = fixture.reduce(trie, ws, operation)
            fixture.check_values(trie, values, ws, operation, case=case)


@trie_check(cases=("tokens with the same bytes", "a token within another"))
def views_agree_with_the_arrays(fixture: TrieFixture) -> None:
    """The dict-like views describe the same tree, in which every node occurs once."""

    def holds(vocabulary: Sequence[Any]) -> None:
        trie = fixture.build(vocabulary)
        expect(list(trie.decode) == list(vocabulary), "`decode`, the vocabulary", trie.decode)
        _check_tree(trie)
        _check_leaves(trie)
        words = [symbols_of(item) for item in vocabulary]
        fixture.saw("tokens with the same bytes", len(set(words)) < len(words))
        longest = max(words, key=len)
        fixture.saw("a token within another", longest[:-1] in words and len(longest) > 1)

    for vocabulary in SPECIAL.values():
        holds(vocabulary)
    fixture.for_all(holds, vocabulary=vocabularies())


def _check_tree(trie: Any) -> None:
    """Each node has one parent, children precede parents, and `jump` lists the children."""
    parents: dict[int, int | None] = {trie.root: None}
    for node in range(len(trie)):
        children = sorted(map(int, trie.children[node].values()))
        for child in children:
            expect(
                child not in parents, f"one parent of node {child}", (parents.get(child), node)
            )
            expect(child < node, f"child {child} before its parent", node)
            parents[child] = node
        if hasattr(trie, "jump"):
            jump = list(map(int, trie.jump[node]))
            expect(jump == children, f"jump[{node}] = {children}, its children", jump)
    expect(len(parents) == len(trie), f"{len(trie)} nodes below the root", len(parents))
    if hasattr(trie, "node2prefix"):
        prefixes = trie.node2prefix
        is_mapping = isinstance(prefixes, Mapping) and list(prefixes) == list(range(len(trie)))
        expect(is_mapping, f"node2prefix, a mapping of the nodes 0 to {trie.root}", prefixes)
    for symbols, node in nodes_by_symbols(trie).items():
        if hasattr(trie, "node2prefix"):
            prefix = tuple(trie.node2prefix[node])
            expect(prefix == symbols, f"node2prefix[{node}] = {symbols}", prefix)


def _check_leaves(trie: Any) -> None:
    """Each token has its own leaf, below the node of its symbols."""
    nodes = nodes_by_symbols(trie)
    leaves = [leaf_of(trie, position) for position in range(len(trie.decode))]
    expect(len(set(leaves)) == len(leaves), "a leaf for each token", leaves)
    expect(len(trie.word2leaf) == len(leaves), f"{len(leaves)} words", len(trie.word2leaf))
    for position, leaf in enumerate(leaves):
        symbols = symbols_of(trie.decode[position])
        edges = trie.children[nodes[symbols]]
        expect(
            edges.get((None, position)) == leaf,
            f"leaf {leaf} of token {position} below the node of its symbols",
            edges,
            vocabulary=trie.decode,
        )
        expect(not trie.children[leaf], f"no children of leaf {leaf}", trie.children[leaf])
    if hasattr(trie, "idx_to_leaf"):
        pairs = [tuple(map(int, pair)) for pair in trie.idx_to_leaf]
        expect(pairs == list(enumerate(leaves)), "idx_to_leaf, tokens and their leaves", pairs)
    if hasattr(trie, "leaf2word"):
        back = {leaf: word for word, leaf in trie.word2leaf.items()}
        expect(
            dict(trie.leaf2word) == back,
            "leaf2word, the inverse of word2leaf",
            "another mapping",
        )
