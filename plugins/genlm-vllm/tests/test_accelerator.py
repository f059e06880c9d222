"""The engine passes checks of the conformance suite if its logits are on an accelerator.

The accelerator is simulated (`pretend_device`), which shows tensors that are on a wrong device.
vLLM itself runs on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from pretend_device import SECOND, simulated_devices

from genlm.prefix import PieceScores
from genlm.testing import conformance_tests
from genlm_vllm.row_sampler import RowSampler

CHECKS = (
    "rows-are-right",
    "reductions-are-of-the-row",
    "draws-are-those-of-the-seed",
    "scores-equal-the-loop-over-rows",
    "populations-equal-lists",
    "population-draws-are-those-of-the-seed",
    "populations-share-the-engine",
    "random-populations-agree-with-the-oracle",
    "samples-are-those-of-the-seed",
)


class BatchesOnDevice(deque[Any]):
    """Stored batches, whose logits are on the accelerator."""

    def append(self, batch: Any) -> None:
        logits, rows = batch
        super().append((logits.to(SECOND), rows))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    create, add = RowSampler.__init__, PieceScores.add

    def create_on_device(sampler: Any, runner: Any, batches: int) -> None:
        create(sampler, runner, batches)
        sampler._batches = BatchesOnDevice(maxlen=batches)

    def add_on_device(scores: Any, keys: Any, logits: Any) -> None:
        add(scores, keys, logits.to(SECOND))

    monkeypatch.setattr(RowSampler, "__init__", create_on_device)
    monkeypatch.setattr(PieceScores, "add", add_on_device)
    with simulated_devices(monkeypatch):
        yield


test_on_an_accelerator = pytest.mark.usefixtures("accelerator")(
    conformance_tests("vllm", models=["one process"], only=CHECKS, no_skips=True)
)
