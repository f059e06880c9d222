"""`scripts/architectures.py` records results, crashes and hangs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import architecture_tables
import pytest
from documents import REPOSITORY

from genlm.testing import families

NAMES = ["gpt2", "llama", "mixtral", "qwen3", "mpt"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = REPOSITORY / "scripts" / "architectures.py"
    spec = importlib.util.spec_from_file_location("architectures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def row(name: str, status: str, error: float | None = None, **changes: Any) -> dict[str, Any]:
    """A line of results."""
    found = {"family": name, "key": name, "status": status, "error": error, "reason": ""}
    return {**found, "statistics": {}, **changes}


def test_a_crash_is_a_row_and_the_families_after_it_are_measured(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def process(backend: str, names: Sequence[str], results: Path, timeout_s: float) -> str:
        started.append(list(names))
        for name in names:
            if name == "mixtral":
                return "the process ended with exit code -11: "
            script.write_line(results, row(name, "right", 1e-6))
        return ""

    monkeypatch.setattr(script, "run_process", process)
    script.measure_all("hf", NAMES, tmp_path / "rows", 60)
    found = script.measured(tmp_path / "rows")
    assert sorted(found) == sorted(NAMES)
    assert found["mixtral"]["status"] == "fails"
    assert "exit code -11" in found["mixtral"]["reason"]
    assert started == [NAMES, ["qwen3", "mpt"]]
    script.measure_all("hf", [*NAMES, "opt"], tmp_path / "rows", 60)
    assert started[2:] == [["opt"]]  # what is measured is not measured again


def test_a_process_that_hangs_or_dies_is_described(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, hanging = tmp_path / "dying.py", tmp_path / "hanging.py"
    dying.write_text("import os; print('no such kernel', flush=True); os._exit(7)")
    hanging.write_text("import threading; threading.Event().wait()")
    monkeypatch.setattr(script, "__file__", str(dying))
    why = script.run_process("hf", ["gpt2"], tmp_path / "rows", 60)
    assert why == "the process ended with exit code 7: no such kernel"
    monkeypatch.setattr(script, "__file__", str(hanging))
    why = script.run_process("hf", ["gpt2"], tmp_path / "rows", 1)
    assert why == "no result within 1 s"


def test_a_table_is_read_as_it_was_written(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {name: one for name, one in families().items() if name in NAMES}
    rows = {
        "gpt2": row("gpt2", "right", 1.94e-6, statistics={"execution_path": "packed"}),
        "llama": row("llama", "wrong", 0.31, reason="largest after 17 tokens"),
        "mixtral": row("mixtral", "refused", reason="it has\ntwo lines | and a bar"),
        "qwen3": row("qwen3", "fails", reason="IndexError"),
        "mpt": row("mpt", "wrong", float("nan")),
    }
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "hf-architectures.md"
    page.write_text(script.table("hf", listed, rows))
    monkeypatch.setattr(architecture_tables, "REPOSITORY", tmp_path)
    found = architecture_tables.read_table("hf")
    assert list(found) == list(listed)
    assert found["gpt2"] == ("right", "packed", 1.9e-6, 1e-4, "")
    assert found["llama"] == ("wrong", "", 0.31, 1e-4, "largest after 17 tokens")
    assert found["mixtral"].note == "it has two lines | and a bar"
    assert found["mixtral"].error is None
    assert str(found["mpt"].error) == "nan"


def test_only_families_that_were_never_wrong_are_verified(script: ModuleType) -> None:
    rows = [
        row("a", "right", 1e-6, key="Llama"),
        row("b", "right", 3.14e-6, key="Llama"),
        row("c", "right", 1e-6, key="Mistral"),
        row("d", "wrong", 1.0, key="Mistral"),
        row("e", "right", 1e-6, key="Phi"),
        row("f", "fails", key="Phi"),
        row("g", "refused", key="Mpt"),
        row("h", "right", 2e-6, key="Bloom"),
        row("i", "refused", key="Bloom"),
    ]
    found = script.verified("hf", {one["family"]: one for one in rows})
    assert found["errors"] == {"Bloom": 2e-6, "Llama": 3.1e-6}
    assert "torch" in found["versions"]
    assert json.loads(json.dumps(found)) == found
