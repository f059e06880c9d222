"""`load_model(..., progress=True)` shows what a model that loads is doing."""

from __future__ import annotations

import contextvars
import re
import threading

import pytest

import genlm
from genlm import ModelLoadError
from genlm.core.base import progress
from genlm.core.base.progress import Stages, show_stages
from genlm.plugin import loading_stage


def visible_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on standard error as a terminal shows them in the end."""
    output, errors = capsys.readouterr()
    assert output == ""
    return [line.rpartition("\r")[2].rstrip() for line in errors.split("\n") if line.strip()]


def test_each_stage_is_a_line_with_its_time(capsys):
    with genlm.load_model("demo", "reference", progress=True) as llm:
        assert llm.model_name == "demo"
    first, second, last = visible_lines(capsys)
    assert re.fullmatch(r"genlm: importing reference \d\d:\d\d", first)
    assert re.fullmatch(r"genlm: first row \d\d:\d\d", second)
    assert re.fullmatch(r"genlm: ready after \d+\.\d s", last)


def test_nothing_is_shown_unless_it_is_asked_for(capsys):
    genlm.load_model("demo", "reference").close()
    assert loading_stage("nothing") is False
    assert visible_lines(capsys) == []


def test_a_model_that_does_not_load_ends_its_lines(capsys):
    with pytest.raises(ModelLoadError):
        genlm.load_model("demo", "reference", progress=True, order=0)
    assert "failed after" in visible_lines(capsys)[-1]
    assert loading_stage("afterwards") is False


def test_the_first_row_is_computed_before_the_model_is_ready(capsys, monkeypatch):
    from genlm.core.model import loading

    reports = []
    first_row = loading._first_row
    monkeypatch.setattr(
        loading,
        "_first_row",
        lambda engine: reports.append(visible_lines(capsys)) or first_row(engine),
    )
    genlm.load_model("demo", "reference", progress=True).close()
    assert "genlm: first row" in reports[0][-1]
    assert "ready" in visible_lines(capsys)[-1]


def test_the_time_of_a_long_stage_goes_on(monkeypatch):
    monkeypatch.setattr(progress, "TICK_S", 0.001)
    refreshed = threading.Event()
    with Stages() as stages:
        stages.begin("weights")
        monkeypatch.setattr(stages._bar, "refresh", refreshed.set)
        assert refreshed.wait(120)


def test_stages_of_two_models_do_not_mix():
    with show_stages(enabled=True):
        in_first = contextvars.copy_context()
    with show_stages(enabled=True):
        assert in_first.run(loading_stage, "first")
        assert loading_stage("second")
        first, second = in_first[progress._current], progress._current.get()
        assert (first._bar.desc, second._bar.desc) == ("genlm: first", "genlm: second")
    first._close()
