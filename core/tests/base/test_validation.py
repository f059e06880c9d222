"""Token ids of every honest kind are accepted, everything else is named in the error."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.models import WordLevel
from transformers import BatchEncoding

from genlm.core.base.errors import (
    ContextLengthError,
    EmptySequenceError,
    TokenIdError,
    TokenTypeError,
    UnknownAdapterError,
)
from genlm.core.base.validation import checked_integers, checked_token_ids
from genlm.core.queries.query import Query
from genlm.core.queries.query_checks import check_query

NUMPY_INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
TORCH_INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16]


def checked(token_ids: Any, *, vocab_size: int = 100) -> tuple[int, ...]:
    ids, packed = checked_token_ids(token_ids, vocab_size)
    assert np.frombuffer(packed, np.uint32).tolist() == list(ids)
    return ids


ACCEPTED: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "array": lambda ids: array.array("l", ids),
    "object array": lambda ids: np.array(ids, dtype=object),
    "big-endian array": lambda ids: np.array(ids, dtype=">i4"),
    "strided array": lambda ids: np.array([[i, 0] for i in ids])[:, 0],
    "list of torch scalars": lambda ids: [torch.tensor(i) for i in ids],
    **{f"numpy {name}": lambda ids, name=name: np.array(ids, name) for name in NUMPY_INTEGERS},
    **{
        f"list of {name}": lambda ids, name=name: [np.dtype(name).type(i) for i in ids]
        for name in NUMPY_INTEGERS
    },
    **{str(kind): lambda ids, kind=kind: torch.tensor(ids).to(kind) for kind in TORCH_INTEGERS},
}


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED)
def test_integers_of_any_kind_become_plain_integers(
    make: Callable[[list[int]], Any],
) -> None:
    ids = checked(make([3, 0, 99]))
    assert ids == (3, 0, 99)
    assert [type(token_id) for token_id in ids] == [int, int, int]


def test_a_range_is_a_sequence_of_integers() -> None:
    assert checked(range(2, 8, 3)) == (2, 5)


@given(st.lists(st.integers(-3, 12), max_size=8))
def test_a_list_is_accepted_exactly_when_its_ids_are_in_the_vocabulary(ids: list[int]) -> None:
    wrong = [i for i, token_id in enumerate(ids) if not 0 <= token_id < 10]
    if not ids:
        with pytest.raises(EmptySequenceError):
            checked(ids, vocab_size=10)
    elif wrong:
        with pytest.raises(TokenIdError) as outside:
            checked(ids, vocab_size=10)
        error = outside.value
        assert (error.token_id, error.position) == (ids[wrong[0]], wrong[0])
        assert error.vocab_size == 10
    else:
        assert checked(ids, vocab_size=10) == tuple(ids)


@pytest.mark.parametrize("token_id", [-1, 10, 2**63, 2**200, -(2**80)])
def test_an_id_outside_the_vocabulary_is_named_with_its_position(token_id: int) -> None:
    with pytest.raises(TokenIdError, match=rf"{token_id} at position 2 .* 0 to 9"):
        checked([0, 9, token_id, -5], vocab_size=10)


@pytest.mark.parametrize(
    "token_ids", [np.array([2**64 - 1], "uint64"), torch.tensor([-1])], ids=str
)
def test_an_id_of_an_array_does_not_wrap_around(token_ids: Any) -> None:
    with pytest.raises(TokenIdError):
        checked(token_ids)


@pytest.mark.parametrize(
    "token_ids",
    [[], (), range(0), np.array([], "int64"), np.array([]), torch.tensor([])],
    ids=repr,
)
def test_no_ids_are_an_empty_sequence_whatever_holds_them(token_ids: Any) -> None:
    with pytest.raises(EmptySequenceError):
        checked(token_ids)


class IntegerLike:
    """Has `__index__` and refuses, as arrays do."""

    def __index__(self) -> int:
        raise TypeError

    def __repr__(self) -> str:
        return "IntegerLike()"


REFUSED: list[tuple[Any, str]] = [
    (5, "int 5"),
    (None, "NoneType None"),
    (1.5, "float 1.5"),
    ("12", "str '12'; llm.encode converts text to ids"),
    ("", "str ''"),
    (b"12", "bytes b'12'"),
    (bytearray(b"12"), "bytearray bytearray(b'12')"),
    ([1, "2"], "str '2' at position 1"),
    ([1, None, 2.0], "NoneType None at position 1"),
    ([1, 2.0], "float 2.0 at position 1"),
    ([[1, 2]], "list [1, 2] at position 0"),
    ([[1, 2]], "; methods with `batch` in their name take several sequences"),
    (np.array([[1, 2]]), "an array of shape (1, 2); methods with `batch` in their name take"),
    (torch.tensor([[1, 2]]), "take several sequences. For a single row, pass array[0]"),
    (torch.tensor([[1], [2]]), "shape (2, 1); methods with `batch` in their name take several"),
    (BatchEncoding({"input_ids": [1, 2]}), "BatchEncoding; pass its input_ids"),
    (tokenizers.Tokenizer(WordLevel({"a": 0}, "a")).encode("a"), "Encoding; pass its ids"),
    ([True, False], "booleans, a mask; its ids are [i for i"),
    ((False, True), "booleans, a mask"),
    ([0, 1, True], "booleans, a mask"),
    (np.array(5), "a single int, 5"),
    (torch.tensor(5), "a single int, 5"),
    (np.int64(5), "a single int, 5"),
    (np.array([1.0]), "float 1.0 at position 0"),
    (torch.tensor([1.0]), "float 1.0 at position 0"),
    ([1, torch.tensor(2.0)], "Tensor tensor(2.) at position 1"),
    ([1, np.float32(2)], f"float32 {np.float32(2)!r} at position 1"),
    ([1, np.array([2, 3])], "ndarray array([2, 3]) at position 1"),
    ([1, IntegerLike()], "IntegerLike IntegerLike() at position 1"),
    (np.array([True, False]), "an array of booleans"),
    (torch.tensor([True, False]), "an array of booleans"),
    ({1, 2}, "set {1, 2}"),
    ({1: 2}, "dict {1: 2}"),
    ((i for i in [1, 2]), "generator <generator"),
    (iter([1, 2]), "list_iterator"),
]


@pytest.mark.parametrize(
    ("token_ids", "description"), REFUSED, ids=[repr(value) for value, _ in REFUSED]
)
def test_what_is_no_flat_sequence_of_integers_is_described(
    token_ids: Any, description: str
) -> None:
    with pytest.raises(TokenTypeError) as refused:
        checked(token_ids)
    assert description in refused.value.found
    assert description in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_what_was_found_is_shortened() -> None:
    with pytest.raises(TokenTypeError) as refused:
        checked(["x" * 1000])
    assert refused.value.found == f"str '{'x' * 56}... at position 0"


def test_plain_booleans_are_the_integers_they_are_in_python() -> None:
    assert [type(value) for value in checked([True, False, 2])] == [int, int, int]


def test_integers_alone_are_bound_by_no_vocabulary() -> None:
    assert checked_integers(np.array([-5, 10**12])) == (-5, 10**12)
    assert checked_integers(()) == ()
    with pytest.raises(TokenTypeError):
        checked_integers({1})  # type: ignore[arg-type]


# -- queries at an engine -------------------------------------------------------------


def check(*token_ids: int, adapter: str | None = None, targets: tuple[int, ...] = ()) -> None:
    query = Query(0, token_ids, adapter, targets=targets)
    limits: dict[str, Any] = {"embedding_rows": 7, "max_context": 3, "vocab_size": 5}
    check_query(query, adapters=("red", "blue"), **limits)


def test_a_query_that_an_engine_can_compute_passes() -> None:
    check(0, 6, 3)
    check(0, adapter="red")
    check(6, 6, targets=(0, 4))
    check_query(Query(0, (10**6,) * 10**3, targets=(10**6,)))


def test_a_query_that_an_engine_cannot_compute_is_refused_with_the_reason() -> None:
    with pytest.raises(EmptySequenceError):
        check()
    with pytest.raises(ContextLengthError) as too_long:
        check(1, 2, 3, 4)
    assert (too_long.value.length, too_long.value.max_context) == (4, 3)
    for token_id in (7, -1):
        with pytest.raises(TokenIdError) as unknown:
            check(6, token_id)
        attributes = unknown.value.token_id, unknown.value.position, unknown.value.vocab_size
        assert attributes == (token_id, 1, 7)
    for token_id in (5, -1):
        with pytest.raises(TokenIdError, match=f"token id {token_id} at position 1 of targets"):
            check(1, 2, targets=(4, token_id))
    with pytest.raises(UnknownAdapterError, match=r"'green'\. Loaded: blue, red"):
        check(1, adapter="green")
