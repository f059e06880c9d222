"""vLLM withstands a short run; `make chaos` has the long ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chaos.chaos import Report, Settings, run_chaos

from genlm_vllm.conformance import targets


def chaos(folder: Path, model: str, **settings: Any) -> Report:
    [target] = [target for target in targets(folder) if target.model == model]
    return run_chaos(target, Settings(**settings))


def test_one_process_withstands_chaos(tmp_path: Path) -> None:
    report = chaos(tmp_path, "one process", requests=800, seed=3)
    assert report.compared >= 200
    for name in ("cache_hits", "joined", "answered", "failed", "abandoned"):
        assert report.statistics[name] > 0, name


def test_every_request_ends_when_a_worker_is_killed_midway(tmp_path: Path) -> None:
    # This seed kills the worker; `make chaos` kills the engine's process.
    report = chaos(tmp_path, "own processes", requests=800, seed=1, kill_worker=True)
    assert report.ended["answered"] > 0
    assert report.ended["died"] > 0
