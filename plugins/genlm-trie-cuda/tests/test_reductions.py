"""Every node's value against enumeration with `math.fsum`, whatever the kernels."""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from genlm import Token, TokenCharacterTrie
from genlm.testing.strategies import EOS, vocabularies
from genlm.testing.trie_oracle import EXACT, tokens_below

OPERATIONS = sorted(EXACT)
ROUNDING = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
few = settings(  # the interpreter is slow
    max_examples=6 if os.environ.get("TRITON_INTERPRET") else 25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def tokens(*words: bytes) -> list[Token]:
    return [Token(position, word) for position, word in enumerate(words)]


def random_words(count: int, alphabet: bytes = b"abc", longest: int = 9) -> list[Token]:
    rng = np.random.default_rng(count)
    words = {
        bytes(rng.choice(list(alphabet), size=rng.integers(longest))) for _ in range(count)
    }
    return tokens(*words)


def reduced(trie, ws: torch.Tensor, operation: str) -> torch.Tensor:
    """The values of a row or rows; checks that the weights are as they were."""
    before = ws.clone()
    batch = "batch_" if ws.ndim == 2 else ""
    values = getattr(trie, f"{batch}weight_{operation}")(ws, returns="torch")
    assert torch.equal(torch.nan_to_num(ws), torch.nan_to_num(before))
    assert values.dtype == (torch.float64 if ws.dtype == torch.float64 else torch.float32)
    return values.cpu()


def assert_exact(trie, values: torch.Tensor, ws: torch.Tensor, operation: str) -> None:
    """Within the documented number of roundings of the exact value, at every node."""
    weights = ws.double().tolist()
    assert values.shape == (len(trie),)
    for prefix, positions in tokens_below(trie.decode).items():
        below = [weights[position] for position in positions]
        exact, value = EXACT[operation](below), float(values[trie.node_of(prefix)])
        if not math.isfinite(exact):
            assert value == exact or (math.isnan(value) and math.isnan(exact)), prefix
            continue
        depth = math.ceil(math.log2(len(below))) if below else 0
        error = (3 * depth + 2) * ROUNDING[values.dtype]
        scale = sum(map(abs, below)) if operation == "sum" else 2 * max(abs(exact), 1.0)
        assert abs(value - exact) <= (0 if operation == "max" else error * scale), prefix
    leaves = values[: len(weights)].double().tolist()
    assert all(a == b or math.isnan(b) for a, b in zip(leaves, weights, strict=True))


finite = st.floats(-6e4, 6e4, width=16)
any_number = st.one_of(finite, st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan]))


# The operations get weights of half precision as float32.
@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        *itertools.product(OPERATIONS, [torch.float32, torch.float64]),
        ("logsumexp", torch.bfloat16),
        ("max", torch.float16),
    ],
)
@few
@given(data=st.data(), items=vocabularies(other_items=True))
@example(data=None, items=tokens(b""))
@example(data=None, items=tokens(b"x", b"x", b""))
@example(data=None, items=[*tokens(b"\xff\x00"), EOS])
def test_every_node_is_exact_for_any_weights(build_small, operation, dtype, data, items):
    numbers = st.lists(any_number, min_size=len(items), max_size=len(items))
    weights = data.draw(numbers) if data else [-3.5] * len(items)
    ws = torch.tensor(weights, dtype=torch.float64).to(dtype)
    trie = build_small(items)
    assert_exact(trie, reduced(trie, ws, operation), ws, operation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_peaked_distribution_keeps_the_digits_of_its_tail(build, operation, dtype) -> None:
    items = random_words(400)
    ws = torch.from_numpy(np.random.default_rng(0).random(len(items)) * 1e-30)
    ws[7] = 1 - 1e-30
    ws = (ws.log() if operation == "logsumexp" else ws).to(dtype)
    trie = build(items)
    assert_exact(trie, reduced(trie, ws, operation), ws, operation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_weights_far_below_their_neighbours_keep_their_digits(build, dtype) -> None:
    trie = build(tokens(b"a", b"b", b"bc", b"bd", b"bde", b"c"))
    ws = torch.tensor([0.0, -1e4, -1e4 - 1, -1e4 - 2, -math.inf, -math.inf], dtype=dtype)
    values = reduced(trie, ws, "logsumexp")
    assert_exact(trie, values, ws, "logsumexp")
    assert values[trie.node_of(b"b")] > -1e4
    assert values[trie.node_of(b"c")] == -math.inf


@pytest.mark.parametrize("operation", OPERATIONS)
def test_infinities_and_nan_reach_the_nodes_above_them_and_no_other(build, operation) -> None:
    items = random_words(200)
    rng = np.random.default_rng(1)
    ws = torch.from_numpy(rng.normal(size=len(items))).float()
    ws[torch.from_numpy(rng.choice(len(items), 4, replace=False))] = torch.tensor(
        [math.inf, -math.inf, math.nan, -math.inf]
    )
    trie = build(items)
    assert_exact(trie, reduced(trie, ws, operation), ws, operation)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_weights_of_nothing_but_the_neutral_element(build, operation) -> None:
    items = random_words(20)
    trie = build(items)
    for value in (0.0, -math.inf):
        ws = torch.full((len(items),), value)
        assert_exact(trie, reduced(trie, ws, operation), ws, operation)


def test_half_precision_is_added_in_more(build) -> None:
    trie = build(tokens(*(b"a%d" % i for i in range(1000))))
    for dtype in (torch.bfloat16, torch.float16):
        assert reduced(trie, torch.ones(1000, dtype=dtype), "sum")[trie.root] == 1000


def test_long_nested_tokens_are_exact(build) -> None:
    trie = build(tokens(*(b"a" * length for length in range(1001))))
    ws = torch.arange(1001.0)
    values = reduced(trie, ws, "sum")
    below = torch.flip(torch.flip(ws, [0]).cumsum(0), [0])
    nodes = trie.path(b"a" * 1000)
    assert torch.equal(values[nodes], below)


def test_the_largest_of_negative_weights_is_negative(build_small) -> None:
    items = random_words(30)
    trie = build_small(items)
    ws = -1 - torch.arange(float(len(items)))
    values = reduced(trie, ws, "max")
    assert values.max() == -1
    assert_exact(trie, values, ws, "max")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
def test_a_row_of_a_batch_is_that_row_alone(build_small, operation, rows) -> None:
    items = random_words(60)
    trie = build_small(items)
    ws = torch.from_numpy(np.random.default_rng(rows).normal(size=(rows, len(items)))).float()
    batch = reduced(trie, ws, operation)
    assert batch.shape == (rows, len(trie))
    for row in {0, rows // 2, rows - 1} if rows else ():
        assert torch.equal(batch[row], reduced(trie, ws[row], operation))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_views_of_other_tensors_are_read_as_they_lie(build, operation) -> None:
    items = random_words(40)
    trie = build(items)
    rows = torch.randn((len(items), 12), generator=torch.Generator().manual_seed(0))
    expected = reduced(trie, rows[:, ::4].T.contiguous(), operation)
    assert torch.equal(reduced(trie, rows[:, ::4].T, operation), expected)
    wide = torch.zeros(3, len(items) + 9)
    wide[:, 5:-4] = rows[:, ::4].T
    assert torch.equal(reduced(trie, wide[:, 5:-4], operation), expected)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_larger_vocabulary_agrees_with_the_core(build, operation) -> None:
    items = random_words(3000, b"abcdefgh\xff", 14)
    ws = torch.from_numpy(np.random.default_rng(3).normal(size=(2, len(items))))
    values = reduced(build(items), ws, operation)
    expected = getattr(TokenCharacterTrie(items), f"batch_weight_{operation}")(ws.numpy())
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)
