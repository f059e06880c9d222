"""Which weights are taken, who reduces them, what comes back, and what is refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from programs import run_code

import genlm
from genlm import AsyncTokenCharacterTrie, Token, TokenCharacterTrie, WeightsError
from genlm_trie_cuda.trie import DeviceTrie

WORDS = [Token(i, w) for i, w in enumerate([b"a", b"ab", b"b", b"ab", b"\xff"])]
WS = [0.5, 1.5, -2.0, 0.25, 3.0]


def on_cpu(**options) -> DeviceTrie:
    return DeviceTrie(WORDS, kernels="torch", **options)


@pytest.fixture(params=["core", "torch"])
def trie(request: pytest.FixtureRequest) -> DeviceTrie:
    return DeviceTrie(WORDS) if request.param == "core" else on_cpu()


def test_the_names_cuda_and_parallel_and_none_mean_this_trie() -> None:
    assert genlm.get_trie("cuda") is genlm.get_trie("parallel") is DeviceTrie
    assert genlm.get_trie() is DeviceTrie
    assert isinstance(DeviceTrie(WORDS), TokenCharacterTrie)


def test_choosing_the_trie_imports_neither_torch_nor_triton() -> None:
    code = (
        "import genlm, sys; trie = genlm.get_trie('cuda')([b'a', b'b']);"
        "assert trie.weight_sum([1, 2]).tolist() == [1, 2, 1, 2, 3] or print(trie.layout);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'triton')))"
    )
    run_code(code)


def test_weights_on_the_cpu_are_reduced_by_the_core(monkeypatch) -> None:
    monkeypatch.setattr(DeviceTrie, "_plan_on", None)
    core, trie = TokenCharacterTrie(WORDS), DeviceTrie(WORDS)
    for ws in (WS, np.array(WS), torch.tensor(WS)):
        for operation in ("sum", "max", "logsumexp"):
            name = f"weight_{operation}"
            np.testing.assert_array_equal(getattr(trie, name)(ws), getattr(core, name)(ws))
            name = f"partial_{operation}"
            nodes = [trie.root, 0]
            expected = getattr(core, name)(ws, nodes)
            np.testing.assert_array_equal(getattr(trie, name)(ws, nodes), expected)


def test_navigation_is_the_cores(trie) -> None:
    core = TokenCharacterTrie(WORDS)
    assert trie.path(b"ab") == core.path(b"ab")
    for node in range(len(core)):
        assert trie.prefix_of(node) == core.prefix_of(node)
        assert trie.child_prefixes(node) == core.child_prefixes(node)


@pytest.mark.parametrize("returns", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.int64, torch.float64),
        (torch.bool, torch.float64),
    ],
)
def test_weights_of_every_dtype(trie, dtype, expected, returns) -> None:
    ws = torch.tensor([1.0, 0, 1, 0, 1]).to(dtype)
    batch = torch.stack([ws, ws])
    for single, rows in ((ws, batch), (batch[0], [ws, ws]), (ws, (ws, ws))):
        values = trie.weight_sum(single, returns=returns)
        batch_values = trie.batch_weight_sum(rows, returns=returns)
        if returns == "numpy":
            values, batch_values = torch.from_numpy(values), torch.from_numpy(batch_values)
        assert values.dtype == batch_values.dtype == expected
        assert values.device == ws.device
        assert values[trie.root] == 3
        assert torch.equal(batch_values, torch.stack([values, values]))


@pytest.mark.parametrize("operation", ["sum", "max", "logsumexp"])
def test_numpy_lists_and_mixtures_give_the_same(operation) -> None:
    trie, core = on_cpu(), TokenCharacterTrie(WORDS)
    expected = getattr(core, f"batch_weight_{operation}")(np.array([WS, WS], np.float32))
    rows = np.array([WS, WS], np.float32)
    for ws in (
        rows,
        [*rows],
        [torch.tensor(WS), rows[1]],
        [torch.tensor(WS).bfloat16(), torch.tensor(WS).double()],
        rows.tolist(),
    ):
        values = getattr(trie, f"batch_weight_{operation}")(ws)
        np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert trie.batch_weight_sum([]).shape == (0, len(trie))
    assert trie.batch_weight_sum([], returns="torch").shape == (0, len(trie))


@pytest.mark.parametrize("operation", ["sum", "max", "logsumexp"])
def test_arrays_of_any_strides_and_byte_order_are_taken(operation) -> None:
    trie, core = on_cpu(), TokenCharacterTrie(WORDS)
    read_only = np.array(WS)
    read_only.flags.writeable = False
    for ws in (np.array(WS)[::-1], np.array(WS, ">f8"), np.array([0, *WS])[1:], read_only):
        values = getattr(trie, f"weight_{operation}")(ws)
        np.testing.assert_allclose(values, getattr(core, f"weight_{operation}")(ws))
        np.testing.assert_array_equal(
            getattr(trie, f"partial_{operation}")(ws, range(len(trie))), values
        )


def test_results_stay_on_the_device_and_nothing_waits_for_it() -> None:
    # Tensors on "meta" have no values; reading one raises an error.
    trie = DeviceTrie(WORDS)
    ws = torch.empty((3, 5), device="meta", dtype=torch.bfloat16)
    for operation in ("sum", "max", "logsumexp"):
        values = getattr(trie, f"batch_weight_{operation}")(ws, returns="torch")
        assert values.device == ws.device
        assert values.shape == (3, len(trie))
        values = getattr(trie, f"weight_{operation}")(ws[0], returns="torch")
        assert values.shape == (len(trie),)
        partial = getattr(trie, f"partial_{operation}")(ws, [0, trie.root], returns="torch")
        assert partial.device == ws.device
        assert partial.shape == (3, 2)


def test_weights_on_the_cpu_go_to_the_device_that_was_named() -> None:
    trie = DeviceTrie(WORDS, device="meta")
    for ws in (WS, np.array(WS), torch.tensor(WS)):
        assert trie.weight_max(ws, returns="torch").device.type == "meta"


@pytest.mark.parametrize("returns", ["numpy", "torch"])
def test_results_are_the_callers_own_and_weights_stay(trie, returns) -> None:
    ws = torch.tensor([WS, WS], requires_grad=True)
    first = trie.batch_weight_sum(ws, returns=returns)
    expected = torch.as_tensor(first).clone()
    first[:] = 7
    assert ws.tolist() == [WS, WS]
    assert torch.equal(torch.as_tensor(trie.batch_weight_sum(ws, returns=returns)), expected)


@pytest.mark.parametrize("operation", ["sum", "max", "logsumexp"])
def test_some_nodes_have_the_values_that_all_nodes_have(operation) -> None:
    rng = np.random.default_rng(0)
    words = {bytes(rng.choice(list(b"abc"), size=rng.integers(8))) for _ in range(300)}
    trie = DeviceTrie([Token(i, word) for i, word in enumerate(words)], kernels="torch")
    rows = torch.from_numpy(rng.normal(size=(3, len(words))))
    everything = getattr(trie, f"batch_weight_{operation}")(rows)
    reduce_nodes = getattr(trie, f"partial_{operation}")
    for nodes in (
        np.arange(len(trie)),
        trie.child_prefixes(trie.root),
        trie.path(b"abab"),
        rng.integers(len(trie), size=20),
        [trie.root],
        [],
    ):
        node_list = list(map(int, nodes))
        np.testing.assert_allclose(
            reduce_nodes(rows, nodes), everything[:, node_list], atol=1e-12
        )
        np.testing.assert_allclose(
            reduce_nodes(rows[1], nodes), everything[1, node_list], atol=1e-12
        )
    for node in (-1, len(trie)):
        with pytest.raises(IndexError, match=f"no node {node}"):
            reduce_nodes(rows, [0, node])


@pytest.mark.parametrize(
    ("ws", "message"),
    [
        (torch.zeros(4), r"expected weights of shape \(5,\); found shape \(4,\)"),
        (np.zeros((1, 5)), r"shape \(5,\); found shape \(1, 5\)"),
        (torch.zeros(5, dtype=torch.complex64), "real numbers; found values of type"),
        (np.zeros(5, complex), "real numbers; found values of type"),
        (1.0, r"found shape \(\)"),
        (["a"] * 5, "expected real numbers"),
    ],
)
def test_weights_that_do_not_fit_are_described(trie, ws, message) -> None:
    with pytest.raises(WeightsError, match=message):
        trie.weight_sum(ws)


def test_sparse_tensors_are_refused_by_every_reduction(trie) -> None:
    ws = torch.ones(5).to_sparse()
    for compute in (
        lambda: trie.weight_sum(ws),
        lambda: trie.batch_weight_max([ws, ws]),
        lambda: trie.partial_logsumexp(ws, [trie.root]),
        lambda: trie.partial_sum(ws, []),
    ):
        with pytest.raises(WeightsError, match="an array or a dense tensor; found"):
            compute()


@pytest.mark.parametrize("ws", [torch.zeros(5), torch.zeros(2, 4), [torch.zeros(5), [1.0]]])
def test_batches_that_do_not_fit_are_refused(trie, ws) -> None:
    with pytest.raises(WeightsError):
        trie.batch_weight_sum(ws)


def test_unknown_options_are_refused(trie) -> None:
    with pytest.raises(ValueError, match="returns='list': expected one of"):
        trie.weight_sum(torch.zeros(5), returns="list")
    with pytest.raises(ValueError, match="kernels='cuda': expected one of"):
        DeviceTrie(WORDS, kernels="cuda")
    with pytest.raises(RuntimeError, match="device"):
        DeviceTrie(WORDS, device="gpu")


def test_coroutines_share_its_batches() -> None:
    async def values() -> list[torch.Tensor]:
        async with AsyncTokenCharacterTrie.from_vocab(WORDS, "cuda", kernels="torch") as front:
            rows = [torch.tensor(WS) * factor for factor in range(5)]
            return await asyncio.gather(
                *(front.weight_sum(row, returns="torch") for row in rows)
            )

    alone = on_cpu().weight_sum(torch.tensor(WS), returns="torch")
    for factor, row in enumerate(asyncio.run(values())):
        torch.testing.assert_close(row, alone * factor)


def test_only_tries_that_leave_weights_to_the_core_are_compiled_by_default(monkeypatch) -> None:
    monkeypatch.setattr("genlm.core.trie.compiled.COMPILED_FROM_NODES", 0)
    assert DeviceTrie(WORDS).compiled
    assert DeviceTrie(WORDS, device="cpu").compiled
    for options in ({"device": "meta"}, {"kernels": "torch"}):
        assert not DeviceTrie(WORDS, **options).compiled


def test_weights_left_to_the_core_may_have_its_machine_code() -> None:
    trie = DeviceTrie([Token(0, b"a"), Token(1, b"ab")], compiled=True)
    assert trie.compiled
    assert trie.weight_sum([1.0, 2.0]).tolist() == [1, 2, 2, 3, 3]
    assert not DeviceTrie([Token(0, b"a")]).compiled
