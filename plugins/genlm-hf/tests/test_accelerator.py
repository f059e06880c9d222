"""The engine passes checks of the conformance suite on an accelerator.

The accelerator is simulated (`pretend_device`), which shows tensors that are on a wrong device.
These are the checks of all kinds of results that take a few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pretend_device import SECOND, accelerated

import genlm
from genlm.testing import conformance_tests

CHECKS = (
    "batch-equals-map",
    "rows-belong-to-the-caller",
    "contexts-outlast-what-ends-requests",
    "reductions-are-of-the-row",
    "draws-are-those-of-the-seed",
    "scores-equal-the-loop-over-rows",
    "populations-equal-lists",
    "population-draws-are-those-of-the-seed",
    "populations-share-the-engine",
    "populations-have-their-adapter",
    "samples-are-those-of-the-seed",
    "adapters-mix-in-a-batch",
    "new-weights-are-used",
    "random-programs-agree-with-the-oracle",
)


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with accelerated(monkeypatch):
        yield


def test_rows_are_on_the_accelerator() -> None:
    with genlm.load_model("demo", "hf") as llm:
        assert llm.next_token_logprobs_sync([0]).device == SECOND


test_on_an_accelerator = conformance_tests("hf", models=["llama"], only=CHECKS, no_skips=True)
