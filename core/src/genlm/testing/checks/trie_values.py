"""Checks that every node has the exact value, computed by brute force in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from genlm.testing.check import expect, trie_check
from genlm.testing.strategies import tokens, vocabularies
from genlm.testing.trie_fixture import TrieFixture

WEIGHTS: dict[str, st.SearchStrategy[float]] = {
    "sum": st.sampled_from((0.0, 0.25, 0.5, 1.0)) | st.floats(0, 1, width=32),
    "max": st.floats(-1e4, 0, width=32) | st.sampled_from([-np.inf, -1.0, -0.5, 0.0, 2.0]),
    "logsumexp": st.floats(-1e4, 0, width=32) | st.sampled_from([-np.inf, -1e4, -1.0, 0.0]),
}
EDGES: dict[str, list[list[float]]] = {
    "sum": [[0.0, 0.0, 0.0], [1.0, 1e-30, 1e-31], [1e-30, 1e-31, 1.0]],
    "max": [[-1.0, -2.0, -3.0], [0.0, -1.0, -np.inf], [-np.inf] * 3],
    "logsumexp": [[-1e4] * 3, [0.0, -1e4, -9990.0], [-np.inf] * 3, [-np.inf, -5.0, 0.0]],
}
"""Weights of the tokens ab, a and b, such as those beside a peak, which keep their digits."""


@trie_check()
def values_are_exact(fixture: TrieFixture) -> None:
    """The value of every node is the sum, maximum or log-sum-exp of the weights below it."""

    def holds(operation: str, vocabulary: Sequence[Any], weights: Sequence[float]) -> None:
        trie, ws = fixture.build(vocabulary), np.array(weights, dtype=np.float32)
        fixture.check_values(trie, fixture.reduce(trie, ws, operation), ws, operation)
        fixture.saw("shared prefix", len(trie) < sum(len(item) + 1 for item in vocabulary))

    def draw_weights(operation: str, vocabulary: Sequence[Any], data: st.DataObject) -> None:
        count = len(vocabulary)
        weights = st.lists(WEIGHTS[operation], min_size=count, max_size=count)
        holds(operation, vocabulary, data.draw(weights))

    for operation, rows in EDGES.items():
        for row in rows:
            holds(operation, tokens(b"ab", b"a", b"b"), row)
        fixture.for_all(
            functools.partial(draw_weights, operation),
            vocabulary=vocabularies(),
            data=st.data(),
        )


@trie_check()
def large_vocabularies_lose_no_digits(fixture: TrieFixture) -> None:
    """Sums of thousands of equal weights are as exact as sums of a few, in float32 too."""
    pairs = [bytes([first, second]) for first in range(64) for second in range(256)]
    count = len(pairs)
    trie = fixture.build(tokens(*pairs))
    weights = np.full(count, 0.1, dtype=np.float32)
    exact = float(weights[0]) * count
    for operation, ws, expected in (
        ("sum", weights, exact),
        ("logsumexp", np.zeros(count, dtype=np.float32), float(np.log(count))),
    ):
        value = float(fixture.reduce(trie, ws, operation)[trie.root])
        expect(
            abs(value - expected) <= 2e-6 * expected,
            f"{operation} {expected} at the root of {count} equal weights, within 2e-6 of it",
            value,
        )
    single = fixture.reduce(trie, torch.from_numpy(weights), "sum")
    expect(len(single) == len(trie), f"{len(trie)} values", len(single))
