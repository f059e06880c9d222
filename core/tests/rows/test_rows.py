"""Rows are the float64 softmax over exactly the ids that the vocabulary has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.base.errors import EvaluationError
from genlm.core.rows.logits import (
    copied_rows,
    invalid_rows,
    moved,
    rows_from_logits,
)
from genlm.core.vocab import Token, Vocabulary

# float32 keeps 24 bits; log-probabilities here are below 2**9 and softmax adds a few roundings.
TOLERANCE = 2**9 * 2**-24


def vocabulary_of(size: int, missing: Sequence[int] = ()) -> Vocabulary:
    tokens = [Token(i, b"" if i in missing else bytes([i])) for i in range(size)]
    return Vocabulary(None, tokens, list(map(repr, tokens)), tuple(sorted(missing)))


def oracle(logits: torch.Tensor, size: int, missing: Sequence[int] = ()) -> np.ndarray:
    """The definition, one entry at a time, in float64."""
    rows = np.full((len(logits), size), -np.inf)
    for row, source in zip(rows, logits.double().tolist(), strict=True):
        ids = [i for i in range(min(size, len(source))) if i not in missing]
        largest = max(source[i] for i in ids)
        total = sum(np.exp(source[i] - largest) for i in ids)
        for i in ids:
            row[i] = source[i] - largest - np.log(total)
    return rows


def logits_of(count: int, width: int, scale: float = 5.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * scale


@given(
    count=st.integers(1, 4),
    width=st.integers(1, 20),
    size=st.integers(1, 20),
    missing=st.sets(st.integers(1, 19)),
    seed=st.integers(0, 99),
)
def test_rows_match_float64_whatever_is_padded_short_or_missing(
    count: int, width: int, size: int, missing: set[int], seed: int
) -> None:
    missing = {i for i in missing if i < size}  # id 0 stays: some id has to
    logits = logits_of(count, width, seed=seed)
    before = logits.clone()
    rows = rows_from_logits(logits, vocabulary_of(size, sorted(missing)))
    assert rows.shape == (count, size)
    assert rows.dtype == torch.float32
    np.testing.assert_allclose(rows, oracle(logits, size, sorted(missing)), atol=TOLERANCE)
    assert torch.equal(logits, before)
    assert np.allclose(rows.double().logsumexp(-1), 0, atol=1e-6)


def test_padded_logits_are_cut_before_normalising() -> None:
    logits = torch.tensor([[0.0, 0.0, 1000.0]])
    rows = rows_from_logits(logits, vocabulary_of(2))
    assert torch.allclose(rows, torch.full((1, 2), -np.log(2.0)))


def test_ids_without_logits_get_no_probability() -> None:
    rows = rows_from_logits(torch.zeros(2, 3), vocabulary_of(5))
    assert torch.equal(rows[:, 3:], torch.full((2, 2), float("-inf")))
    assert torch.allclose(rows[:, :3], torch.full((2, 3), -np.log(3.0)))


def test_ids_that_no_token_has_get_no_probability_even_beyond_the_logits() -> None:
    rows = rows_from_logits(torch.tensor([[0.0, 99.0, 0.0]]), vocabulary_of(6, (1, 4)))
    expected = torch.tensor([[-np.log(2.0), -np.inf, -np.log(2.0), *[-np.inf] * 3]])
    assert torch.allclose(rows, expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [7, 9, 12])
def test_logits_of_any_precision_are_normalised_in_float32(
    dtype: torch.dtype, width: int
) -> None:
    logits = logits_of(3, width).to(dtype)
    rows = rows_from_logits(logits, vocabulary_of(9, (2,)))
    assert rows.dtype == torch.float32
    np.testing.assert_allclose(rows, oracle(logits, 9, (2,)), atol=TOLERANCE)


@pytest.mark.parametrize("offset", [-1e30, -1e4, 1e4, 3e38])
def test_large_logits_neither_overflow_nor_vanish(offset: float) -> None:
    rows = rows_from_logits(torch.full((1, 4), offset), vocabulary_of(4))
    assert torch.allclose(rows, torch.full((1, 4), -np.log(4.0)))


def test_logits_of_minus_infinity_stay_impossible() -> None:
    rows = rows_from_logits(torch.tensor([[0.0, -np.inf, 0.0]]), vocabulary_of(3))
    assert rows[0, 1] == -np.inf
    assert torch.allclose(rows[0, ::2], torch.full((2,), -np.log(2.0)))


@pytest.mark.parametrize(("width", "missing"), [(5, ()), (8, ()), (3, ()), (5, (1,))])
def test_rows_share_no_memory_with_the_logits(width: int, missing: tuple[int, ...]) -> None:
    logits = logits_of(2, width)
    before = logits.clone()
    rows = rows_from_logits(logits, vocabulary_of(5, missing))
    rows.zero_()
    assert torch.equal(logits, before)
    assert rows.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()


class CountedIds(tuple[int, ...]):
    """Ids that count how often they are read one by one."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        self.read += 1
        return super().__iter__()


def test_missing_ids_are_indexed_once_for_each_device_and_width() -> None:
    ids = CountedIds((1, 4))
    vocabulary = replace(vocabulary_of(6, (1, 4)), missing_ids=ids)
    for count, (width, device) in enumerate([(6, "cpu"), (3, "cpu"), (6, "meta")], 1):
        for batch in (1, 3):
            rows_from_logits(torch.zeros(batch, width, device=device), vocabulary)
        assert ids.read == count
    alike = replace(vocabulary, missing_ids=(2,))
    assert rows_from_logits(torch.zeros(1, 6), alike)[0].isinf().tolist() == [
        i == 2 for i in range(6)
    ]


def test_rows_have_gradients_after_rows_in_inference_mode() -> None:
    vocabulary = vocabulary_of(4, (1,))
    with torch.inference_mode():
        rows_from_logits(torch.zeros(1, 4), vocabulary)
    logits = torch.zeros(1, 4, requires_grad=True)
    rows_from_logits(logits, vocabulary)[0, 0].backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[2 / 3, 0, -1 / 3, -1 / 3]]))


def test_small_tensors_are_copied_to_a_gpu_from_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Recorded(torch.Tensor):
        calls: ClassVar[list[Any]] = []

        def pin_memory(self, *_: Any) -> Any:
            self.calls.append("pin_memory")
            return self

        def to(self, *args: Any, **options: Any) -> Any:
            self.calls.append((*args, options))
            return self

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    index, gpu = torch.arange(3).as_subclass(Recorded), torch.device("cuda", 0)
    moved(index, gpu)
    assert Recorded.calls == ["pin_memory", (gpu, {"non_blocking": True})]
    assert moved(torch.arange(3), torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        ([[0.0, 1.0]], TypeError, "logits is list; expected a torch.Tensor"),
        (torch.zeros(2), ValueError, r"logits of shape \(2,\); expected rows"),
        (torch.zeros(1, 1, 2), ValueError, r"logits of shape \(1, 1, 2\); expected rows"),
    ],
)
def test_logits_that_are_no_matrix_are_refused(
    logits: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rows_from_logits(logits, vocabulary_of(2))


def test_no_logits_give_no_rows() -> None:
    assert rows_from_logits(torch.zeros(0, 9), vocabulary_of(5, (1,))).shape == (0, 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_stay_on_the_device_of_the_logits() -> None:
    logits = logits_of(3, 7)
    rows = rows_from_logits(logits.cuda(), vocabulary_of(9, (2,)))
    assert rows.device.type == "cuda"
    np.testing.assert_allclose(rows.cpu(), oracle(logits, 9, (2,)), atol=TOLERANCE)


def test_copied_rows_have_memory_of_their_own() -> None:
    with torch.inference_mode():
        rows = logits_of(4, 9)[:, :7]  # strides of something larger
    copies = copied_rows(rows)
    assert [row.shape for row in copies] == [(7,)] * 4
    for place, row in enumerate(copies):
        assert torch.equal(row, rows[place])
        assert row.untyped_storage().nbytes() == 7 * row.itemsize
        assert not row.is_inference()
        row.zero_()
        assert not any(torch.equal(row, other) for other in copies[place + 1 :])
    assert bool(rows.any(1).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_are_copied_on_the_device_without_waiting_for_it() -> None:
    rows = torch.randn(1000, 500, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = copied_rows(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.stack(copies), rows)
    assert copies[3].untyped_storage().nbytes() == copies[3].nbytes


# -- rows that are not distributions --------------------------------------------------


def spoiled(row: torch.Tensor, value: float) -> torch.Tensor:
    row = row.clone()
    row[3] = value
    return row


@pytest.mark.parametrize("size", [10, 20_000])  # checked stacked, and one by one
def test_only_the_rows_that_are_not_distributions_are_found(size: int) -> None:
    good = logits_of(2, size).log_softmax(-1)
    peaked = torch.full((size,), -math.inf)
    peaked[7] = 0.0
    rows = [
        good[0],
        spoiled(good[0], math.nan),
        peaked,
        spoiled(good[1], math.inf),
        good[1] + math.log(0.9),
        torch.full((size,), -math.inf),
        good[0].double(),
        good[0, 1:],
        good[1],
    ]
    errors = invalid_rows(rows, size)
    assert sorted(errors) == [1, 3, 4, 5, 6, 7]
    assert all(isinstance(error, EvaluationError) for error in errors.values())
    assert f"NaN at 1 of {size} ids" in str(errors[1])
    assert "a sum of inf" in str(errors[3])
    assert "a sum of 0.9" in str(errors[4])
    assert "torch.float64" in str(errors[6])
    assert f"({size - 1},)" in str(errors[7])


def test_logits_that_are_not_finite_make_rows_that_are_found() -> None:
    vocabulary = vocabulary_of(8, missing=[0])
    logits = logits_of(4, 8)
    logits[1, 5] = math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    assert sorted(invalid_rows(list(rows_from_logits(logits, vocabulary)), 8)) == [1, 2, 3]


def test_no_rows_are_all_valid() -> None:
    assert invalid_rows([], 8) == {}


def test_rows_from_logits_are_invalid_exactly_where_their_sums_say_so() -> None:
    logits = torch.randn(5, 40)
    logits[1, 3], logits[2, 4], logits[3] = float("nan"), float("inf"), float("-inf")
    logits[4, 7] = float("-inf")
    rows = torch.log_softmax(logits, -1)
    assert list(invalid_rows(rows, 40)) == [1, 2, 3]
    errors = invalid_rows(rows, 40, normalised=True)
    assert {i: str(e) for i, e in errors.items()} == {
        i: str(e) for i, e in invalid_rows(rows, 40).items()
    }
