"""`genlm compare` finds a window that an engine ignores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from genlm.cli import app, engine_process
from genlm.testing import TinyModel, families


def test_an_ignored_window_is_found_beyond_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyModel.of(tmp_path / "model", families()["mistral with a window of 16"])
    monkeypatch.setattr(
        engine_process,
        "compute_in_process",
        lambda request, _: engine_process.compute_here(request),
    )
    options = {"genlm-hf:hf": {"hf_opts": {"sliding_window": None}}}
    arguments = ["compare", str(model.path), "--json", "--backends", "hf,genlm-hf:hf"]

    result = CliRunner().invoke(app, [*arguments, "--options", json.dumps(options)])
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["family"] == "MistralForCausalLM + sliding_window"
    assert (report["longest"], report["not_reached"]) == (64, [])
    apart = report["engines"][1]["differences"]
    assert apart["largest"] > 0.1
    assert int(apart["where"].split()[-2]) > 16
