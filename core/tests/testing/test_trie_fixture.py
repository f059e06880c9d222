"""The brute-force oracle of tries agrees with values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from genlm import get_trie
from genlm.testing import QUICK, CheckFailure, TrieTarget
from genlm.testing.strategies import EOS, SPECIAL, tokens
from genlm.testing.trie_fixture import TrieFixture, nodes_by_symbols
from genlm.testing.trie_oracle import EXACT, symbols_of, tokens_below


@pytest.fixture
def fixture() -> TrieFixture:
    return TrieFixture(TrieTarget(model="numpy", build=get_trie("numpy")), QUICK, seed=0)


def test_tokens_are_below_each_of_their_prefixes() -> None:
    positions = tokens_below(tokens(b"ab", b"a", b"", b"ab"))
    assert positions == {(): [0, 1, 2, 3], (97,): [0, 1, 3], (97, 98): [0, 3]}


def test_items_that_are_no_bytes_are_spelt_as_they_come() -> None:
    assert symbols_of(EOS) == (EOS,)
    assert symbols_of(("a", 1)) == ("a", 1)


@pytest.mark.parametrize(
    ("operation", "weights", "value"),
    [
        ("sum", [0.1] * 10, 1.0),
        ("max", [-2.0, -math.inf], -2.0),
        ("logsumexp", [-1e4, -1e4], -1e4 + math.log(2)),
        ("logsumexp", [-math.inf, -math.inf], -math.inf),
    ],
)
def test_reductions_are_exact(operation: str, weights: list[float], value: float) -> None:
    assert EXACT[operation](weights) == value


@pytest.mark.parametrize("vocabulary", SPECIAL.values(), ids=SPECIAL)
def test_every_token_has_a_leaf_and_every_prefix_a_node(fixture, vocabulary) -> None:
    trie = fixture.build(vocabulary)
    nodes = nodes_by_symbols(trie).values()
    assert all(map(trie.is_leaf, range(len(vocabulary))))
    assert [*range(len(vocabulary)), *sorted(nodes)] == list(range(len(trie)))


def test_a_wrong_value_is_reported_with_the_node_of_its_prefix(fixture) -> None:
    trie = fixture.build(tokens(b"ab", b"a", b"b"))
    ws = np.array([0.5, 0.25, 0.25], dtype=np.float32)
    values = trie.weight_sum(ws)
    fixture.check_values(trie, values, ws, "sum")
    values[nodes_by_symbols(trie)[97,]] += 1e-5
    with pytest.raises(CheckFailure, match=r"sum 0\.75 at the node of b'a'"):
        fixture.check_values(trie, values, ws, "sum")
