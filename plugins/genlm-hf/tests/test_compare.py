"""`genlm compare` finds a window that an engine ignores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from genlm.testing import TinyModel, families

ENGINE = """
from genlm_hf.engine import HFEngine

def windowless(model, **options):
    return HFEngine(model, **options, hf_opts={"sliding_window": None})
"""
PLUGIN = """
import genlm
@genlm.hookimpl
def genlm_backends():
    yield genlm.BackendSpec("windowless", "engine", "windowless_engine:windowless")
"""


def test_an_ignored_window_is_found_beyond_it(tmp_path: Path) -> None:
    (tmp_path / "windowless_engine.py").write_text(ENGINE)
    (tmp_path / "windowless_plugin.py").write_text(PLUGIN)
    info = tmp_path / "windowless-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: windowless\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[genlm]\nwindowless = windowless_plugin\n")
    model = TinyModel.of(tmp_path / "model", families()["mistral with a window of 16"])
    code = "from genlm.cli import main; main()"
    command = [sys.executable, "-c", code, "compare", str(model.path), "--json"]
    command += ["--backends", "hf,windowless"]
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["family"] == "MistralForCausalLM + sliding_window"
    assert (report["longest"], report["not_reached"]) == (64, [])
    apart = report["engines"][1]["differences"]
    assert apart["largest"] > 0.1
    assert int(apart["where"].split()[-2]) > 16
