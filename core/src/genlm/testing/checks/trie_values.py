"""Checks that every node has the exact value, computed by brute force in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from genlm.testing.check import expect, trie_check
from genlm.testing.strategies import tokens, vocabularies
from genlm.testing.trie_fixture import TrieFixture

ZERO_AT_FIRST = (0.0, 0.25, 0.5, 1.0)


def _drawn(data: st.DataObject, count: int, values: st.SearchStrategy[float]) -> Any:
    weights = data.draw(st.lists(values, min_size=count, max_size=count))
    return np.array(weights, dtype=np.float32)


@trie_check(cases=("shared prefix", "zero"))
def sums_are_exact(fixture: TrieFixture) -> None:
    """The value of every node is the sum of the weights of the tokens below it."""
    weights = st.sampled_from(ZERO_AT_FIRST) | st.floats(0, 1, width=32)

    def holds(vocabulary: Sequence[Any], data: st.DataObject) -> None:
        trie = fixture.build(vocabulary)
        ws = _drawn(data, len(vocabulary), weights)
        fixture.check_values(trie, fixture.reduced(trie, ws, "sum"), ws, "sum")
        fixture.saw("shared prefix", len(trie) < sum(len(item) + 1 for item in vocabulary))
        fixture.saw("zero", bool((ws == 0).any()))

    fixture.for_all(holds, vocabulary=vocabularies(), data=st.data())


@trie_check(cases=("all negative", "zero", "minus infinity"))
def maxima_are_exact(fixture: TrieFixture) -> None:
    """The value of every node is the largest weight below it, negative weights included."""
    weights = st.floats(-1e4, 0, width=32) | st.sampled_from([-np.inf, -1.0, -0.5, 0.0, 2.0])

    def holds(vocabulary: Sequence[Any], ws: Any) -> None:
        trie = fixture.build(vocabulary)
        fixture.check_values(trie, fixture.reduced(trie, ws, "max"), ws, "max")
        fixture.saw("all negative", bool((ws < 0).all()))
        fixture.saw("zero", bool((ws == 0).any()))
        fixture.saw("minus infinity", bool(np.isneginf(ws).any()))

    edges = tokens(b"ab", b"a", b"b")
    for row in ([-1.0, -2.0, -3.0], [0.0, -1.0, -np.inf], [-np.inf] * 3):
        holds(edges, np.array(row, dtype=np.float32))
    fixture.for_all(
        lambda vocabulary, data: holds(vocabulary, _drawn(data, len(vocabulary), weights)),
        vocabulary=vocabularies(),
        data=st.data(),
    )


@trie_check(cases=("log of zero", "nothing below", "far below zero"))
def logsumexps_are_exact(fixture: TrieFixture) -> None:
    """The value of every node is the log-sum-exp of the log weights below it."""
    weights = st.floats(-1e4, 0, width=32) | st.sampled_from([-np.inf, -1e4, -1.0, 0.0])

    def holds(vocabulary: Sequence[Any], ws: Any) -> None:
        trie = fixture.build(vocabulary)
        fixture.check_values(trie, fixture.reduced(trie, ws, "logsumexp"), ws, "logsumexp")
        fixture.saw("log of zero", bool(np.isneginf(ws).any()))
        fixture.saw("nothing below", bool(np.isneginf(ws).all()))
        fixture.saw("far below zero", bool((ws < -1000).any()))

    edges = tokens(b"ab", b"a", b"b")
    for row in ([-1e4, -1e4, -1e4], [0.0, -1e4, -9990.0], [-np.inf] * 3, [-np.inf, -5.0, 0]):
        holds(edges, np.array(row, dtype=np.float32))
    fixture.for_all(
        lambda vocabulary, data: holds(vocabulary, _drawn(data, len(vocabulary), weights)),
        vocabulary=vocabularies(),
        data=st.data(),
    )


@trie_check(cases=("sum", "logsumexp", "all but nothing on one token"))
def peaked_distributions_keep_their_tails(fixture: TrieFixture) -> None:
    """When one token has all the mass but 1e-30, the other nodes keep their precision."""
    generator = fixture.generator()
    vocabulary = tokens(*(bytes(generator.integers(0, 4, size=5)) for _ in range(64)))
    trie = fixture.build(vocabulary)
    for peak in (0, 31, 63):
        weights = np.exp(generator.uniform(-85, -69, len(vocabulary))).astype(np.float32)
        weights[peak] = 1.0
        log_weights = generator.uniform(-1e4, -100, len(vocabulary)).astype(np.float32)
        log_weights[peak] = 0.0
        fixture.saw("all but nothing on one token", float(weights.sum()) == 1.0)
        for operation, ws in (("sum", weights), ("logsumexp", log_weights)):
            fixture.check_values(trie, fixture.reduced(trie, ws, operation), ws, operation)
            fixture.saw(operation)


@trie_check(cases=("equal weights", "many tokens"))
def large_vocabularies_lose_no_digits(fixture: TrieFixture) -> None:
    """Thousands of equal weights sum as exactly as a few, in float32 too."""
    count = 256 * 256 // 4
    pairs = [bytes([first, second]) for first in range(64) for second in range(256)]
    trie = fixture.build(tokens(*pairs))
    fixture.saw("many tokens", len(pairs) == count)
    weights = np.full(count, 0.1, dtype=np.float32)
    exact = float(weights[0]) * count
    for operation, ws, wanted in (
        ("sum", weights, exact),
        ("logsumexp", np.zeros(count, dtype=np.float32), float(np.log(count))),
    ):
        found = float(fixture.reduced(trie, ws, operation)[trie.root])
        expect(
            abs(found - wanted) <= 2e-6 * wanted,
            f"{operation} {wanted} at the root of {count} equal weights, within 2e-6 of it",
            found,
        )
        fixture.saw("equal weights")
    single = fixture.reduced(trie, torch.from_numpy(weights), "sum")
    expect(len(single) == len(trie), f"{len(trie)} values", len(single))
