"""vLLM withstands a short run; `make chaos` has the long ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.chaos.chaos import Report, Settings, run_chaos

from genlm_vllm.conformance import targets


def chaos(folder: Path, model: str, **settings: Any) -> Report:
    (target,) = (each for each in targets(folder) if each.model == model)
    return run_chaos(target, Settings(seed=3, **settings))


def test_one_process_withstands_chaos(tmp_path: Path) -> None:
    report = chaos(tmp_path, "one process", requests=1000)
    assert report.compared >= 200
    for what in ("cache_hits", "joined", "answered", "failed", "abandoned"):
        assert report.statistics[what] > 0, what


@pytest.mark.parametrize("workers", [1, 2])
def test_every_request_ends_when_a_process_is_killed_midway(
    tmp_path: Path, workers: int
) -> None:
    options = {"tensor_parallel_size": workers}
    report = chaos(
        tmp_path, "own processes", requests=600, kill_worker=True, engine_options=options
    )
    assert report.ended["answered"] > 0
    assert report.ended["died"] > 0
