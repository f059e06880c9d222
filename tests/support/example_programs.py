"""The programs in examples/, run as scripts on an engine's model.

The suites of all engines call `output_of` with a tiny model. `tests/` compares the results of
the programs with exact oracles.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import genlm

__all__ = ["PROGRAMS", "output_of"]

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = (
    *("awrs_json", "beam_search", "distil", "ensemble", "importance", "intersection"),
    *("power_mcmc", "power_smc", "reward_smc", "twisted"),
)
"""Programs that name their model and engine on the command line."""


def output_of(
    name: str, llm: genlm.AsyncLM, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> list[str]:
    """Return the lines that a program prints if `load_model` returns a given model.

    The model stays open. The second model of a program is its own. The test is skipped if the
    program needs a library that is not installed.
    """
    if name == "awrs_json":
        pytest.importorskip("xgrammar")
    script, load = str(EXAMPLES / f"{name}.py"), genlm.load_model

    def load_model(*chosen: str) -> genlm.AsyncLM:
        return llm if chosen == ("tiny", "engine") else load(*chosen)

    def close(self: genlm.AsyncLM, *error: object) -> None:
        if self is not llm:
            self.close()

    monkeypatch.setattr(genlm, "load_model", load_model)
    monkeypatch.setattr(genlm.AsyncLM, "__exit__", close)
    monkeypatch.setattr("sys.argv", [script, "tiny", "engine"])
    runpy.run_path(script, run_name="__main__")
    lines: list[str] = capsys.readouterr().out.splitlines()
    return lines
