"""Rows of another process in shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from genlm.plugin import PackedCompletions
from genlm_vllm.shared_rows import PackedResults, SharedRows


@pytest.fixture
def shared() -> Iterator[SharedRows]:
    memory = SharedRows()
    yield memory
    memory.close()


def numbers(count: int, size: int = 5000) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, size)).astype(np.float32)


def test_steps_of_any_sizes_follow_each_other(shared: SharedRows) -> None:
    worker = SharedRows(shared.address)
    for count in (2, 7, 1, 30, 30, 3):
        worker.write(numbers(count))
        assert np.array_equal(shared.read((count, 5000)), numbers(count))
    worker.close()


def test_the_same_path_on_another_machine_is_refused(shared: SharedRows) -> None:
    path, token = shared.address
    with pytest.raises(OSError, match="a different file"):
        SharedRows((path, bytes(len(token))))
    with pytest.raises(OSError, match="No such file"):
        SharedRows((f"{path}0000", token))


@pytest.mark.parametrize("is_shared", [True, False])
def test_results_keep_their_rows(shared: SharedRows, is_shared: bool) -> None:
    packed = PackedCompletions(b"results", numbers(4))
    results = PackedResults.of(packed, shared if is_shared else None)
    assert (results.packed.rows is None) is is_shared
    unpacked = results.with_rows(shared)
    assert unpacked.rows is not None
    assert unpacked.data == b"results"
    assert np.array_equal(unpacked.rows, numbers(4))
    assert PackedResults.of(PackedCompletions(b"", None), shared).with_rows(shared).rows is None


def test_rows_are_sent_where_memory_is_missing(
    shared: SharedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    results = PackedResults.of(PackedCompletions(b"", numbers(4)), shared)
    assert results.shape is None
    assert np.array_equal(results.with_rows(shared).rows, numbers(4))  # type: ignore[arg-type]
