"""Measures memory while the callers are paused, and checks that it has not grown.

Counts of Python's small blocks and live tensors are exact, so that a few thousand requests show
a leak. Resident memory also covers native code and other processes; it grows with every new
batch shape, for which libraries cache a kernel, so it is checked in long runs only.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy.ma  # noqa: F401 - numpy imports it at its first use, which takes 5,000 blocks
import psutil
import torch

from genlm.testing.check import expect

BLOCKS_A_REQUEST, FREE_BLOCKS = 0.1, 4_000
TENSORS_A_REQUEST, FREE_TENSORS = 0.01, 40
BYTES_A_REQUEST, FREE_MIB = 200, 32
RESIDENT_FROM_REQUESTS = 50_000


@dataclass(frozen=True)
class Memory:
    """Allocations while the callers are paused.

    Attributes:
        blocks: Python's small memory blocks.
        tensors: Live torch tensors created since `only_new_objects`.
        resident_mib: Resident memory of this process and its children.
    """

    blocks: int
    tensors: int
    resident_mib: float

    @classmethod
    def now(cls) -> Memory:
        """Measure after a garbage collection."""
        gc.collect()
        tensors = [type(each) for each in gc.get_objects()].count(torch.Tensor)
        return cls(sys.getallocatedblocks(), tensors, _resident_bytes() / 2**20)


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection: models have many."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def expect_flat(samples: Sequence[Memory], requests: int) -> Memory:
    """Raise `CheckFailure` if memory grew from the first two samples to the last two.

    Args:
        samples: At equal distances, after a warm-up.
        requests: Made between the first and the last.

    Returns:
        By how much it grew.
    """
    grown = Memory(
        _growth([each.blocks for each in samples]),
        _growth([each.tensors for each in samples]),
        round(_growth([each.resident_mib for each in samples]), 2),
    )
    limits = Memory(
        int(FREE_BLOCKS + BLOCKS_A_REQUEST * requests),
        int(FREE_TENSORS + TENSORS_A_REQUEST * requests),
        FREE_MIB + BYTES_A_REQUEST * requests / 2**20,
    )
    checked = ["blocks", "tensors"]
    if requests >= RESIDENT_FROM_REQUESTS:
        checked.append("resident_mib")
    for what in checked:
        series = [round(getattr(each, what)) for each in samples]
        expect(
            getattr(grown, what) <= getattr(limits, what),
            f"at most {getattr(limits, what):.0f} more {what} after {requests} requests",
            f"{getattr(grown, what):.0f} more: {series}",
        )
    return grown


def _growth(series: Sequence[float]) -> float:
    """From the higher of the first two to the lower of the last two; noise is not growth."""
    return min(series[-2:]) - max(series[:2])


def _resident_bytes() -> int:
    own = psutil.Process()
    total = 0
    for process in [own, *own.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
