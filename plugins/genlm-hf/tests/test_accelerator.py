"""The engine passes checks of the conformance suite on an accelerator.

The accelerator is simulated (`pretend_device`), which shows tensors that are on a wrong device.
These are the checks of all kinds of results that take a few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import SECOND, accelerated
from torch.testing import assert_close

import genlm
from genlm.testing import conformance_tests

CHECKS = (
    "batch-equals-map",
    "rows-belong-to-the-caller",
    "contexts-outlast-what-ends-requests",
    "reductions-are-of-the-row",
    "draws-are-those-of-the-seed",
    "scores-equal-the-loop-over-rows",
    "samples-are-those-of-the-seed",
    "adapters-mix-in-a-batch",
    "new-weights-are-used",
    "random-populations-agree-with-the-oracle",
    "random-programs-agree-with-the-oracle",
)


MEMBERS = 12
VOCABULARY = 1536  # of the demo model
MASKS = torch.from_numpy(np.random.default_rng(0).random((3, VOCABULARY)) < 0.2)
MASK_INDEX = torch.arange(MEMBERS) % 3
TOKENS = torch.arange(2 * MEMBERS).view(MEMBERS, 2)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tempered": {"temperature": np.linspace(0.0, 1.5, MEMBERS)},
    "masked": {"masks": MASKS[0]},
    "several masks": {"masks": MASKS, "mask_index": MASK_INDEX},
    "biased": {"bias": MASKS[MASK_INDEX].float()},
    "weighted": {"bias": torch.arange(MEMBERS) / 4},
    "limited": {"top_p": 0.8, "top_k": 50, "min_p": 0.01},
}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with accelerated(monkeypatch):
        yield


test_on_an_accelerator = pytest.mark.usefixtures("accelerator")(
    conformance_tests("hf", models=["llama"], only=CHECKS, no_skips=True)
)


def results_of(population: genlm.Population) -> dict[str, Any]:
    """Return results of all methods of a population, by the method and its settings."""
    rows = population.next_token_logprobs_sync()
    results: dict[str, Any] = {
        "rows": rows,
        "top": population.top_tokens_sync(3),
        "mass": population.log_mass_sync(MASKS, mask_index=MASK_INDEX),
        "several": population.draw_without_replacement_sync(4, MASKS[0], seed=1),
        "sample": population.sample_sync(3, MASKS[0], seed=1).token_ids,
        "function": population.reduce_sync(lambda rows: rows.exp().square().sum(-1)),
    }
    for name, settings in SETTINGS.items():
        results[f"draw, {name}"] = population.draw_sync(seed=1, **settings)
        results[f"draw from rows, {name}"] = population.draw_sync(rows=rows, seed=1, **settings)
        results[f"tokens, {name}"] = population.token_logprobs_sync(TOKENS, **settings)
        results[f"scores, {name}"] = population.score_sync(TOKENS, **settings)
    return results


def test_results_of_populations_are_those_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> dict[str, Any]:
        with genlm.load_model("demo", "hf") as llm:
            members = llm.population(llm.encode("The function returns"), MEMBERS)
            return results_of(members.extend(members.draw_sync(seed=0).token_ids))

    expected = results()
    with accelerated(monkeypatch):
        found = results()
    assert found.pop("rows").device == SECOND
    assert_close({"rows": expected["rows"], **found}, expected, atol=1e-4, rtol=0)
