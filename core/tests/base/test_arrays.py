"""Arrays and tensors of unusual byte orders, strides, dtypes and devices as arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine

import genlm
import genlm.constraints
import genlm.smc
from genlm.core.base.arrays import host_array, ranges

IDS = np.array([1, 2, 0, 1])
NUMBERS = np.array([0.5, 1.0, 2.0, 1.5])
SIZE = 16

FORMS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "reversed": lambda array: array[::-1].copy()[::-1],
    "strided": lambda array: np.repeat(array, 2, axis=0)[::2],
    "read-only": lambda array: np.broadcast_to(array, array.shape),
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "fortran": np.asfortranarray,
    "long double": lambda array: array.astype("g") if array.dtype.kind == "f" else array,
    "unsigned": lambda array: array.astype("u8") if array.dtype.kind == "i" else array,
    "tensor": torch.from_numpy,
    "strided tensor": lambda array: torch.from_numpy(array).repeat_interleave(2, 0)[::2],
    "with gradients": lambda array: torch.from_numpy(array).requires_grad_(
        array.dtype.kind == "f"
    ),
}

UNREADABLE: dict[str, Callable[[], torch.Tensor]] = {
    "device meta": lambda: torch.zeros(4, dtype=torch.int64, device="meta"),
    "layout torch.sparse_coo": lambda: torch.tensor(IDS).to_sparse(),
}

METHODS: dict[str, Callable[[genlm.AsyncLM, Callable[[Any], Any]], Any]] = {
    "context": lambda llm, form: llm.context(form(IDS)).token_ids,
    "row": lambda llm, form: llm.next_token_logprobs_sync(form(IDS)),
    "extend": lambda llm, form: llm.population([1], 4).extend(form(IDS)).tokens,
    "logprobs": lambda llm, form: llm.population([1], 4).token_logprobs_sync(form(IDS)),
    "score": lambda llm, form: llm.population([1], 4).score_sync(form(IDS[:, None])),
    "index": lambda llm, form: llm.population([[1], [2], [3]])[form(IDS)].tokens,
    "finish": lambda llm, form: llm.population([1], 4).finish(form(IDS > 0)).finished,
    "temperature": lambda llm, form: llm.population([1], 4).draw_sync(
        temperature=form(NUMBERS), seed=1
    ),
    "bias of members": lambda llm, form: llm.population([1], 4).draw_sync(
        bias=form(NUMBERS), seed=1
    ),
    "bias of tokens": lambda llm, form: llm.population([1], 4).draw_sync(
        bias=form(np.linspace(0, 3, 4 * SIZE).reshape(4, SIZE)), seed=1
    ),
    "masks": lambda llm, form: llm.population([1], 4).draw_sync(
        form(np.arange(3 * SIZE).reshape(3, SIZE) % 5 == 0), mask_index=form(IDS), seed=1
    ),
    "mask": lambda llm, form: llm.log_mass_sync([1], form(np.arange(SIZE) % 5 == 0)),
    "log-weights": lambda _, form: genlm.smc.systematic_resampling(form(NUMBERS), 0.5),
    "potential": lambda llm, form: [
        particles.log_weights
        for particles in genlm.smc.steer_sync(
            llm, [1], 4, max_tokens=2, potential=lambda _: form(NUMBERS), seed=1
        )
    ],
    "nodes": lambda _, form: genlm.TokenCharacterTrie([b"a", b"b"]).partial_sum(
        np.ones(2), form(IDS)
    ),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[genlm.AsyncLM]:
    with genlm.AsyncLM(ScriptedEngine) as llm:
        yield llm


def plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array


def values(result: Any) -> list[list[float]]:
    """Return the columns of a result as lists."""
    columns = result if isinstance(result, (tuple, list)) else [result]
    return [np.asarray(column).reshape(-1).tolist() for column in columns]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_the_form_of_an_array_does_not_change_the_result(
    llm: genlm.AsyncLM, method: str, form: str
) -> None:
    compute = METHODS[method]
    assert values(compute(llm, FORMS[form])) == values(compute(llm, plain))


@pytest.mark.parametrize("problem", UNREADABLE)
@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_without_dense_values_is_refused(
    llm: genlm.AsyncLM, method: str, problem: str
) -> None:
    def form(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return UNREADABLE[problem]().bool() if array.dtype == bool else UNREADABLE[problem]()

    with pytest.raises(TypeError, match=problem):
        METHODS[method](llm, form)


def test_an_index_that_does_not_fit_does_not_wrap_around(llm: genlm.AsyncLM) -> None:
    index = np.array([2**64 - 1], np.uint64)
    with pytest.raises(IndexError):
        llm.population([1], 4)[index]
    with pytest.raises(IndexError):
        genlm.constraints.Automaton.regex(".*").start(llm, 4)[index]
    with pytest.raises(IndexError):
        genlm.TokenCharacterTrie([b"a", b"b"]).partial_sum(np.ones(2), index)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(llm: genlm.AsyncLM) -> None:
    nested = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])])
    for compute in (llm.next_token_logprobs_sync, llm.population([1], 2).extend):
        with pytest.raises(TypeError, match="found a nested tensor"):
            compute(nested)


def test_dtypes_that_numpy_lacks_become_float32() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        array = host_array(torch.tensor([0.5, 2.0]).to(dtype), "numbers")
        assert array.dtype == np.float32
        assert array.tolist() == [0.5, 2.0]


def test_a_complex_bias_is_refused(llm: genlm.AsyncLM) -> None:
    for bias in (torch.ones(4, dtype=torch.complex64), np.ones(4, np.complex64)):
        with pytest.raises(TypeError, match=r"bias has values of type .*complex64"):
            llm.population([1], 4).draw_sync(bias=bias)


def test_ranges_are_concatenated() -> None:
    counts = np.array([2, 0, 3])
    assert ranges(np.array([5, 9, 0]), counts).tolist() == [5, 6, 0, 1, 2]
    assert ranges(0, counts).tolist() == [0, 1, 0, 1, 2]
    assert ranges(0, counts[:0]).tolist() == []
