"""Tries as published: classes, dtypes, names of backends."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given

import genlm
from genlm.backend import (
    AsyncTokenCharacterTrie,
    ParallelTokenCharacterTrie,
    Token,
    TokenCharacterTrie,
)
from genlm.backend.trie.views import TrieViews
from genlm.testing.strategies import EOS, vocabularies
from genlm.testing.trie_oracle import symbols_of, tokens_below

TOKENS = [Token(0, b"a"), Token(1, b"ab"), Token(2, b"ab"), Token(3, b"b")]
WEIGHTS = np.array([0.1, 0.2, 0.3, 0.4])


def trie_over(items):
    """A trie of any items, whose positions are the labels of edges to leaves."""
    return TrieViews(items)


def expected(trie, weights, reduce):
    """By brute force: the weights of the tokens whose leaf is below each node."""
    below = []
    for node in range(len(trie)):
        leaves, waiting = [], [node]
        while waiting:
            at = waiting.pop()
            children = trie.children[at].values()
            waiting.extend(children)
            if not children:
                leaves.append(at)
        below.append(reduce(weights[i] for i, leaf in trie.idx_to_leaf if leaf in leaves))
    return np.array(below)


@pytest.mark.parametrize("trie_class", [TokenCharacterTrie, ParallelTokenCharacterTrie])
@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_weights_of_prefixes(trie_class, kind):
    trie = trie_class(decode=TOKENS)
    weights = kind(WEIGHTS)
    for found, reduce in ((trie.weight_sum, sum), (trie.weight_max, max)):
        np.testing.assert_allclose(found(weights), expected(trie, WEIGHTS, reduce))
    for found, reduce in ((trie.batch_weight_sum, sum), (trie.batch_weight_max, max)):
        rows = found([weights, 2 * weights])
        assert isinstance(rows, np.ndarray)
        np.testing.assert_allclose(rows[1], 2 * expected(trie, WEIGHTS, reduce))


def test_the_published_views(model):
    trie = TokenCharacterTrie(TOKENS)
    a = trie.children[trie.root][ord("a")]
    assert trie.children[a][None, 0] == trie.word2leaf[b"a", 0]
    assert trie.leaf2word[trie.word2leaf[b"ab", 2]] == (b"ab", 2)
    assert trie.node2prefix[trie.children[a][ord("b")]] == list(b"ab")
    assert set(trie.jump[a]) == set(trie.children[a].values())
    assert trie.ordering[-1] == trie.root


@pytest.mark.parametrize("trie_class", [TokenCharacterTrie, ParallelTokenCharacterTrie])
def test_views_of_nodes_are_the_published_mappings(trie_class):
    trie = trie_class(TOKENS)
    for view in (trie.node2prefix, trie.leaf2word, trie.word2leaf):
        assert isinstance(view, Mapping)
        assert dict(view.items()) == dict(zip(view.keys(), view.values(), strict=True)) == view
        assert view.get("absent") is None
    assert list(trie.node2prefix) == list(range(len(trie)))
    for node, prefix in trie.node2prefix.items():
        for edge, child in trie.children[node].items():
            is_leaf = isinstance(edge, tuple)
            assert trie.node2prefix[child] == prefix + ([] if is_leaf else [edge])
            assert (child in trie.leaf2word) == is_leaf


@pytest.mark.parametrize("trie_class", [TokenCharacterTrie, ParallelTokenCharacterTrie])
def test_edges_to_leaves_of_a_part_of_a_vocabulary_carry_token_ids(trie_class):
    end = "end"  # an item that is no token and has other letters
    trie = trie_class(
        [Token(7, b"ab"), Token(3, b"a"), Token(9, b"ab"), (end,), genlm.Token(0, b"")]
    )
    a = trie.children[trie.root][ord("a")]
    ab = trie.children[a][ord("b")]
    assert trie.children[trie.root].keys() == {(None, 0), ord("a"), end}
    assert trie.children[a] == {(None, 3): trie.word2leaf[b"a", 3], ord("b"): ab}
    assert trie.children[ab] == {
        (None, 7): trie.word2leaf[b"ab", 7],
        (None, 9): trie.word2leaf[b"ab", 9],
    }
    assert trie.children[trie.children[trie.root][end]] == {(None, 3): 3}


def test_plain_bytes_keep_a_leaf_beside_a_token_whose_id_is_their_position():
    with pytest.warns(DeprecationWarning, match="plain bytes"):
        trie = TokenCharacterTrie([b"a", Token(0, b"a"), b"b"])
    root = trie.children[trie.root]
    assert trie.children[root[ord("a")]] == {(None, b"a"): 0, (None, 0): 1}
    assert trie.children[root[ord("b")]] == {(None, 2): 2}


@pytest.mark.parametrize("device", ["cpu", None])
def test_a_parallel_trie_has_a_device(device):
    trie = ParallelTokenCharacterTrie(TOKENS, device=device)
    assert trie.device == ("cuda" if torch.cuda.is_available() and not device else "cpu")


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, list])
def test_results_of_a_sequential_trie_are_float64_as_published(kind):
    trie, weights = TokenCharacterTrie(TOKENS), WEIGHTS.astype(np.float32)
    sums = expected(trie, weights.astype(np.float64), sum)
    largest = expected(trie, weights.astype(np.float64), max)
    rows = [kind(weights)] * 2
    for found in (trie.weight_sum(rows[0]), *trie.batch_weight_sum(rows)):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, sums, rtol=1e-15)
    for found in (trie.weight_max(rows[0]), *trie.batch_weight_max(rows)):
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, largest)

    async def requested():
        async_trie = AsyncTokenCharacterTrie(trie)
        found = await async_trie.weight_sum(rows[0])
        await async_trie.cleanup()
        return found

    np.testing.assert_allclose(asyncio.run(requested()), sums, rtol=1e-15)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, list])
def test_results_of_a_parallel_trie_are_float32_as_published(kind):
    trie = ParallelTokenCharacterTrie(TOKENS, device="cpu")
    weights = kind(WEIGHTS)
    sums = expected(trie, WEIGHTS.astype(np.float32).astype(np.float64), sum)
    for found in (trie.weight_sum(weights), *trie.batch_weight_sum([weights] * 2)):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, sums.astype(np.float32))


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("dtype", [np.int64, np.bool_])
def test_results_of_integers_have_the_published_dtypes(kind, dtype):
    weights = kind(np.arange(len(TOKENS)).astype(dtype))
    parallel = ParallelTokenCharacterTrie(TOKENS, device="cpu")
    assert parallel.weight_sum(weights).dtype == np.float32
    assert parallel.weight_max(weights).dtype == np.float32
    assert TokenCharacterTrie(TOKENS).weight_sum(weights).dtype == np.float64


def test_a_parallel_trie_is_a_token_character_trie():
    trie = ParallelTokenCharacterTrie(TOKENS, device="cpu")
    assert isinstance(trie, TokenCharacterTrie)
    assert isinstance(trie, type(genlm.get_trie("cuda")(TOKENS)))
    with pytest.raises(ValueError, match="expected 'cpu', 'cuda' or None"):
        ParallelTokenCharacterTrie(TOKENS, device="tpu")


def test_without_its_plugin_a_trie_for_the_gpu_says_what_to_install(monkeypatch):
    monkeypatch.setattr("genlm.backend.trie.parallel._DeviceTrie", genlm.TokenCharacterTrie)
    with pytest.raises(ImportError, match=r"pip install genlm-trie-cuda, or .* in a clone"):
        ParallelTokenCharacterTrie(TOKENS, device="cuda")


def test_a_trie_is_pickled_after_a_mapping_was_read():
    trie = TokenCharacterTrie([Token(0, b"a"), Token(1, b"ab")])
    children = list(trie.children)
    assert list(pickle.loads(pickle.dumps(trie)).children) == children


def test_a_trie_is_drawn():
    trie = TokenCharacterTrie(TOKENS)
    assert "digraph" in trie.visualize().source
    assert "0.3" in trie.visualize(trie.weight_sum(WEIGHTS)).source
    with pytest.raises(ValueError, match="one weight for each of the"):
        trie.visualize(WEIGHTS)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("sequential", TokenCharacterTrie), ("parallel", ParallelTokenCharacterTrie)],
)
def test_an_asynchronous_trie_is_made_of_a_vocabulary(backend, kind):
    async def main():
        trie = AsyncTokenCharacterTrie.from_vocab(TOKENS, backend=backend)
        assert type(trie.trie) is kind
        trie.start()
        sums, tops = await asyncio.gather(trie.weight_sum(WEIGHTS), trie.weight_max(WEIGHTS))
        await trie.cleanup()
        again = await trie.weight_sum(WEIGHTS)  # starts afresh
        trie.shutdown()
        return trie.trie, sums, tops, again

    trie, sums, tops, again = asyncio.run(main())
    np.testing.assert_allclose(sums, expected(trie, WEIGHTS, sum))
    np.testing.assert_allclose(tops, expected(trie, WEIGHTS, max))
    np.testing.assert_array_equal(sums, again)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="expected one of sequential, parallel"):
        AsyncTokenCharacterTrie.from_vocab(TOKENS, backend="magic")


@given(vocabularies(other_items=True))
def test_walking_children_from_the_root_meets_every_prefix_and_token(items):
    trie = trie_over(items)
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


@given(vocabularies(other_items=True))
def test_edges_are_in_the_order_in_which_the_published_trie_inserts_them(items):
    edges = {}
    for position, item in enumerate(items):
        prefix = ()
        for symbol in symbols_of(item):
            edges.setdefault(prefix, {})[symbol] = None
            prefix = (*prefix, symbol)
        edges.setdefault(prefix, {})[None, position] = None
    trie = trie_over(items)
    for prefix, of_prefix in edges.items():
        assert list(trie.children[trie.node_of(prefix)]) == list(of_prefix)


@given(vocabularies(other_items=True))
def test_every_mapping_is_consistent(items):
    trie = trie_over(items)
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
        key = (item.byte_string, item.token_id) if isinstance(item, genlm.Token) else item
        assert trie.word2leaf[key] == leaf
        assert trie.leaf2word[leaf] == key
    done = set(range(len(items)))
    for node in trie.ordering.tolist():
        assert done.issuperset(trie.jump[node].tolist())
        done.add(node)
    assert done == set(range(len(trie)))


@given(vocabularies(other_items=True))
def test_node2prefix_is_a_mapping_of_all_nodes(items):
    trie = trie_over(items)
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


def test_nodes_that_are_not_there():
    trie = TokenCharacterTrie([Token(0, b"ac"), EOS])
    with pytest.raises(IndexError, match=f"nodes are 0 to {trie.root}"):
        trie.children[len(trie)]
    assert trie.children[-1] == trie.children[trie.root]
    assert trie.node2prefix[1:3] == [[EOS], [97, 99]]
    assert repr(trie.children) == f"<entries of {len(trie)} nodes, computed when read>"
