"""`OutputCache` is a least-recently-used cache within both bounds that owns its rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm import Mask
from genlm.core.rows.output_cache import OutputCache
from genlm.core.rows.reductions import LogMass, TokenLogprobs, TopK

ROW_BYTES = 4 * 4


def row_of(value: float, length: int = 4) -> torch.Tensor:
    return torch.full((length,), value, dtype=torch.float32)


class ModelCache:
    """The promise in the plainest Python: values are numbers, sizes are lengths."""

    def __init__(self, max_entries: int, max_bytes: int | None) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.entries: OrderedDict[int, tuple[float, int]] = OrderedDict()

    def get(self, key: int) -> tuple[float, int] | None:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def put(self, key: int, value: float, length: int) -> None:
        self.entries.pop(key, None)
        if self.max_bytes is not None and 4 * length > self.max_bytes:
            return
        self.entries[key] = (value, length)
        while len(self.entries) > self.max_entries or (
            self.max_bytes is not None and self.nbytes > self.max_bytes
        ):
            self.entries.popitem(last=False)

    @property
    def nbytes(self) -> int:
        return sum(4 * length for _, length in self.entries.values())


KEYS = st.integers(0, 7)
ACTIONS = st.one_of(
    st.tuples(st.just("put"), KEYS, st.integers(1, 6)),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("clear")),
)


@given(
    max_entries=st.integers(0, 6),
    max_bytes=st.none() | st.integers(0, 80),
    actions=st.lists(ACTIONS, max_size=60),
)
def test_it_behaves_as_a_plain_lru_cache_with_both_bounds(
    max_entries: int, max_bytes: int | None, actions: list[tuple[Any, ...]]
) -> None:
    cache = OutputCache(max_entries, max_bytes=max_bytes)
    model = ModelCache(max_entries, max_bytes)
    for step, action in enumerate(actions):
        match action:
            case ("put", key, length):
                cache.put(key, row_of(step, length))
                model.put(key, step, length)
            case ("get", key):
                row, expected = cache.get(key), model.get(key)
                assert (row is None) == (expected is None)
                if row is not None and expected is not None:
                    assert row.tolist() == [expected[0]] * expected[1]
            case _:
                cache.clear()
                model.entries.clear()
        assert {key for key in range(8) if key in cache} == set(model.entries)
        assert len(cache) == len(model.entries)
        assert cache.nbytes == model.nbytes


def test_the_least_recently_used_row_leaves_first() -> None:
    cache = OutputCache(2)
    cache.put("a", row_of(1))
    cache.put("b", row_of(2))
    assert cache.get("a") is not None
    cache.put("c", row_of(3))
    assert ["a" in cache, "b" in cache, "c" in cache] == [True, False, True]


def test_looking_whether_a_key_is_kept_is_not_using_it() -> None:
    cache = OutputCache(2)
    cache.put("a", row_of(1))
    cache.put("b", row_of(2))
    assert "a" in cache
    cache.put("c", row_of(3))
    assert "a" not in cache


def test_it_says_how_full_it_is() -> None:
    cache = OutputCache(2000, max_bytes=4096)
    cache.put("a", row_of(1))
    assert repr(cache) == "<OutputCache: 1 of at most 2000 rows, 16 of at most 4,096 bytes>"
    assert repr(OutputCache(3)) == "<OutputCache: 0 of at most 3 rows, 0 bytes>"


def test_size_0_keeps_nothing() -> None:
    cache = OutputCache(0)
    cache.put("a", row_of(1))
    assert cache.get("a") is None
    assert len(cache) == cache.nbytes == 0


@pytest.mark.parametrize("bounds", [{"max_entries": 3}, {"max_bytes": 3 * ROW_BYTES}])
def test_overwriting_a_row_of_a_full_cache_evicts_nobody(bounds: dict[str, int]) -> None:
    cache = OutputCache(**{"max_entries": 99, **bounds})
    for key in "abc":
        cache.put(key, row_of(1))
    cache.put("c", row_of(7))
    assert [key in cache for key in "abc"] == [True] * 3
    assert cache.nbytes == 3 * ROW_BYTES
    row = cache.get("c")
    assert row is not None
    assert row.tolist() == [7.0] * 4


def test_a_larger_row_replaces_its_older_one_before_anybody_is_evicted() -> None:
    cache = OutputCache(9, max_bytes=3 * ROW_BYTES)
    cache.put("a", row_of(1))
    cache.put("b", row_of(1))
    cache.put("b", row_of(2, length=8))
    assert "a" in cache
    assert cache.nbytes == 3 * ROW_BYTES
    cache.put("b", row_of(3, length=9))
    assert "a" not in cache
    assert "b" in cache


def test_a_row_above_the_byte_bound_is_left_out_and_evicts_nobody() -> None:
    cache = OutputCache(9, max_bytes=2 * ROW_BYTES)
    cache.put("a", row_of(1))
    cache.put("big", row_of(2, length=9))
    assert "big" not in cache
    assert "a" in cache
    cache.put("exact", row_of(3, length=8))
    assert "exact" in cache


def test_a_row_that_is_left_out_does_not_leave_the_old_one_behind() -> None:
    cache = OutputCache(9, max_bytes=ROW_BYTES)
    cache.put("a", row_of(1))
    cache.put("a", row_of(2, length=5))
    assert cache.get("a") is None
    assert cache.nbytes == 0


def test_rows_are_copied_on_their_way_in_and_out() -> None:
    cache = OutputCache(2)
    given_row = row_of(1)
    cache.put("a", given_row)
    given_row.zero_()
    first = cache.get("a")
    assert first is not None
    assert first.tolist() == [1.0] * 4
    first.zero_()
    second = cache.get("a")
    assert second is not None
    assert second.tolist() == [1.0] * 4


def test_a_row_cut_from_a_batch_keeps_only_its_own_memory() -> None:
    cache = OutputCache(2)
    cache.put("a", torch.zeros(1000, 4)[3])
    stored, _, size = cache._entries["a"]
    assert stored.untyped_storage().nbytes() == size == cache.nbytes == ROW_BYTES


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_nbytes_is_the_memory_of_the_rows(dtype: torch.dtype) -> None:
    cache = OutputCache(9)
    for key in range(3):
        cache.put(key, torch.zeros(5, dtype=dtype))
    assert cache.nbytes == 3 * 5 * dtype.itemsize
    cache.clear()
    assert cache.nbytes == len(cache) == 0


def test_the_token_ids_of_keys_count_as_well() -> None:
    cache = OutputCache(9, max_bytes=2 * (ROW_BYTES + 8))
    for key in "abc":
        cache.put((object(), None, key.encode() * 8), row_of(1))
        assert cache.nbytes == len(cache) * (ROW_BYTES + 8)
    assert len(cache) == 2
    cache.put(b"x" * (2 * ROW_BYTES), row_of(1))
    assert cache.nbytes == 2 * (ROW_BYTES + 8), "too large alone, so nobody left for it"
    cache.put(b"x" * 16, row_of(1))
    assert cache.nbytes == ROW_BYTES + 16


def test_reductions_in_keys_count_as_well() -> None:
    cache, model = OutputCache(10), object()
    row_key = (model, None, b"12345678")
    mask = Mask([1, 2], 64)
    for count, reduction in enumerate((LogMass(mask), TopK(2), TokenLogprobs((1, 2, 3))), 1):
        before = cache.nbytes
        cache.put((row_key, reduction), torch.zeros(3))
        assert cache.nbytes - before == 12 + 8 + getattr(reduction, "nbytes", 0)
        assert len(cache) == count
    assert LogMass(mask).nbytes == mask.nbytes == 8
    assert TokenLogprobs((1, 2, 3)).nbytes == 3 * TokenLogprobs((1,)).nbytes > 0


@pytest.mark.parametrize(
    ("bounds", "named"),
    [({"max_entries": -1}, "max_entries=-1"), ({"max_bytes": -2}, "max_bytes=-2")],
)
def test_a_negative_bound_is_refused(bounds: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OutputCache(**{"max_entries": 1, **bounds})


@pytest.mark.parametrize(
    "result",
    [
        (torch.zeros(100), torch.zeros(100)),
        [torch.zeros(100), np.zeros(50)],
        {"first": torch.zeros(100), "other": [torch.zeros(50), (torch.zeros(50),)]},
    ],
)
def test_the_tensors_of_a_result_count(result: Any) -> None:
    cache = OutputCache(2, max_bytes=1000)
    cache.put("a", result)
    assert cache.nbytes == 800


class DeviceRow:
    """Stands for a tensor on an accelerator, so that moving it can be seen without one."""

    def __init__(self, kind: str, values: list[float]) -> None:
        self.device = torch.device(kind)
        self.values = values
        self.nbytes = 4 * len(values)

    def cpu(self) -> DeviceRow:
        return DeviceRow("cpu", list(self.values))

    def to(self, device: torch.device) -> DeviceRow:
        return DeviceRow(device.type, list(self.values))

    def clone(self) -> DeviceRow:
        return DeviceRow(self.device.type, list(self.values))


@pytest.mark.parametrize(("move_to_cpu", "kept_on"), [(True, "cpu"), (False, "cuda")])
def test_rows_wait_where_asked_and_return_to_their_device(
    move_to_cpu: bool, kept_on: str
) -> None:
    cache = OutputCache(2, move_to_cpu=move_to_cpu)
    given_row: Any = DeviceRow("cuda", [1.0, 2.0])
    cache.put("a", given_row)
    stored: Any = cache._entries["a"][0]
    assert stored.device.type == kept_on
    assert stored is not given_row
    assert cache.nbytes == 8
    returned: Any = cache.get("a")
    assert returned.device.type == "cuda"
    assert returned.values == [1.0, 2.0]
    assert returned is not stored


def test_rows_in_main_memory_are_copied_also_when_asked_to_move_there() -> None:
    cache = OutputCache(2, move_to_cpu=True)
    given_row = row_of(1)
    cache.put("a", given_row)
    given_row.zero_()
    row = cache.get("a")
    assert row is not None
    row.zero_()
    assert cache._entries["a"][0].tolist() == [1.0] * 4


@pytest.mark.parametrize("result", [0.5, "text", np.arange(3.0), (0.5, row_of(1))])
def test_results_that_are_no_rows_are_copied_also_when_rows_are_moved(result: Any) -> None:
    cache = OutputCache(2, move_to_cpu=True)
    cache.put("a", result)
    stored = cache.get("a")
    assert type(stored) is type(result)
    assert str(stored) == str(result)
    if isinstance(result, np.ndarray):
        stored[:] = 7
        assert cache.get("a").tolist() == result.tolist() == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_of_a_gpu_return_to_it_from_main_memory() -> None:
    cache = OutputCache(2, move_to_cpu=True)
    cache.put("a", row_of(1).cuda())
    assert cache._entries["a"][0].device.type == "cpu"
    row = cache.get("a")
    assert row is not None
    assert row.device.type == "cuda"
    assert row.tolist() == [1.0] * 4


def test_some_rows_can_be_forgotten_and_the_others_keep_their_order_of_use() -> None:
    cache = OutputCache(4)
    for key in "abcd":
        cache.put(key, row_of(1))
    assert cache.get("a") is not None
    cache.clear(lambda key: key in {"b", "d"})
    assert [key in cache for key in "abcd"] == [True, False, True, False]
    assert cache.nbytes == 2 * ROW_BYTES
    for key in "efg":
        cache.put(key, row_of(1))
    assert ["a" in cache, "c" in cache] == [True, False]


class LockedKey:
    """A key that is compared and hashed only while the cache is locked."""

    def __init__(self, cache: OutputCache) -> None:
        self.cache = cache

    def __hash__(self) -> int:
        assert self.cache._lock.locked()
        return 0

    def __eq__(self, other: object) -> bool:
        assert self.cache._lock.locked()
        return isinstance(other, LockedKey)


def test_the_order_of_use_is_touched_under_the_lock_alone() -> None:
    cache = OutputCache(1, max_bytes=ROW_BYTES)
    for _ in range(2):
        cache.put(LockedKey(cache), row_of(1))
        assert cache.get(LockedKey(cache)) is not None
    cache.put(LockedKey(cache), row_of(1, length=5))
    assert cache.get(LockedKey(cache)) is None


def test_threads_see_whole_rows_of_their_own_keys_within_the_bounds() -> None:
    cache = OutputCache(6, max_bytes=5 * ROW_BYTES)
    start = threading.Barrier(4)

    def work(thread: int) -> int:
        start.wait()
        hits = 0
        for step in range(2000):
            key = (7 * step + thread) % 9
            if step % 2:
                cache.put(key, row_of(key))
            row = cache.get(key)
            if row is not None:
                hits += 1
                assert row.tolist() == [float(key)] * 4
            if step % 500 == 499:
                cache.clear()
        return hits

    with ThreadPoolExecutor(4) as threads:
        hits = list(threads.map(work, range(4)))
    assert all(hits)
    assert len(cache) <= 5
    assert cache.nbytes == ROW_BYTES * len(cache)
