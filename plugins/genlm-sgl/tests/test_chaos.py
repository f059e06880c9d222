"""SGLang withstands a short run; `make chaos` has the long one."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.chaos import Settings, run_chaos

from genlm_sgl.conformance import targets


def test_sglang_withstands_chaos(tmp_path: Path) -> None:
    target = next(targets(tmp_path))
    report = run_chaos(target, Settings(requests=1000, seed=3))
    assert report.compared >= 200
    for name in ("cache_hits", "joined", "answered", "failed", "abandoned"):
        assert report.statistics[name] > 0, name
