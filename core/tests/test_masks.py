"""Masks: sets of token ids in every form that programs have."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm import Mask, TokenIdError, TokenTypeError
from genlm.core.masks import unpacked


def words_of(ids: set[int], size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Bitmask words set bit by bit, as grammar libraries define them."""
    words = [0] * -(-size // 32)
    for token_id in ids:
        words[token_id // 32] |= 1 << (token_id % 32)
    return np.array(words, np.uint32).view(np.int32)


@st.composite
def sets_of_ids(draw: st.DrawFn) -> tuple[set[int], int]:
    size = draw(st.integers(1, 130))
    return draw(st.sets(st.integers(0, size - 1))), size


@given(sets_of_ids())
def test_equal_sets_in_any_form_are_equal_masks(drawn: tuple[set[int], int]) -> None:
    ids, size = drawn
    flags = [token_id in ids for token_id in range(size)]
    forms: list[Any] = [
        sorted(ids),
        tuple(sorted(ids, reverse=True)) * 2,
        np.array(sorted(ids), np.int64),
        torch.tensor(sorted(ids), dtype=torch.int64),
        flags,
        np.array(flags),
        torch.tensor(flags),
        words_of(ids, size),
        torch.from_numpy(words_of(ids, size)),
        Mask(sorted(ids), size),
    ]
    masks = [Mask(form, size) for form in forms]
    assert len(set(masks)) == 1
    mask = masks[0]
    assert list(mask) == sorted(ids)
    assert len(mask) == len(ids)
    assert bool(mask) == bool(ids)
    assert [token_id in mask for token_id in range(-1, size + 1)] == [False, *flags, False]
    assert unpacked([mask], torch.device("cpu")).tolist() == [flags]


@given(sets_of_ids())
def test_bits_beyond_the_vocabulary_are_dropped(drawn: tuple[set[int], int]) -> None:
    ids, size = drawn
    padded = words_of(ids | set(range(size, -(-size // 32) * 32)), size)
    assert Mask(padded, size) == Mask(sorted(ids), size)


def test_masks_are_unpacked_together_and_none_allows_all() -> None:
    masks = [Mask([0, 9], 10), None, Mask([], 10)]
    rows = unpacked(masks, torch.device("cpu"))
    assert rows.dtype == torch.bool
    assert rows.nonzero().tolist() == [[0, 0], [0, 9], *([1, i] for i in range(10))]


def test_one_mask_for_many_rows_is_unpacked_once() -> None:
    mask = Mask([3], 10)
    assert unpacked([mask] * 5, torch.device("cpu")).shape == (1, 10)


def test_a_mask_of_another_process_is_equal() -> None:
    mask = Mask([1, 2, 40], 50)
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert hash(again) == hash(mask)


def test_masks_of_vocabularies_of_other_sizes_differ() -> None:
    assert Mask([1], 8) != Mask([1], 9)
    assert Mask([1], 8) != [1]


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([True] * 9, ValueError, r"booleans has shape \(9,\); expected \(10,\)"),
    (np.ones((1, 10), np.bool_), ValueError, r"shape \(1, 10\); expected \(10,\)"),
    (np.ones(2, np.int32), ValueError, r"packed bits .* shape \(2,\); expected \(1,\)"),
    (torch.ones((1, 1), dtype=torch.int32), ValueError, r"shape \(1, 1\); expected \(1,\)"),
    (Mask([1], 9), ValueError, "a mask over 9 token ids for a vocabulary of 10"),
    ([3, 10], TokenIdError, "token id 10 at position 1 of a mask"),
    ([-1], TokenIdError, "token id -1 at position 0 of a mask"),
    ("ab", TokenTypeError, "a mask must be"),
    ([0.5], TokenTypeError, "a mask must be"),
    ({0.5}, TokenTypeError, "a mask must be booleans, one for each token, or token ids"),
    (3, TokenTypeError, "a mask must be"),
]


@pytest.mark.parametrize(("allowed", "error", "message"), WRONG)
def test_wrong_masks_are_refused(allowed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mask(allowed, 10)
