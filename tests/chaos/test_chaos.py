"""Engines withstand a short run; `make chaos` has the long ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genlm.testing.run import find, targets_of

from .chaos import Settings, run_chaos
from .plan import Plan, Setting

ENDS = {"answered", "cancelled", "refused", "reset", "closed"}


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        pytest.param("reference", {}, id="reference"),
        pytest.param("hf", {}, id="hf"),
        pytest.param("hf", {"kv_budget_bytes": 20_000}, id="hf with little room"),
        pytest.param("mlx", {"kv_budget_bytes": 20_000}, id="mlx with little room"),
        pytest.param(
            "llamacpp", {"n_ctx": 128, "n_seq_max": 6}, id="llamacpp with little room"
        ),
    ],
)
def test_an_engine_withstands_chaos(
    engine: str, options: dict[str, Any], tmp_path: Path
) -> None:
    target = targets_of(find(engine), tmp_path)[0]
    report = run_chaos(target, Settings(requests=1500, seed=3, engine_options=options))
    assert report.requests >= 1500
    assert report.ended.keys() >= ENDS
    assert report.compared >= 200
    for what in ("cache_hits", "joined", "answered", "failed", "abandoned"):
        assert report.statistics[what] > 0, what


def test_a_seed_always_asks_the_same() -> None:
    def rounds(seed: int) -> list[Any]:
        setting = Setting(
            seed=seed,
            token_ids=range(5, 30),
            vocab_size=30,
            max_length=12,
            max_context=20,
            adapters=("red",),
            keeps_prefixes=True,
        )
        plan = Plan(setting, "caller", at_most=8)
        return [plan.next_round() for _ in range(50)]

    assert rounds(1) == rounds(1)
    assert rounds(1) != rounds(2)
