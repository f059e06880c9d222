"""The n-gram model agrees with fractions counted by hand and by brute force."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.reference.ngram import END_OF_TEXT, SYMBOLS, NgramModel, exact_row

# Few letters, so that histories repeat; the extreme bytes, where keys could collide.
DOCUMENTS = st.lists(
    st.lists(st.sampled_from(b"ab\x00\xff"), max_size=12).map(bytes), min_size=1, max_size=4
)
CONTEXTS = st.lists(
    st.lists(st.sampled_from([*b"ab\x00\xff", 1, END_OF_TEXT]), max_size=7),
    min_size=1,
    max_size=6,
)
ORDERS = st.integers(1, 6)


def counted_row(documents: list[bytes], context: list[int], order: int) -> list[Fraction]:
    """The formula from a dictionary of n-gram counts, in exact fractions."""
    counts: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        symbols = [END_OF_TEXT, *document, END_OF_TEXT]
        for end in range(2, len(symbols) + 1):  # the first symbol is history only
            for start in range(end):
                counts[tuple(symbols[start:end])] += 1
    row = [Fraction(1, SYMBOLS)] * SYMBOLS
    for length in range(min(order - 1, len(context)) + 1):
        history = tuple(context[len(context) - length :])
        followed = [counts[(*history, symbol)] for symbol in range(SYMBOLS)]
        distinct = sum(count > 0 for count in followed)
        if not distinct:
            break
        total = sum(followed) + distinct
        row = [(count + distinct * p) / total for count, p in zip(followed, row, strict=True)]
    return row


def test_a_bigram_model_of_two_letters_has_the_fractions_worked_out_by_hand() -> None:
    model = NgramModel([b"ab"], order=2)
    # Unigrams a, b, end: one each, so P_1 = (1 + 3/257) / 6; a is followed by b alone.
    unigram = (1 + 3 / 257) / 6
    row = model.probabilities([b"a"])[0]
    assert row[ord("b")] == pytest.approx((1 + unigram) / 2, rel=1e-15)
    assert row[ord("a")] == pytest.approx(unigram / 2, rel=1e-15)
    assert row[ord("z")] == pytest.approx(3 / 257 / 6 / 2, rel=1e-15)


@given(documents=DOCUMENTS, contexts=CONTEXTS, order=ORDERS)
def test_a_batch_of_rows_agrees_with_counting_in_fractions(
    documents: list[bytes], contexts: list[list[int]], order: int
) -> None:
    rows = NgramModel(documents, order).probabilities(contexts)
    for row, context in zip(rows, contexts, strict=True):
        expected = counted_row(documents, context, order)
        assert sum(expected) == 1
        np.testing.assert_allclose(row, np.array(expected, dtype=float), rtol=1e-13)


@given(documents=DOCUMENTS, context=CONTEXTS.map(lambda many: many[0]), order=ORDERS)
def test_the_exact_row_agrees_with_counting_in_fractions(
    documents: list[bytes], context: list[int], order: int
) -> None:
    expected = np.array(counted_row(documents, context, order), dtype=float)
    np.testing.assert_allclose(exact_row(documents, context, order), expected, rtol=1e-13)


def test_a_model_of_no_text_is_uniform_over_bytes() -> None:
    # One empty document is one end of text: P(b) = (1/257) / 2 for every byte.
    [row] = NgramModel([b""], order=1).probabilities([[]])
    np.testing.assert_allclose(row[:256], 1 / (2 * 257))


def test_nothing_before_the_end_of_text_matters() -> None:
    model = NgramModel([b"xab", b"b"], order=4)
    rows = model.probabilities([[END_OF_TEXT], [*b"xa", END_OF_TEXT], [*b"b", END_OF_TEXT]])
    np.testing.assert_array_equal(rows[1], rows[0])
    np.testing.assert_array_equal(rows[2], rows[0])


def test_a_row_does_not_depend_on_its_batch() -> None:
    model = NgramModel([b"the cat sat on the mat"], order=4)
    contexts = [b"the", b"", b"zzz", b"t", b"on the"]
    together = model.probabilities(contexts)
    for row, context in zip(together, contexts, strict=True):
        np.testing.assert_array_equal(row, model.probabilities([context])[0])


def test_models_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="order 0"):
        NgramModel([b"a"], order=0)
    with pytest.raises(ValueError, match="no documents"):
        NgramModel([], order=2)
