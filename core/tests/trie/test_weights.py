"""Which weights are taken, what comes back, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genlm import GenlmError, Token, TokenCharacterTrie, WeightsError
from genlm.core.trie.weights import convert_result


@pytest.fixture
def trie() -> TokenCharacterTrie:
    return TokenCharacterTrie([Token(0, b"a"), Token(1, b"ab"), Token(2, b"b")])


HALVES = [0.5, 1.5, -2.0]


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float64, np.float64),
        (torch.float32, np.float32),
        (torch.bfloat16, np.float32),
        (torch.float16, np.float32),
        (torch.int64, np.float64),
    ],
)
@pytest.mark.parametrize("returns", ["numpy", "torch"])
def test_torch_weights_of_every_dtype(trie, dtype, result, returns) -> None:
    ws = torch.tensor(HALVES).to(dtype)
    values = trie.weight_sum(ws, returns=returns)
    batch = trie.batch_weight_sum(torch.stack([ws, ws]), returns=returns)
    if returns == "torch":
        assert isinstance(values, torch.Tensor)
        assert values.device == ws.device
        values, batch = values.numpy(), batch.numpy()
    assert values.dtype == batch.dtype == result
    assert values[trie.root] == float(ws.sum())
    np.testing.assert_array_equal(batch, [values, values])


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (np.float64, np.float64),
        (np.float32, np.float32),
        (np.float16, np.float32),
        (np.int32, np.float64),
        (np.bool_, np.float64),
    ],
)
def test_numpy_weights_of_every_dtype(trie, dtype, result) -> None:
    ws = np.array([1, 0, 1], dtype)
    values = trie.weight_sum(ws)
    assert values.dtype == result
    assert values[trie.root] == 2
    assert isinstance(trie.weight_sum(ws, returns="torch"), torch.Tensor)


def test_half_precision_is_added_in_more() -> None:
    trie = TokenCharacterTrie([Token(i, b"a%d" % i) for i in range(1000)])
    for dtype in (torch.bfloat16, torch.float16):
        assert trie.weight_sum(torch.ones(1000, dtype=dtype))[trie.root] == 1000


def test_a_sequence_of_rows_is_a_batch(trie) -> None:
    expected = trie.batch_weight_sum(np.array([HALVES, HALVES]))
    for rows in (
        [HALVES, HALVES],
        (np.array(HALVES), np.array(HALVES)),
        [torch.tensor(HALVES), torch.tensor(HALVES)],
        [torch.tensor(HALVES).bfloat16(), np.array(HALVES, np.float32)],
    ):
        np.testing.assert_array_equal(trie.batch_weight_sum(rows), expected)
    assert trie.batch_weight_sum([]).shape == (0, len(trie))


def test_integers_in_a_batch_with_half_precision_are_not_rounded(trie) -> None:
    rows = [torch.tensor([70_001, 1, 70_003]), torch.tensor(HALVES).half()]
    expected = [trie.weight_sum(row) for row in rows]
    np.testing.assert_array_equal(trie.batch_weight_sum(rows), expected)


def test_views_and_gradients_are_fine(trie) -> None:
    strided = torch.tensor([HALVES, HALVES]).T.contiguous().T.requires_grad_()
    expected = trie.weight_sum(HALVES)
    np.testing.assert_array_equal(trie.batch_weight_sum(strided)[1], expected)
    np.testing.assert_array_equal(trie.weight_sum(np.array(HALVES)[::-1][::-1]), expected)


def test_results_are_the_callers_own(trie) -> None:
    ws = np.array(HALVES)
    first = trie.weight_sum(ws)
    expected = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(trie.weight_sum(ws), expected)
    assert ws.tolist() == HALVES


@pytest.mark.parametrize(
    ("ws", "message"),
    [
        ([1.0, 2.0], r"expected weights of shape \(3,\); found shape \(2,\)"),
        (np.zeros((1, 3)), r"shape \(3,\); found shape \(1, 3\)"),
        (torch.zeros(4), r"shape \(3,\); found shape \(4,\)"),
        (1.0, r"found shape \(\)"),
        (["a", "b", "c"], "expected real numbers; found values of type"),
        (np.zeros(3, complex), "found values of type complex128"),
        (torch.zeros(3, dtype=torch.complex64), "found values of type complex64"),
        ([[1.0], [2.0, 3.0], [4.0]], "an array of real numbers"),
        (torch.zeros(3, device="meta"), "dense tensor; found a tensor on the device meta"),
        (torch.ones(3).to_sparse(), "dense tensor; found a tensor of layout torch.sparse_coo"),
    ],
)
def test_weights_that_do_not_fit_are_described(trie, ws, message) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        trie.weight_sum(ws)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, GenlmError)
    assert "position of the token" in str(caught.value)


@pytest.mark.parametrize(
    "ws",
    [
        torch.zeros(3, device="meta"),
        torch.ones(3).to_sparse(),
    ],
)
def test_tensors_without_dense_values_are_refused_by_every_reduction(trie, ws) -> None:
    for compute in (
        lambda: trie.weight_sum(ws),
        lambda: trie.batch_weight_max([ws, ws]),
        lambda: trie.partial_logsumexp(ws, [trie.root]),
        lambda: trie.partial_sum(ws, []),
    ):
        with pytest.raises(WeightsError, match="an array or a dense tensor; found"):
            compute()


@pytest.mark.parametrize(
    ("ws", "message"),
    [
        (np.zeros(3), r"shape \(rows, 3\); found shape \(3,\)"),
        (np.zeros((2, 4)), r"shape \(rows, 3\); found shape \(2, 4\)"),
        (
            [np.zeros(3), torch.zeros(2)],
            r"rows of shape \(3,\); found shape \(2,\) at position 1",
        ),
        (np.zeros((0, 2)), r"found shape \(0, 2\)"),
        ([torch.zeros(3, device="meta")] * 2, "found a tensor on the device meta"),
    ],
)
def test_batches_that_do_not_fit_are_described(trie, ws, message) -> None:
    with pytest.raises(WeightsError, match=message):
        trie.batch_weight_sum(ws)


def test_a_torch_result_lies_on_the_device_of_the_weights() -> None:
    rows = torch.zeros((1, 3), device="meta")  # a device that all machines have
    assert convert_result(np.zeros(4), "torch", rows).device.type == "meta"


def test_an_unknown_kind_of_result_is_refused(trie) -> None:
    with pytest.raises(ValueError, match="returns='list': expected one of"):
        trie.weight_sum(HALVES, returns="list")
