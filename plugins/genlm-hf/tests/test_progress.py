"""Loading writes nothing to the terminal and leaves transformers' settings alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

import genlm
from genlm_hf.engine import HFEngine
from genlm_hf.progress import hidden_progress_bars


def bars_of(factory: Any, args: Any, kwargs: Any) -> Any:
    """A hook as programs install it: notes the bars, shows none."""
    _descriptions.append(kwargs.get("desc"))
    return factory(*args, **kwargs | {"disable": True})


_descriptions: list[str] = []


def shows_bars(capfd: pytest.CaptureFixture[str]) -> bool:
    list(logging.tqdm(range(3), desc="counting"))
    return "counting" in capfd.readouterr().err


def test_loading_writes_nothing_and_bars_are_back_afterwards(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert shows_bars(capfd)
    HFEngine(folder, device="cpu").close()
    assert capfd.readouterr() == ("", "")
    assert shows_bars(capfd)


def test_progress_shows_stages_and_the_bars_of_the_weights(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    genlm.load_model(folder, "hf", device="cpu", progress=True).close()
    output = capfd.readouterr().err
    stages = ["importing hf", "config and tokenizer", "weights", "vocabulary"]
    stages += ["preparing and testing the execution path 'packed'", "first row", "ready"]
    places = [output.index(f"genlm: {stage} ") for stage in stages]
    assert places == sorted(places)
    assert "Loading weights" in output[places[2] : places[3]]


def test_bars_stay_away_until_the_last_of_several_loads_is_done(
    capfd: pytest.CaptureFixture[str],
) -> None:
    first, second = hidden_progress_bars(), hidden_progress_bars()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not shows_bars(capfd)
    second.__exit__(RuntimeError, RuntimeError("a load that failed"), None)
    assert shows_bars(capfd)


def test_a_programs_own_hook_stays_in_charge(folder: Path) -> None:
    assert logging.set_tqdm_hook(bars_of) is None
    try:
        HFEngine(folder, device="cpu").close()
        assert "Loading weights" in _descriptions
    finally:
        assert logging.set_tqdm_hook(None) is bars_of
