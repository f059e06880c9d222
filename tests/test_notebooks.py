"""The notebooks of docs/tutorials/ print and plot what they show."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from documents import REPOSITORY

path = REPOSITORY / "scripts" / "run_notebooks.py"
spec = importlib.util.spec_from_file_location("run_notebooks", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def printed(cell):
    return "".join(line for output in cell["outputs"] for line in output.get("text", ()))


def plots(cell):
    return sum("data" in output for output in cell["outputs"])


@pytest.mark.parametrize("path", script.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_the_outputs_of_its_cells(path):
    stored = script.code_cells(json.loads(path.read_text("utf-8")))
    found = script.code_cells(script.run_notebook(path))
    for before, now in zip(stored, found, strict=True):
        assert printed(now) == printed(before), "run python scripts/run_notebooks.py"
        assert plots(now) == plots(before)
    assert any(map(printed, stored))


def test_the_outputs_do_not_depend_on_an_extra_of_genlm_hf(monkeypatch):
    """The notebook installs genlm-hf alone, so it is run as if peft were not installed."""
    monkeypatch.setitem(sys.modules, "peft", None)
    path = next(path for path in script.NOTEBOOKS if path.stem == "first-steps")
    test_a_notebook_shows_the_outputs_of_its_cells(path)


def test_there_are_two_notebooks_and_one_plots():
    shown = {
        path.stem: sum(map(plots, script.code_cells(json.loads(path.read_text("utf-8")))))
        for path in script.NOTEBOOKS
    }
    assert shown == {"first-steps": 0, "steering": 2}
