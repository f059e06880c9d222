"""The mappings agree with each other, with enumeration, and with how clients walk them."""

from __future__ import annotations

import sys
import textwrap
import tracemalloc
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from programs import run_program
from trie_oracle import EOS, symbols_of, tokens_below, vocabularies

from genlm import (
    AsyncTokenCharacterTrie,
    Token,
    TokenCharacterTrie,
    Vocabulary,
    VocabularyError,
)


@given(vocabularies())
def test_walking_children_from_the_root_meets_every_prefix_and_token(items) -> None:
    trie = TokenCharacterTrie(items)
    prefixes, leaves = {}, {}
    waiting = [((), trie.root)]
    while waiting:
        prefix, node = waiting.pop()
        prefixes[prefix] = node
        for symbol, child in trie.children[node].items():
            assert child < node
            if isinstance(symbol, tuple) and symbol[0] is None:
                leaves[symbol[1]] = child
                assert symbols_of(items[symbol[1]]) == prefix
                assert trie.children[child] == {}
            else:
                waiting.append(((*prefix, symbol), child))
    assert prefixes.keys() == tokens_below(items).keys()
    assert leaves == {position: position for position in range(len(items))}
    assert len(prefixes) + len(leaves) == len(trie) == len(trie.children)


@given(vocabularies())
def test_every_mapping_is_consistent(items) -> None:
    trie = TokenCharacterTrie(items)
    for node, (children, jump) in enumerate(zip(trie.children, trie.jump, strict=True)):
        assert jump.tolist() == sorted(children.values())
        assert jump.dtype == np.int32
        for symbol, child in children.items():
            ends = isinstance(symbol, tuple) and symbol[0] is None
            added = [] if ends else [symbol]
            assert trie.node2prefix[child] == trie.node2prefix[node] + added
    assert trie.node2prefix[trie.root] == []
    assert {leaf: word for word, leaf in trie.word2leaf.items()} == trie.leaf2word
    for position, leaf in trie.idx_to_leaf.tolist():
        item = items[position]
        key = (item.byte_string, item.token_id) if isinstance(item, Token) else item
        assert trie.word2leaf[key] == leaf
        assert trie.leaf2word[leaf] == key
    done = set(range(len(items)))
    for node in trie.ordering.tolist():
        assert done.issuperset(trie.jump[node].tolist())
        done.add(node)
    assert done == set(range(len(trie)))


@given(vocabularies())
def test_navigation_computes_no_mappings(items) -> None:
    trie = TokenCharacterTrie(items)
    below = tokens_below(items)
    for prefix, ids in below.items():
        node = trie.node_of(prefix)
        assert trie.prefix_of(node) == list(prefix)
        assert trie.path(prefix)[-1] == node
        assert sorted(trie.tokens_below(node)) == ids
        lo, hi = trie.interval(node)
        assert hi - lo == len(ids)
        here = [i for i in ids if symbols_of(items[i]) == prefix]
        assert sorted(trie.tokens_at(node)) == here
        assert all(trie.parent(leaf) == node for leaf in here)
        symbols = trie.child_symbols(node)
        assert set(symbols) == {p[-1] for p in below if p[:-1] == prefix and p != ()}
        for symbol, child in zip(symbols, trie.child_prefixes(node), strict=True):
            assert trie.child(node, symbol) == child
            assert trie.parent(child) == node
        assert trie.child(node, "no such symbol") is None
        assert trie.node_of((*prefix, "no such symbol")) is None
    assert not {"children", "jump", "node2prefix", "word2leaf"} & vars(trie).keys()


def test_nodes_that_are_not_there() -> None:
    trie = TokenCharacterTrie([Token(0, b"ac"), EOS])
    assert trie.parent(trie.root) is None
    assert trie.child(trie.root, 98) is None
    assert trie.child(trie.root, 255) is None
    assert trie.child(trie.root, EOS) == trie.node_of([EOS])
    assert trie.path(b"ax") == [trie.root, trie.node_of(b"a")]
    assert trie.child_symbols(0) == []
    assert trie.tokens_at(0).tolist() == [0]
    assert trie.is_leaf(1)
    assert not trie.is_leaf(2)
    assert trie.prefix_of(1) == [EOS]
    for call in (trie.interval, trie.child_prefixes, trie.prefix_of):
        with pytest.raises(IndexError, match=f"nodes are 0 to {trie.root}"):
            call(len(trie))
    with pytest.raises(IndexError, match=f"nodes are 0 to {trie.root}"):
        trie.children[len(trie)]
    assert trie.children[-1] == trie.children[trie.root]
    assert trie.node2prefix[1:3] == [[EOS], [97, 99]]


@given(vocabularies())
def test_node2prefix_is_a_mapping_of_all_nodes(items) -> None:
    trie = TokenCharacterTrie(items)
    prefixes = trie.node2prefix
    expected = {node: trie.prefix_of(node) for node in range(len(trie))}
    assert isinstance(prefixes, Mapping)
    assert dict(prefixes) == expected == prefixes
    assert list(prefixes) == list(prefixes.keys()) == list(expected)
    assert list(prefixes.values()) == list(expected.values())
    assert list(prefixes.items()) == list(expected.items())
    assert prefixes.get(np.int32(trie.root)) == []
    for absent in (-1, len(trie), "a", None, 0.5):
        assert absent not in prefixes
        assert prefixes.get(absent) is None
        with pytest.raises(KeyError, match=f"nodes are 0 to {trie.root}"):
            prefixes[absent]


def test_a_subclass_labels_the_edges_to_leaves() -> None:
    class ById(TokenCharacterTrie):
        def leaf_label(self, leaf):
            return self.decode[leaf].token_id

    trie = ById([Token(7, b"a"), Token(3, b"ab"), Token(5, b"a")])
    a = trie.children[trie.root][97]
    assert trie.children[a] == {(None, 7): 0, (None, 5): 2, 98: trie.node_of(b"ab")}
    assert trie.children[trie.node_of(b"ab")] == {(None, 3): 1}


def test_a_trie_says_what_it_is_in_a_line() -> None:
    trie = TokenCharacterTrie(["a", "ab"])
    assert repr(trie) == "<TokenCharacterTrie: 2 tokens, 5 nodes>"
    assert repr(trie.layout) == "<TrieLayout: 2 tokens, 5 nodes>"
    assert repr(trie.children) == "<entries of 5 nodes, computed when read>"
    front = AsyncTokenCharacterTrie(trie)
    assert repr(front) == "<AsyncTokenCharacterTrie of <TokenCharacterTrie: 2 tokens, 5 nodes>>"


def test_a_vocabulary_object_will_do() -> None:
    tokens = [Token(0, b"a")]
    trie = TokenCharacterTrie(Vocabulary(None, tokens, ["a"]))
    assert trie.decode == tokens


@pytest.mark.parametrize(
    "items",
    [[b"a", b"b", b"a"], [Token(1, b"a"), Token(1, b"a")], [EOS, b"", EOS], [b"", b""]],
)
def test_an_item_that_occurs_twice_is_refused(items) -> None:
    with pytest.raises(
        VocabularyError, match=r"^Duplicate word in vocabulary: .* are both .*distinct ids"
    ):
        TokenCharacterTrie(items)


def test_tokens_of_one_id_with_other_bytes_are_other_items() -> None:
    trie = TokenCharacterTrie([Token(1, b"a"), Token(1, b"b"), b"a"])
    assert trie.word2leaf == {(b"a", 1): 0, (b"b", 1): 1, b"a": 2}


def test_a_node_takes_less_than_64_bytes_before_mappings_are_read() -> None:
    rng = np.random.default_rng(0)
    words = {bytes(rng.integers(97, 105, size=rng.integers(1, 9))) for _ in range(20_000)}
    tokens = [Token(position, word) for position, word in enumerate(sorted(words))]
    ws = np.ones(len(tokens))
    tracemalloc.start()
    trie = TokenCharacterTrie(tokens, compiled=False)
    trie.weight_sum(ws)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 64 * len(trie)


def test_integers_of_numpy_are_symbols_like_others() -> None:
    trie = TokenCharacterTrie([(np.int64(1), np.uint8(2)), (1, 3)])
    for symbol in (1, np.int64(1)):
        assert trie.node_of((symbol,)) == trie.children[trie.root][symbol]
        assert len(trie.tokens_below(trie.node_of((symbol,)))) == 2


def test_a_mapping_that_a_thread_computes_during_a_fork_can_be_read_in_the_forked_process() -> (
    None
):
    program = textwrap.dedent("""
        import os, signal, sys, threading
        from genlm import TokenCharacterTrie

        class Slow(str):
            waits = False

            @property
            def token_id(self):
                if Slow.waits:
                    began.set()
                    go_on.wait()

        began, go_on = threading.Event(), threading.Event()
        trie = TokenCharacterTrie([Slow("a"), Slow("ab")])
        Slow.waits = True
        thread = threading.Thread(target=lambda: trie.word2leaf)
        thread.start()
        began.wait()
        child = os.fork()
        if child:
            go_on.set()
            thread.join()
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        signal.alarm(100)  # ends the process should it hang
        Slow.waits = False
        print(len(trie.word2leaf), len(TokenCharacterTrie(["x"]).word2leaf))
    """)
    # Python 3.12 warns of forks in a program with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = run_program(*command, timeout=240)
    assert (done.stdout, done.stderr) == ("2 1\n", "")
