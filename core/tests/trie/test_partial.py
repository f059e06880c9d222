"""Partial evaluation agrees with enumeration and reads no more than it must."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm import Token, TokenCharacterTrie, WeightsError
from genlm.testing.strategies import vocabularies
from genlm.testing.trie_oracle import EXACT, tokens_below

OPERATIONS = sorted(EXACT)


@pytest.mark.parametrize("operation", OPERATIONS)
@given(items=vocabularies(other_items=True), data=st.data())
def test_any_nodes_in_any_order_agree_with_enumeration(operation, items, data) -> None:
    trie = TokenCharacterTrie(items)
    nodes = data.draw(st.lists(st.integers(0, len(trie) - 1), max_size=30))
    ws = np.random.default_rng(len(items)).normal(size=(3, len(items)))
    ws[0, 0] = -np.inf if operation != "sum" else 0.0
    values = getattr(trie, f"partial_{operation}")(ws, nodes)
    assert values.shape == (3, len(nodes))
    below = tokens_below(items)
    for column, node in enumerate(nodes):
        ids = [node] if trie.is_leaf(node) else below[tuple(trie.prefix_of(node))]
        for row in range(3):
            expected = EXACT[operation](ws[row, ids].tolist())
            assert values[row, column] == pytest.approx(expected, rel=1e-14, abs=1e-14)


def tokens(*words: bytes) -> list[Token]:
    return [Token(position, word) for position, word in enumerate(words)]


VOCAB = tokens(b"", b"a", b"ab", b"abc", b"abd", b"b", b"ba", b"a")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_children_and_paths_have_the_values_of_the_whole(operation) -> None:
    trie = TokenCharacterTrie(VOCAB)
    ws = np.log(np.random.default_rng(1).dirichlet(np.ones(len(VOCAB)), size=2))
    whole = getattr(trie, f"batch_weight_{operation}")(ws)
    partial = getattr(trie, f"partial_{operation}")
    for node in range(len(trie)):
        children = trie.child_prefixes(node)
        np.testing.assert_allclose(
            partial(ws, children), whole[:, list(children)], rtol=1e-14, atol=1e-15
        )
    path = trie.path(b"abd")
    assert len(path) == 4
    np.testing.assert_allclose(partial(ws, path), whole[:, path], rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(partial(ws[0], path), whole[0, path], rtol=1e-14, atol=1e-15)


def test_only_weights_below_the_nodes_are_read() -> None:
    trie = TokenCharacterTrie(VOCAB)
    ws = np.full(len(VOCAB), np.nan)
    ws[[3, 4]] = 1, 2
    node = trie.node_of(b"ab")
    assert trie.partial_sum(ws, trie.child_prefixes(node)).tolist() == [1, 2]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_are_reduced_a_part_at_a_time(operation, monkeypatch) -> None:
    monkeypatch.setattr("genlm.core.trie.partial._WEIGHTS_AT_ONCE", 2**13)
    trie = TokenCharacterTrie(VOCAB)
    ws = np.random.default_rng(0).random((2**14 + 1, len(VOCAB)))
    expected = getattr(trie, f"batch_weight_{operation}")(ws)[:, [trie.root]]
    tracemalloc.start()
    try:
        values = getattr(trie, f"partial_{operation}")(ws, [trie.root])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(values, expected, rtol=1e-14)
    assert peak - values.nbytes < ws.nbytes / 2


def test_a_frontier_may_mix_nested_repeated_and_distant_nodes() -> None:
    trie = TokenCharacterTrie(VOCAB)
    ws = np.arange(8.0)
    nodes = [trie.node_of(b"ba"), trie.root, trie.node_of(b"ab"), trie.node_of(b"ba"), 4]
    assert trie.partial_sum(ws, np.array(nodes)).tolist() == [6, 28, 9, 6, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_torch_weights_of_every_dtype(dtype) -> None:
    trie = TokenCharacterTrie(VOCAB)
    ws = torch.arange(8).to(dtype)
    values = trie.partial_sum(ws, [trie.root, 3], returns="torch")
    assert values.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert values.tolist() == [28, 3]
    assert trie.partial_max(torch.stack([ws, -ws]), [trie.root]).tolist() == [[7], [0]]


def test_no_nodes_give_no_values() -> None:
    trie = TokenCharacterTrie(VOCAB)
    assert trie.partial_sum(np.ones(8), []).shape == (0,)
    assert trie.partial_sum(np.ones((5, 8)), trie.child_prefixes(0)).shape == (5, 0)


@pytest.mark.parametrize("node", [-1, 10_000])
def test_an_unknown_node_is_named(node) -> None:
    trie = TokenCharacterTrie(VOCAB)
    with pytest.raises(IndexError, match=rf"no node {node}; the trie's nodes are 0 to"):
        trie.partial_sum(np.ones(8), [trie.root, node])


def test_weights_that_do_not_fit_are_described() -> None:
    trie = TokenCharacterTrie(VOCAB)
    with pytest.raises(WeightsError, match=r"shape \(8,\) or \(rows, 8\); found shape \(7,\)"):
        trie.partial_sum(np.ones(7), [trie.root])
