"""Every node's value against enumeration with `math.fsum`, whatever the weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from genlm import Token, TokenCharacterTrie
from genlm.testing.strategies import EOS, vocabularies
from genlm.testing.trie_oracle import EXACT, tokens_below

OPERATIONS = sorted(EXACT)
ULPS = {np.dtype(np.float32): 2**-23, np.dtype(np.float64): 2**-52}


def tokens(*words: bytes) -> list[Token]:
    return [Token(position, word) for position, word in enumerate(words)]


def exact(items, weights, operation) -> dict[tuple, float]:
    below = tokens_below(items)
    return {p: EXACT[operation]([weights[i] for i in ids]) for p, ids in below.items()}


def assert_exact(trie: TokenCharacterTrie, values, weights, operation) -> None:
    """Within three ulps of the exact value, at every prefix and leaf."""
    expected = exact(trie.decode, [float(w) for w in weights], operation)
    assert values.shape == (len(trie),)
    assert values[: len(weights)].tolist() == [float(w) for w in weights] or any(
        math.isnan(w) for w in weights
    )
    absolute = exact(trie.decode, [abs(float(w)) for w in weights], "sum")
    for prefix, value in expected.items():
        actual = float(values[trie.node_of(prefix)])
        if math.isfinite(value):
            scale = absolute[prefix] if operation == "sum" else max(abs(value), 1.0)
            tolerance = 0.0 if operation == "max" else 3 * ULPS[values.dtype] * scale
            assert abs(actual - value) <= tolerance, (prefix, actual, value)
        else:
            assert actual == value or (math.isnan(actual) and math.isnan(value)), prefix


finite = st.floats(-1e6, 1e6, width=32)
any_number = st.one_of(finite, st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan]))


@pytest.mark.parametrize("operation", OPERATIONS)
@given(data=st.data(), items=vocabularies(other_items=True))
def test_every_node_is_exact_for_any_weights(operation, data, items) -> None:
    weights = data.draw(st.lists(any_number, min_size=len(items), max_size=len(items)))
    trie = TokenCharacterTrie(items)
    for dtype in (np.float32, np.float64):
        ws = np.array(weights, dtype)
        before = ws.copy()
        values = getattr(trie, f"weight_{operation}")(ws)
        assert values.dtype == dtype
        assert_exact(trie, values, ws, operation)
        np.testing.assert_array_equal(ws, before)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_peaked_distribution_keeps_the_digits_of_its_tail(operation) -> None:
    rng = np.random.default_rng(0)
    words = {bytes(rng.choice(list(b"abc"), size=rng.integers(1, 9))) for _ in range(400)}
    trie = TokenCharacterTrie(tokens(*sorted(words)))
    ws = rng.random(len(words)) * 1e-30
    ws[7] = 1 - 1e-30
    if operation == "logsumexp":
        ws = np.log(ws)
    assert_exact(trie, getattr(trie, f"weight_{operation}")(ws), ws, operation)


def test_log_weights_far_below_their_neighbours_keep_their_digits() -> None:
    trie = TokenCharacterTrie(tokens(b"a", b"b", b"bc", b"bd", b"bde"))
    ws = np.array([0.0, -1e4, -1e4 - 1, -1e4 - 2, -np.inf])
    values = trie.weight_logsumexp(ws)
    assert_exact(trie, values, ws, "logsumexp")
    below_b = values[trie.node_of(b"b")] + 1e4
    assert below_b == pytest.approx(math.log(1 + math.exp(-1) + math.exp(-2)), rel=1e-11)


def test_a_distant_sibling_costs_no_digits() -> None:
    trie = TokenCharacterTrie(tokens(b"a", b"bc", b"bd"))
    ws = np.array([599.0, 0.1, 0.2])
    assert_exact(trie, trie.weight_logsumexp(ws), ws, "logsumexp")


def test_long_nested_tokens_are_summed_without_recursion() -> None:
    trie = TokenCharacterTrie(tokens(*(b"a" * length for length in range(1000))))
    ws = np.arange(1000.0)
    values = trie.weight_sum(ws)
    for length in range(1000):
        assert values[trie.node_of(b"a" * length)] == ws[length:].sum()


def test_the_largest_of_negative_weights_is_negative() -> None:
    trie = TokenCharacterTrie(tokens(b"a", b"ab"))
    assert trie.weight_max([-3.0, -2.0]).tolist() == [-3, -2, -2, -2, -2]


def test_duplicates_both_count_and_stay_apart() -> None:
    trie = TokenCharacterTrie(tokens(b"x", b"x"))
    assert trie.weight_sum([1.0, 2.0]).tolist() == [1, 2, 3, 3]


def test_other_items_count_like_tokens() -> None:
    trie = TokenCharacterTrie([*tokens(b"a"), EOS])
    values = trie.weight_sum([1.0, 2.0])
    assert values[trie.node_of([EOS])] == 2
    assert values[trie.root] == 3


@given(vocabularies(other_items=True), st.integers(0, 3))
@example(tokens(b""), 1)
def test_a_row_of_a_batch_is_that_row_alone(items, rows) -> None:
    trie = TokenCharacterTrie(items)
    ws = np.random.default_rng(rows).normal(size=(rows, len(items)))
    for operation in OPERATIONS:
        batch = getattr(trie, f"batch_weight_{operation}")(ws)
        assert batch.shape == (rows, len(trie))
        for row, alone in zip(batch, ws, strict=True):
            np.testing.assert_array_equal(row, getattr(trie, f"weight_{operation}")(alone))


def test_a_float32_sum_beyond_its_range_is_infinite() -> None:
    trie = TokenCharacterTrie(tokens(b"a", b"b"))
    ws = torch.full((2,), 3e38)
    assert trie.weight_sum(ws)[trie.root] == math.inf


def test_a_float32_sum_is_rounded_once() -> None:
    trie = TokenCharacterTrie(tokens(*(b"a%d" % i for i in range(1000))))
    ws = np.random.default_rng(0).random(1000, dtype=np.float32)
    values = trie.weight_sum(ws)
    for prefix, exactly in exact(trie.decode, ws.tolist(), "sum").items():
        assert values[trie.node_of(prefix)] == np.float32(exactly)
