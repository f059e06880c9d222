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
from genlm.core.rows.row_masks import RowMasks


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
        tuple(sorted(ids, reverse=True)) * (size + 1),  # not as many as booleans
        np.array(sorted(ids), np.int64),
        torch.tensor(sorted(ids), dtype=torch.int64),
        flags,
        np.array(flags),
        torch.tensor(flags),
        words_of(ids, size)[None],
        torch.from_numpy(words_of(ids, size))[None],
        Mask.from_packed(words_of(ids, size), size),
        Mask.from_packed(np.repeat(words_of(ids, size), 2)[::2], size),
        Mask.from_packed(torch.from_numpy(words_of(ids, size)), size),
        Mask(sorted(ids), size),
    ]
    masks = [Mask(form, size) for form in forms]
    assert len(set(masks)) == 1
    mask = masks[0]
    assert list(mask) == sorted(ids)
    assert len(mask) == len(ids)
    assert bool(mask) == bool(ids)
    assert [token_id in mask for token_id in range(-1, size + 1)] == [False, *flags, False]


@given(sets_of_ids())
def test_bits_beyond_the_vocabulary_are_dropped(drawn: tuple[set[int], int]) -> None:
    ids, size = drawn
    padded = words_of(ids | set(range(size, -(-size // 32) * 32)), size)
    assert Mask.from_packed(padded, size) == Mask(sorted(ids), size)


@given(sets_of_ids(), st.data())
def test_operators_are_those_of_sets(drawn: tuple[set[int], int], data: st.DataObject) -> None:
    ids, size = drawn
    other_ids = data.draw(st.sets(st.integers(0, size - 1)))
    mine, other = Mask(sorted(ids), size), Mask(sorted(other_ids), size)
    before = (list(mine), list(other))
    results = {
        "or": (mine | other, ids | other_ids),
        "and": (mine & other, ids & other_ids),
        "minus": (mine - other, ids - other_ids),
        "xor": (mine ^ other, ids ^ other_ids),
        "not": (~mine, set(range(size)) - ids),
    }
    for mask, expected in results.values():
        assert mask == Mask(sorted(expected), size)
        assert hash(mask) == hash(Mask(sorted(expected), size))
        assert len(mask) == len(expected)  # no bit beyond the vocabulary
    assert (list(mine), list(other)) == before


def test_operators_refuse_masks_of_another_vocabulary_and_other_sets() -> None:
    with pytest.raises(ValueError, match="a mask over 9 token ids for a vocabulary of 8"):
        Mask([1], 8) | Mask([1], 9)
    with pytest.raises(TypeError):
        Mask([1], 8) & {1}  # type: ignore[operator]


@pytest.mark.parametrize("size", [40, 64])
def test_a_flat_int32_array_is_refused_because_it_may_be_ids_or_bits(size: int) -> None:
    for flat in (np.array([3, 1], np.int32), torch.tensor([3, 1], dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"Mask\.from_packed\(words, .* or ids as int64"):
            Mask(flat, size)
    assert list(Mask.from_packed(np.array([3, 1], np.int32), size)) == [0, 1, 32]
    assert list(Mask(np.array([3, 1], np.int64), size)) == [1, 3]


@pytest.mark.parametrize(
    "words", [np.ones(2, np.int64), np.ones(3, np.int32), np.ones((1, 2), np.int32)]
)
def test_packed_bits_have_one_word_for_every_32_ids(words: Any) -> None:
    with pytest.raises(ValueError, match=r"int32 words of shape \(2,\) .* found int"):
        Mask.from_packed(words, 50)


def test_a_mask_of_another_process_is_equal() -> None:
    mask = Mask([1, 2, 40], 50)
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert hash(again) == hash(mask)


def test_masks_of_other_tokens_or_vocabularies_of_other_sizes_differ() -> None:
    assert Mask([1], 9) != Mask([2], 9)
    assert Mask([1], 9) != Mask([1], 10)  # of equal bytes
    assert Mask([1], 8) != [1]


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([True] * 9, ValueError, r"booleans has shape \(9,\); expected \(10,\)"),
    (np.ones((1, 10), np.bool_), ValueError, r"shape \(1, 10\); expected \(10,\)"),
    (np.ones((1, 2), np.int32), ValueError, r"shape \(1, 2\); expected \(1, 1\)"),
    (torch.ones((2, 1), dtype=torch.int32), ValueError, r"shape \(2, 1\); expected \(1, 1\)"),
    (Mask([1], 9), ValueError, "a mask over 9 token ids for a vocabulary of 10"),
    ([3, 10], TokenIdError, "token id 10 at position 1 of a mask"),
    ([-1], TokenIdError, "token id -1 at position 0 of a mask"),
    ([3, 2**64], TokenIdError, f"token id {2**64} at position 1 of a mask"),
    ("ab", TokenTypeError, "a mask must be"),
    ([0.5], TokenTypeError, "a mask must be"),
    ({0.5}, TokenTypeError, "a mask must be booleans, one for each token, or token ids"),
    (3, TokenTypeError, "a mask must be"),
    ([0, 1] * 5, TokenTypeError, "found 10 integers, all 0 or 1; convert them to booleans"),
    (torch.ones(10, dtype=torch.uint8), TokenTypeError, "convert them to booleans"),
]


@pytest.mark.parametrize(("allowed", "error", "message"), WRONG)
def test_wrong_masks_are_refused(allowed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mask(allowed, 10)


def forms_of_rows(allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> list[RowMasks]:
    """The same masks in all forms, computed at once or later."""
    count, size = allowed.shape
    beyond = set(range(size, -(-size // 32) * 32))  # bits that no id has
    sets = [{*np.flatnonzero(row).tolist()} for row in allowed]
    words = np.stack([words_of(ids | beyond, size) for ids in sets])
    distinct, index = np.unique(allowed, axis=0, return_inverse=True)
    masks = [
        RowMasks(allowed, count, size),
        RowMasks(torch.from_numpy(words), count, size),
        RowMasks(list(allowed), count, size),
        RowMasks(distinct, count, size, index.reshape(-1)),
    ]
    return [*masks, RowMasks.deferred(lambda: masks[3], count)]


@given(st.integers(1, 70), st.integers(1, 5), st.integers(0, 2**32))
def test_masks_of_rows_are_intersected(size: int, count: int, seed: int) -> None:
    random, cpu = np.random.default_rng(seed), torch.device("cpu")
    first, second = random.random((2, count, size)) < random.random((2, 1, 1))
    first[0], second[-1] = True, True
    for one, other in zip(forms_of_rows(first), forms_of_rows(second)[::-1], strict=True):
        assert (one.is_empty == ~first.any(1)).all()
        both = one & other
        assert both.is_deferred == (one.is_deferred or other.is_deferred)
        assert (both.factors(0, count, cpu).numpy() == (first & second)).all()
        assert (both.is_empty == ~(first & second).any(1)).all()
    some = RowMasks([None, [0]] + [None] * (count - 1), count + 1, size)
    both = some & RowMasks([[0], None] + [[0]] * (count - 1), count + 1, size)
    assert (both.factors(0, count + 1, cpu).sum(1) == 1).all()


def test_deferred_masks_of_some_rows_are_computed_when_they_are_used() -> None:
    computed: list[RowMasks] = []

    def compute() -> RowMasks:
        computed.append(RowMasks(np.eye(3, dtype=bool), 3, 3))
        return computed[0]

    some = RowMasks.deferred(compute, 3).of(np.array([2, 0]))
    assert some.is_deferred
    assert not computed
    factors = some.factors(0, 2, torch.device("cpu"))
    assert factors.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert len(computed) == 1


def test_an_index_refers_to_the_list_of_masks_of_which_some_are_one_object() -> None:
    none, some = Mask([], 4), Mask([1, 2], 4)
    masks = RowMasks([some, some, none, None], 4, 4, [3, 1, 2, 0])
    factors = masks.factors(0, 4, torch.device("cpu"))
    assert factors.sum(1).tolist() == [4, 2, 0, 2]
    assert len(RowMasks([some, none], 0, 4, []).places) == 0
