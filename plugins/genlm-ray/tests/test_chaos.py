"""Replicas on Ray withstand a short run; `make chaos` has the long one."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.chaos import Settings, run_chaos

from genlm_ray.conformance import targets


def test_two_replicas_withstand_chaos(tmp_path: Path) -> None:
    target = next(target for target in targets(tmp_path) if target.model == "private")
    report = run_chaos(target, Settings(requests=600, seed=3))
    assert report.compared >= 200
    for name in ("cache_hits", "joined", "answered", "failed", "abandoned"):
        assert report.statistics[name] > 0, name
