"""Entries of rows by id, the largest, top-k and top-p, against sorting in Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.rows import logits as rows_module
from genlm.core.rows import truncation
from genlm.core.rows.selection import batch_top_k
from genlm.core.rows.truncation import Truncation, truncate

INF = math.inf
SIZES = st.sampled_from([1, 2, 63, 64, 65, 700, 1300])


def coarse_rows(count: int, size: int, seed: int, levels: int) -> torch.Tensor:
    """Rows with few distinct values, 0.0 and -0.0 and -inf among them."""
    generator = np.random.default_rng(seed)
    values = [-INF, -0.0, 0.0, *(-generator.random(levels) * 9)]
    return torch.from_numpy(generator.choice(values, (count, size))).float()


def first_ids(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


# -- the largest ----------------------------------------------------------------------


@given(SIZES, st.integers(0, 2**32), st.sampled_from([1, 3, 2000]), st.data())
def test_the_largest_come_in_order_and_of_equals_the_lowest_ids(
    size: int, seed: int, levels: int, data: st.DataObject
) -> None:
    rows = coarse_rows(3, size, seed, levels)
    before = rows.clone()
    k = data.draw(st.integers(1, size) | st.integers(1, min(size, 12)))
    values, ids = batch_top_k(rows, k)
    expected = [first_ids(row, k) for row in rows.tolist()]
    assert ids.tolist() == expected
    assert torch.equal(values, rows.gather(1, torch.tensor(expected)))
    assert torch.equal(rows, before)


@pytest.mark.parametrize("first", [0.0, -1e-30, -1e-6, -1.0, -80.0])
def test_the_next_smaller_float_is_not_equal(first: float) -> None:
    values = [np.float32(first)]
    while len(values) < 200:
        values.append(np.nextafter(values[-1], np.float32(-np.inf)))
    order = np.random.default_rng(0).permutation(200)
    row = torch.from_numpy(np.array(values, np.float32)[order])[None]
    for k in (1, 3, 200):  # with blocks and without
        assert batch_top_k(row, k)[1].tolist() == [np.argsort(order)[:k].tolist()]


@pytest.mark.parametrize("k", [1, 5, 60])
def test_rows_of_other_layouts_and_in_parts_have_the_same_largest(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = coarse_rows(7, 1300, 0, 40)
    values, ids = batch_top_k(rows, k)
    for same in (rows.T.contiguous().T, torch.cat([rows, rows], 1)[:, :1300]):
        assert torch.equal(batch_top_k(same, k)[1], ids)
    monkeypatch.setattr(rows_module, "_VALUES_ON_CPU", 3000)
    largest = batch_top_k(rows, k)
    assert torch.equal(largest[0], values)
    assert torch.equal(largest[1], ids)
    assert [tuple(column.shape) for column in batch_top_k(rows[:0], k)] == [(0, k), (0, k)]


# -- top-k and top-p ------------------------------------------------------------------


def kept_ids(weights: list[float], k: int, p: float, min_p: float) -> set[int]:
    """The definition, with exactly rounded sums."""
    if min_p:
        likely = {i for i, weight in enumerate(weights) if weight >= min_p * max(weights)}
        return likely & kept_ids(weights, k, p, 0.0)
    order = first_ids(weights, k)
    total = math.fsum(weights[i] for i in order)
    if p >= 1:
        return set(order)
    ids: set[int] = set()
    for i in order:
        if math.fsum(weights[j] for j in ids) >= p * total:
            break
        ids.add(i)
    return ids


@given(
    SIZES,
    st.integers(0, 2**32),
    st.lists(
        st.tuples(
            st.sampled_from([1, 5, 300, 10**6]),
            st.sampled_from([0.01, 0.37, 0.93, 1.0]),
            st.sampled_from([0.0, 0.0, 1 / 64, 0.4, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_weights_outside_the_limits_are_0_and_others_as_they_were(
    size: int, seed: int, limits: list[tuple[int, float, float]]
) -> None:
    generator = np.random.default_rng(seed)
    drawn = generator.choice([1.0, 2.0, 5.0, 100.0], (len(limits), size)) * generator.choice(
        [1.0, 1 / 64], (len(limits), size)
    )
    weights = torch.from_numpy(drawn).float()
    before = weights.clone()
    rows = weights.tolist()
    expected = [
        kept_ids(row, min(k, size), p, min_p)
        for row, (k, p, min_p) in zip(rows, limits, strict=True)
    ]
    truncated = truncate(weights, Truncation(*map(np.array, zip(*limits, strict=True))))
    assert torch.equal(weights, before)
    for row, limited, ids in zip(rows, truncated.tolist(), expected, strict=True):
        assert limited == [value if i in ids else 0.0 for i, value in enumerate(row)]


def test_limits_apply_if_any_of_them_may_exclude_a_token() -> None:
    limits = {
        Truncation(): False,
        Truncation(10): False,
        Truncation(9): True,
        Truncation(top_p=0.99): True,
        Truncation(min_p=0.01): True,
        Truncation(10, 1.0, 0.0): False,
    }
    for limit, applies in limits.items():
        assert limit.applies(10) == applies
    assert Truncation.of_rows([*limits]).applies(10).tolist() == [*limits.values()]


@pytest.mark.parametrize("top_k", [4, 3])
def test_no_token_is_added_to_those_that_have_the_share_exactly(top_k: int) -> None:
    weights = torch.tensor([[0.25, 0.5, 0.25, 0.0], [0.0, 0.5, 0.5, 1.0], [0.25] * 4])
    expected = torch.tensor([[0, 0.5, 0, 0], [0, 0, 0, 1.0], [0.25, 0.25, 0, 0]])
    assert torch.equal(truncate(weights, Truncation(top_k, 0.5)), expected)


def test_top_k_keeps_weights_that_do_not_change_the_sum() -> None:
    weights = torch.tensor([[1.0, 1e-25, 1e-20, 1e-30]])
    assert truncate(weights, Truncation(3)).tolist() == [[*weights[0, :3].tolist(), 0.0]]


@pytest.mark.parametrize("candidates", [(2, 5), (300,), (10**6,)])
@pytest.mark.parametrize("method", ["radix search", "sort"])
def test_the_number_of_candidates_changes_no_result(
    method: str, candidates: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    weights = torch.softmax(torch.rand(30, 1300, generator=generator) ** 8 * 9, -1)
    ks = np.array([1300, 1300, 40] * 10)
    ps = np.array([0.02, 0.9, 0.5, 1.0, 0.4] * 6)
    expected = truncate(weights, Truncation(ks, ps))
    monkeypatch.setattr(truncation, "_CANDIDATES", candidates)
    if method == "sort":  # as on GPUs
        monkeypatch.setattr(truncation, "_with_share", by_sorting)
    assert torch.equal(truncate(weights, Truncation(ks, ps)), expected)
    for row in range(30):
        one = slice(row, row + 1)
        assert torch.equal(truncate(weights[one], Truncation(ks, ps).of(one)), expected[one])


def by_sorting(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    unlimited = np.full(len(weights), weights.shape[1])
    largest = truncation._sort_weights(weights)
    return truncation._limit_weights(weights, largest, unlimited, top_p.numpy())[0]


@pytest.mark.parametrize("size", [1, 700, 30_000])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.3, 3.0, 30.0])
def test_top_p_of_any_distribution_has_the_fewest_weights(size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(8)
    weights = torch.softmax(scale * torch.randn(5, size, generator=generator), -1)
    weights[:, ::7] = 0.0  # of a mask
    weights[4] = 0.0
    shares = torch.tensor([1e-9, 0.5, 0.95, 1 - 1e-9, 0.5]).double()
    limited = truncation._with_share(weights, shares)
    for row, kept, share in zip(weights, limited, shares.tolist(), strict=True):
        ids = kept.nonzero()[:, 0]
        assert torch.equal(kept[ids], row[ids])
        ordered = row.double().sort(descending=True).values.tolist()
        assert (
            kept.double().sort(descending=True).values.tolist()[: len(ids)]
            == (ordered[: len(ids)])
        )
        total = share * math.fsum(ordered)
        assert math.fsum(ordered[: len(ids)]) >= total * (1 - 1e-12)
        assert not len(ids) or math.fsum(ordered[: len(ids) - 1]) < total * (1 + 1e-12)


def test_only_rows_whose_candidates_do_not_suffice_are_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    with_share = truncation._with_share

    def counted(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        sizes.append(len(weights))
        return with_share(weights, top_p)

    monkeypatch.setattr(truncation, "_with_share", counted)
    weights = torch.full((6, 20_000), 1e-9)
    weights[:, 7] = 1.0
    weights[2] = 1 / 20_000
    truncated = truncate(weights, Truncation(top_p=0.9))
    assert sizes == [1]
    assert truncated.count_nonzero(-1).tolist() == [1, 1, 18_000, 1, 1, 1]
