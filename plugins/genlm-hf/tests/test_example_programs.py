"""The programs in examples/ run on this engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_programs import PROGRAMS, output_of

from genlm import AsyncLM
from genlm_hf.engine import HFEngine


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLM]:
    with AsyncLM(lambda: HFEngine(folder)) as llm:
        yield llm


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_runs(
    llm: AsyncLM, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lines = output_of(name, llm, monkeypatch, capsys)
    assert len(lines) >= 3
    assert not any("nan" in line.partition("'")[0] for line in lines)  # texts follow quotes
