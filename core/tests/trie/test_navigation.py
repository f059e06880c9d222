"""Navigation between nodes agrees with enumeration."""

from __future__ import annotations

import sys
import textwrap
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from programs import run_program

from genlm import (
    AsyncTokenCharacterTrie,
    Token,
    TokenCharacterTrie,
    Vocabulary,
    VocabularyError,
)
from genlm.testing.strategies import EOS, vocabularies
from genlm.testing.trie_oracle import symbols_of, tokens_below


@given(vocabularies(other_items=True))
def test_nodes_are_found_by_prefix_symbol_and_token(items) -> None:
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


def test_a_trie_says_what_it_is_in_a_line() -> None:
    trie = TokenCharacterTrie(["a", "ab"])
    assert repr(trie) == "<TokenCharacterTrie: 2 tokens, 5 nodes>"
    assert repr(trie.layout) == "<TrieLayout: 2 tokens, 5 nodes>"
    front = AsyncTokenCharacterTrie(trie)
    assert repr(front) == "<AsyncTokenCharacterTrie of <TokenCharacterTrie: 2 tokens, 5 nodes>>"


def test_a_vocabulary_object_will_do() -> None:
    tokens = [Token(0, b"a")]
    trie = TokenCharacterTrie(Vocabulary(None, tokens, ["a"]))
    assert trie.decode == tokens


@pytest.mark.parametrize(
    "items",
    [
        [b"a", b"b", b"a"],
        [Token(1, b"a"), Token(1, b"a")],
        [EOS, b"", EOS],
        [b"", b""],
        [[1, 2], (1, 2), [1, 2]],
        [bytearray(b"a"), b"a", bytearray(b"a")],
        [np.array([300]), [300], np.array([300])],
    ],
)
def test_an_item_that_occurs_twice_is_refused(items) -> None:
    with pytest.raises(
        VocabularyError, match=r"^Duplicate word in vocabulary: .* are both .*distinct ids"
    ):
        TokenCharacterTrie(items)


def test_a_node_takes_less_than_64_bytes() -> None:
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
        assert trie.node_of((symbol,)) == trie.child(trie.root, 1)
        assert len(trie.tokens_below(trie.node_of((symbol,)))) == 2


def test_tokens_of_one_id_with_other_bytes_are_other_items() -> None:
    trie = TokenCharacterTrie([Token(1, b"a"), Token(1, b"b"), b"a"])
    assert sorted(trie.tokens_at(trie.node_of(b"a"))) == [0, 2]
    assert trie.tokens_at(trie.node_of(b"b")).tolist() == [1]


def test_a_forked_process_computes_what_a_thread_was_computing() -> None:
    program = textwrap.dedent("""
        import os, signal, sys, threading
        from genlm import TokenCharacterTrie
        from genlm.core.trie.segment_tree import SegmentTree

        began, go_on, compute = threading.Event(), threading.Event(), SegmentTree.of

        def slow(*arguments):
            began.set()
            go_on.wait()
            return compute(*arguments)

        trie = TokenCharacterTrie(["a", "ab"])
        SegmentTree.of = slow
        thread = threading.Thread(target=lambda: trie.weight_sum([1, 2]))
        thread.start()
        began.wait()
        child = os.fork()
        if child:
            go_on.set()
            thread.join()
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        signal.alarm(100)  # ends the process should it hang
        SegmentTree.of = compute
        print(trie.weight_sum([1, 2])[-1], TokenCharacterTrie(["x"]).weight_sum([3])[-1])
    """)
    # Python 3.12 warns of forks in a program with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = run_program(*command, timeout=240)
    assert (done.stdout, done.stderr) == ("3.0 3.0\n", "")
