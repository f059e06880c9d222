"""`genlm bench` measures what it says, and reports all of it."""

from __future__ import annotations

import json
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from scripted import ScriptedEngine
from typer.testing import CliRunner, Result

import genlm
from genlm import Vocabulary
from genlm.cli import app, engine_process
from genlm.cli.measurement import Plan, first_row_s, measure

PLAN = Plan(lengths=(3, 5), batch_sizes=(1, 4), repeats=2, steps=3, most_tokens=18, seed=0)
SMALL = ("--lengths", "4,16", "--batches", "1,3", "--repeats", "1", "--steps", "1")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "reference", "demo", *SMALL, *arguments])


def test_every_batch_of_new_contexts_is_continued_token_by_token() -> None:
    engine = ScriptedEngine()
    with genlm.AsyncLM(lambda: engine, output_cache=genlm.OutputCache(0)) as llm:
        cells = list(measure(llm, PLAN))
    assert [(cell.context_tokens, cell.batch_size) for cell in cells] == [
        (3, 1),
        (3, 4),
        (5, 1),
    ]
    assert all(cell.new_rows_per_s > 0 < cell.continued_rows_per_s for cell in cells)
    batches = iter(engine.batches)
    for length, size in [(3, 1), (3, 4), (5, 1)]:
        for _ in range(PLAN.repeats + 1):
            before = sorted(next(batches))
            assert [len(ids) for ids in before] == [length] * size
            for _ in range(PLAN.steps):
                after = sorted(next(batches))
                assert [ids[:-1] for ids in after] == before
                before = after
    assert not list(batches)


def test_contexts_fit_the_model_with_their_continuations() -> None:
    assert PLAN.within(None).batches == [(3, 1), (3, 4), (5, 1)]
    assert PLAN.within(7).batches == [(3, 1), (3, 4), (4, 1), (4, 4)]
    with genlm.AsyncLM(lambda: ScriptedEngine(max_context=7)) as llm:
        assert len(list(measure(llm, PLAN))) == 4
        assert first_row_s(llm, 7) > 0


def test_contexts_have_tokens_of_text_also_if_most_low_ids_are_others() -> None:
    engine = ScriptedEngine()
    size = engine.vocabulary.size
    special = range(size - 4)
    engine.vocabulary = Vocabulary(
        SimpleNamespace(all_special_ids=[*special]),
        engine.vocabulary.byte_vocab,
        engine.vocabulary.str_vocab,
    )
    with genlm.AsyncLM(lambda: engine, output_cache=genlm.OutputCache(0)) as llm:
        assert llm.vocabulary.special_ids == {*special}
        assert first_row_s(llm, 30) > 0
    [[ids]] = engine.batches
    assert {*ids} == {size - 4, size - 3}


def test_the_report_has_every_field() -> None:
    result = bench("--json", "--options", '{"order": 2}')
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert (report["max_context"], report["shortened"]) == (None, [])
    assert "device_memory_bytes" in report
    assert (report["backend"], report["options"]) == ("reference", {"order": 2})
    assert report["engine"]["order"] == 2
    assert len(report["cells"]) == 4
    assert report["load_s"] > 0 < report["first_row_s"]
    assert report["peak_memory_bytes"] > 2**20
    assert "torch" in report["environment"]["libraries"]


def test_peak_memory_is_measured_without_the_module_resource(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Windows."""
    windows = SimpleNamespace(peak_wset=2**21)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _process: windows)
    module = runpy.run_path(str(engine_process.__file__))
    assert module["peak_memory"]() == 2**21


def test_the_table_has_a_row_for_each_length() -> None:
    lines = bench("--most-tokens", "20").stdout.splitlines()
    cells = [line.split() for line in lines if line.split()[:1] in (["4"], ["16"])]
    assert [(cell[0], len(cell)) for cell in cells] == [("4", 3), ("16", 3)] * 2
    assert [cell[2] == "-" for cell in cells] == [False, True] * 2, "48 tokens are too many"
    assert "first row" in lines[2]


def test_lengths_beyond_the_context_are_named_and_replaced() -> None:
    context = ("--options", '{"max_context": 9}', "--lengths", "4,16,100")
    report = json.loads(bench(*context, "--json").stdout)
    assert (report["max_context"], report["shortened"]) == (9, [16, 100])
    assert {cell["context_tokens"] for cell in report["cells"]} == {4, 8}
    output = " ".join(bench(*context).stdout.split())
    assert "--lengths 16,100: the model has a context of 9 tokens; measured 8 in" in output
    assert "--lengths" not in bench("--lengths", "4").stdout


def test_batches_that_are_left_out_are_explained() -> None:
    lines = bench("--most-tokens", "12").stdout.splitlines()
    assert [line.split() for line in lines if line.startswith("    16")] == [
        ["16", "-", "-"]
    ] * 2
    assert lines[-1] == "-: not measured, more than 12 tokens (--most-tokens)"
    assert "not measured" not in bench().stdout


@pytest.mark.parametrize(
    "wrong",
    [
        ("--lengths", "a"),
        ("--batches", "0"),
        ("--options", "[]"),
        ("--options", "{"),
        ("--steps", "9", "--options", '{"max_context": 9}'),
        ("--most-tokens", "3"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(wrong: tuple[str, ...]) -> None:
    result = bench(*wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.output
