"""What only a GPU can show; `test_reductions.py` tests reductions, `test_conformance.py` runs
the checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genlm import Token, TokenCharacterTrie
from genlm_trie_cuda.trie import DeviceTrie

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPERATIONS = ("sum", "max", "logsumexp")


@pytest.fixture(scope="module")
def tokens() -> list[Token]:
    rng = np.random.default_rng(0)
    words = {bytes(rng.integers(0, 30, size=rng.integers(1, 8))) for _ in range(70_000)}
    return [Token(position, word) for position, word in enumerate(words)]


def weights(tokens: list[Token], rows: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    return torch.randn((rows, len(tokens)), device="cuda", generator=generator)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_large_vocabulary_agrees_with_the_core(tokens, operation, kernels) -> None:
    trie, core = DeviceTrie(tokens, kernels=kernels), TokenCharacterTrie(tokens)
    for rows in (1, 7, 40):
        ws = weights(tokens, rows).softmax(-1)
        ws = ws.log() if operation == "logsumexp" else ws
        values = getattr(trie, f"batch_weight_{operation}")(ws)
        expected = getattr(core, f"batch_weight_{operation}")(ws)
        np.testing.assert_allclose(values, expected, rtol=4e-6, atol=4e-6 * float(ws.min() < 0))


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_float32_agrees_with_float64_on_the_host(tokens, operation, kernels) -> None:
    trie, core = DeviceTrie(tokens, kernels=kernels), TokenCharacterTrie(tokens)
    ws = weights(tokens, 33).softmax(-1)
    ws = ws.log() if operation == "logsumexp" else ws
    exact = getattr(core, f"batch_weight_{operation}")(ws.double().cpu().numpy())
    for row_weights, rtol in ((ws, 4e-6), (ws.double(), 1e-12)):
        values = getattr(trie, f"batch_weight_{operation}")(row_weights, returns="torch")
        assert values.dtype == row_weights.dtype
        np.testing.assert_allclose(values.cpu(), exact, rtol=rtol, atol=rtol)


def test_results_are_those_of_the_stream_that_is_current(tokens) -> None:
    trie, stream = DeviceTrie(tokens), torch.cuda.Stream()
    first, second = weights(tokens, 3), weights(tokens, 4)[:3]
    expected = trie.batch_weight_sum(second, returns="torch")
    ws = first.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        large = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            large = (large @ large).tanh()  # what follows on this stream waits
        ws.copy_(second)
        values = trie.batch_weight_sum(ws, returns="torch")
        assert torch.equal(values.cpu(), expected.cpu())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_call_waits_for_the_device(tokens, operation) -> None:
    trie, ws = DeviceTrie(tokens), weights(tokens, 3)
    reduce = getattr(trie, f"batch_weight_{operation}")
    reduce(ws, returns="torch")
    torch.cuda.set_sync_debug_mode("error")
    try:
        values = reduce(ws, returns="torch")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert values.device == ws.device


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_captured_graph_reduces_new_weights(tokens, operation, kernels) -> None:
    trie, ws = DeviceTrie(tokens, kernels=kernels), weights(tokens, 5)
    reduce = getattr(trie, f"batch_weight_{operation}")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        reduce(ws, returns="torch")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = reduce(ws, returns="torch")
    for factor in (2.0, -3.0):
        ws.mul_(factor)
        graph.replay()
        assert torch.equal(values, reduce(ws, returns="torch"))


def test_weights_of_the_host_are_reduced_on_the_device_that_was_named(tokens) -> None:
    trie = DeviceTrie(tokens, device="cuda")
    ws = np.random.default_rng(0).random((2, len(tokens)))
    expected = TokenCharacterTrie(tokens).batch_weight_sum(ws)
    np.testing.assert_allclose(trie.batch_weight_sum(ws), expected, rtol=1e-13)
    assert trie.batch_weight_sum(ws, returns="torch").is_cuda
    assert isinstance(trie.batch_weight_sum(ws), np.ndarray)
