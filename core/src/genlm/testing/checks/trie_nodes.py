"""Checks of the values of selected nodes: children, a path, a frontier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from genlm import Token, WeightsError
from genlm.testing.check import expect, trie_check
from genlm.testing.strategies import tokens, vocabularies
from genlm.testing.trie_fixture import TrieFixture, nodes_by_symbols, oracle_nodes

OPERATIONS = ("sum", "max", "logsumexp")
WORDS = tokens(b"", b"a", b"ab", b"abc", b"abd", b"b", b"ba", b"a", b"\xff")


@trie_check(member="partial_sum")
def some_nodes_are_exact(fixture: TrieFixture) -> None:
    """The values of selected nodes, in any order and for several rows, are exact."""

    def holds(vocabulary: Sequence[Token], data: st.DataObject) -> None:
        trie = fixture.build(vocabulary)
        rows = fixture.weights(3 * len(vocabulary), salt=len(vocabulary), low=-8).reshape(3, -1)
        for case, nodes in _selections(trie, data).items():
            for operation in OPERATIONS:
                weights = rows.abs() if operation == "sum" else rows
                _check_rows(fixture, trie, weights, nodes, operation)
            fixture.saw(case, bool(nodes) or case == "no nodes")

    fixture.for_all(holds, vocabulary=vocabularies(max_size=12), data=st.data())
    trie = fixture.build(WORDS)
    _check_rows(fixture, trie, torch.ones(2, len(WORDS)), [0, trie.root, 0], "sum")


def _selections(trie: Any, data: st.DataObject) -> dict[str, list[int]]:
    """Selections of nodes, by kind."""
    paths = nodes_by_symbols(trie)
    node, end = (data.draw(st.sampled_from(sorted(paths, key=len))) for _ in range(2))
    frontier = data.draw(st.lists(st.integers(0, len(trie) - 1), max_size=10))
    return {
        "children of a node": _children(trie, paths[node]),
        "a path": [paths[end[:length]] for length in range(len(end) + 1)],
        "a frontier": frontier,
        "a node twice": [*frontier, *frontier],
        "no nodes": [],
    }


def _children(trie: Any, node: int) -> list[int]:
    """The children of a node: leaves, and the nodes of longer prefixes."""
    leaves = [] if trie.is_leaf(node) else trie.tokens_at(node).tolist()
    return [*leaves, *trie.child_prefixes(node)]


def _check_rows(
    fixture: TrieFixture, trie: Any, rows: torch.Tensor, nodes: list[int], operation: str
) -> None:
    """Check several rows together, and the first row alone."""
    together = fixture.reduce_nodes(trie, rows, np.array(nodes, dtype=np.int64), operation)
    shape, expected = tuple(together.shape), (len(rows), len(nodes))
    expect(shape == expected, f"results of shape {expected}", shape, nodes=nodes)
    for values, row in zip(together, rows, strict=True):
        fixture.check_values(trie, values, row, operation, nodes)
    alone = fixture.reduce_nodes(trie, rows[0], nodes, operation)
    fixture.check_values(trie, alone, rows[0], operation, nodes, rows=1)


@trie_check(member="partial_sum")
def weights_elsewhere_change_nothing(fixture: TrieFixture) -> None:
    """Weights of tokens that are not below the nodes have no effect, even if they are NaN."""
    trie = fixture.build(WORDS)
    nodes = oracle_nodes(trie)
    for elsewhere in (np.nan, np.inf):
        for node, oracle_node in nodes.items():
            children = [node, *_children(trie, node)]
            ws = np.full(len(WORDS), elsewhere, dtype=np.float32)
            ws[oracle_node.below] = fixture.weights(len(oracle_node.below), salt=node).numpy()
            for operation in OPERATIONS:
                values = fixture.reduce_nodes(trie, ws, children, operation)
                fixture.check_values(trie, values, ws, operation, children, elsewhere=elsewhere)


@trie_check(member="partial_sum")
def wrong_nodes_are_refused(fixture: TrieFixture) -> None:
    """Nodes outside the trie raise `IndexError`, invalid weights `WeightsError`."""
    trie = fixture.build(WORDS)
    ws = fixture.weights(len(WORDS)).numpy()
    wrong: dict[str, tuple[Any, list[int], type[Exception]]] = {
        "before the first": (ws, [trie.root, -1], IndexError),
        "after the last": (ws, [len(trie), 0], IndexError),
        "too short": (ws[:-1], [trie.root], WeightsError),
        "too long": (np.append(ws, 0.0), [trie.root], WeightsError),
    }
    for case, (weights, nodes, error) in wrong.items():
        for operation in OPERATIONS:
            call = fixture.reduce_nodes, trie, weights, nodes, operation
            fixture.expect_error(error, *call, case=case, operation=operation)
