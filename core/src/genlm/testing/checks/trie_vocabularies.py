"""Checks of special vocabularies, and of the views that clients read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genlm.testing.check import trie_check
from genlm.testing.enumeration import spelt
from genlm.testing.failure import expect
from genlm.testing.trie_trial import TrieTrial, leaf_of, nodes_by_letters
from genlm.testing.vocabularies import SPECIAL, vocabularies


@trie_check(cases=tuple(SPECIAL))
def special_vocabularies_are_exact(trial: TrieTrial) -> None:
    """Empty, equal, long, nested and undecodable tokens, and other items, count alike."""
    for salt, (case, vocabulary) in enumerate(SPECIAL.items()):
        trie = trial.build(vocabulary)
        for operation, low in (("sum", 0.0), ("max", -2.0), ("logsumexp", -50.0)):
            ws = trial.weights(len(vocabulary), salt=salt, low=low, high=low + 1)
            values = trial.reduced(trie, ws, operation)
            trial.check_values(trie, values, ws, operation, case=case)
        trial.saw(case)


@trie_check(cases=("tokens with the same bytes", "a token within another"))
def views_agree_with_the_arrays(trial: TrieTrial) -> None:
    """The dict-shaped views describe one and the same tree, which has every node once."""

    def law(vocabulary: Sequence[Any]) -> None:
        trie = trial.build(vocabulary)
        expect(list(trie.decode) == list(vocabulary), "`decode`, the vocabulary", trie.decode)
        _check_tree(trie)
        _check_leaves(trie)
        words = [spelt(item) for item in vocabulary]
        trial.saw("tokens with the same bytes", len(set(words)) < len(words))
        longest = max(words, key=len)
        trial.saw("a token within another", longest[:-1] in words and len(longest) > 1)

    for vocabulary in SPECIAL.values():
        law(vocabulary)
    trial.for_all(law, vocabulary=vocabularies())


def _check_tree(trie: Any) -> None:
    """Every node is the child of one parent, children before parents, and `jump` lists them."""
    seen: dict[int, int | None] = {trie.root: None}
    for node in range(len(trie)):
        children = sorted(map(int, trie.children[node].values()))
        for child in children:
            expect(child not in seen, f"one parent of node {child}", (seen.get(child), node))
            expect(child < node, f"child {child} before its parent", node)
            seen[child] = node
        if hasattr(trie, "jump"):
            jump = list(map(int, trie.jump[node]))
            expect(jump == children, f"jump[{node}] = {children}, its children", jump)
    expect(len(seen) == len(trie), f"{len(trie)} nodes below the root", len(seen))
    if hasattr(trie, "node2prefix"):
        found = trie.node2prefix
        is_mapping = isinstance(found, Mapping) and list(found) == list(range(len(trie)))
        expect(is_mapping, f"node2prefix, a mapping of the nodes 0 to {trie.root}", found)
    for letters, node in nodes_by_letters(trie).items():
        if hasattr(trie, "node2prefix"):
            found = tuple(trie.node2prefix[node])
            expect(found == letters, f"node2prefix[{node}] = {letters}", found)


def _check_leaves(trie: Any) -> None:
    """Every token has a leaf of its own, below the node of its letters."""
    nodes = nodes_by_letters(trie)
    leaves = [leaf_of(trie, position) for position in range(len(trie.decode))]
    expect(len(set(leaves)) == len(leaves), "a leaf for each token", leaves)
    expect(len(trie.word2leaf) == len(leaves), f"{len(leaves)} words", len(trie.word2leaf))
    for position, leaf in enumerate(leaves):
        letters = spelt(trie.decode[position])
        edges = trie.children[nodes[letters]]
        expect(
            edges.get((None, position)) == leaf,
            f"leaf {leaf} of token {position} below the node of its letters",
            edges,
            vocabulary=trie.decode,
        )
        expect(not trie.children[leaf], f"no children of leaf {leaf}", trie.children[leaf])
    if hasattr(trie, "idx_to_leaf"):
        pairs = [tuple(map(int, pair)) for pair in trie.idx_to_leaf]
        expect(pairs == list(enumerate(leaves)), "idx_to_leaf, tokens and their leaves", pairs)
    if hasattr(trie, "leaf2word"):
        back = {leaf: word for word, leaf in trie.word2leaf.items()}
        expect(dict(trie.leaf2word) == back, "leaf2word, word2leaf the other way", "another")
