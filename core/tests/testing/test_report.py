"""Reports as text and as JSON, and exit codes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import ClassVar

import pytest
from scripted_target import CertifiedEngine, scripted_target
from typer.testing import CliRunner

from genlm import Capability, ModelLoadError, find_backend
from genlm.cli import app
from genlm.testing import FULL, Outcome, all_checks

FEW = ["--only", "rows-are-right", "--only", "batch-equals-map"]


class LastRowFirst(CertifiedEngine):
    def evaluate(self, queries):
        return super().evaluate(queries).flip(0)


@pytest.fixture
def check(monkeypatch):
    """`genlm check reference ...` with another target in the reference engine's place."""

    def run(*arguments, **changes):
        target = scripted_target(**changes)
        monkeypatch.setattr("genlm.testing.core_targets.reference_targets", target)
        return CliRunner().invoke(app, ["check", "reference", *map(str, arguments)])

    return run


def xfail(tmp_path: Path, text: str) -> list[str | Path]:
    path = tmp_path / "xfail.txt"
    path.write_text(text)
    return ["--xfail", path]


def test_a_run_in_which_all_pass_exits_with_0_and_names_everything(check):
    result = check(*FEW, "--seed", 3)
    assert result.exit_code == 0, result.output
    for text in (
        "batch-equals-map[scripted]",
        "genlm-core:reference",
        "torch ",
        "device   cpu",
        "profile quick, seed 3",
        "2 passed",
        "only a complete run",
    ):
        assert text in result.output


@pytest.fixture
def suite_of_three(monkeypatch):
    """A suite that is quick to run whole."""
    ids = ("rows-are-right", "kept-prefixes-change-nothing", "texts-are-encoded-and-decoded")
    three = [check for check in all_checks("engine") if check.id in ids]
    monkeypatch.setattr("genlm.testing.run.all_checks", lambda _kind: three)


def test_a_whole_run_certifies_if_nothing_is_skipped(suite_of_three):
    result = CliRunner().invoke(app, ["check", "reference"])
    assert result.exit_code == 0, result.output
    assert "2 passed, 1 not applicable" in result.output
    assert "reference is certified" in result.output


def test_a_whole_run_with_a_check_skipped_does_not_certify(check, suite_of_three):
    result = check()
    assert result.exit_code == 0, result.output
    assert "texts-are-encoded-and-decoded[scripted]: the target names no texts" in result.output
    assert "certified" not in result.output


def test_a_listed_capability_that_no_engine_declares_does_not_certify(check, monkeypatch):
    class WithoutAdapters(CertifiedEngine):
        capabilities = frozenset()
        capability_hints: ClassVar = {Capability.LORA: "pass enable_lora=True"}

    ids = ("rows-are-right", "adapters-mix-in-a-batch")
    two = [check for check in all_checks("engine") if check.id in ids]
    monkeypatch.setattr("genlm.testing.run.all_checks", lambda _kind: two)
    result = check(build=WithoutAdapters)
    assert result.exit_code == 0, result.output
    assert "[scripted]: lora is not declared: pass enable_lora=True" in result.output
    assert "not certified: the BackendSpec lists lora, which no target's" in result.output
    assert "is certified" in check().output


def test_a_capability_that_does_not_exist_is_a_failure(check, monkeypatch):
    info = find_backend("reference")
    listed = dataclasses.replace(info, capabilities=("lora", "loras"))
    monkeypatch.setattr("genlm.testing.run.find", lambda _name: listed)
    result = check("--only", "capabilities-are-implemented")
    assert result.exit_code == 1
    assert "expected  values of `Capability` in BackendSpec.capabilities" in result.output
    assert "found     ['loras']" in result.output


def test_the_seed_and_the_profile_reach_the_check(check, monkeypatch):
    runs = []

    def run_case(case, profile, seed):
        runs.append((profile, seed))
        return Outcome(id=case.id, property=case.check.property, status="passed")

    monkeypatch.setattr("genlm.testing.run.run_case", run_case)
    check("--only", "rows-are-right", "--seed", 3, "--profile", "full")
    assert runs == [(FULL, 3)]


def test_a_failure_exits_with_1_and_shows_the_law_and_the_smallest_example(check):
    result = check(*FEW, build=LastRowFirst)
    assert result.exit_code == 1
    assert "FAILED batch-equals-map[scripted]" in result.output
    assert "property  Row i of a batch, or of concurrent requests" in result.output
    assert "expected  the row of (" in result.output
    assert "with      batch = [(" in result.output
    assert "1 passed, 1 failed" in result.output


class Logits(CertifiedEngine):
    def evaluate(self, queries):
        return super().evaluate(queries) + 3


def test_equal_causes_are_shown_once_and_rows_of_logits_are_recognised(check):
    checks = "rows-are-right", "batch-equals-map", "rows-are-distributions"
    options = [word for check_id in checks for word in ("--only", check_id)]
    result = check(*options, build=Logits)
    assert result.exit_code == 1
    assert result.output.count("FAILED") == 1
    likewise = next(line for line in result.output.splitlines() if "likewise" in line)
    assert likewise.count("[scripted]") == 2
    assert "return genlm.plugin.rows_from_logits(logits, self.vocabulary)" in result.output
    assert "3 failed" in result.output


def test_causes_that_differ_in_the_addresses_of_objects_are_equal(check):
    result = check(*FEW, build=type("Unfinished", (), {"__init__": lambda _engine: None}))
    assert re.search(r"returned <.* at 0x[0-9a-f]+>, which is not an engine", result.output)
    assert result.output.count("FAILED") == 1


def test_different_causes_are_shown_apart_without_that_hint(check):
    result = check(*FEW, "--only", "rows-are-distributions", build=LastRowFirst)
    assert result.output.count("FAILED") == 1
    assert "likewise" not in result.output
    assert "rows_from_logits" not in result.output


def test_a_run_that_fails_fast_ends_at_the_first_failure(check):
    checks = "rows-are-right", "batch-equals-map", "rows-are-distributions"
    options = [word for check_id in checks for word in ("--only", check_id)]
    result = check(*options, "--fail-fast", "--json", build=Logits)
    assert result.exit_code == 1
    assert [outcome["status"] for outcome in json.loads(result.stdout)["outcomes"]] == [
        "failed"
    ]


def test_the_json_report_has_every_field_of_every_outcome(check):
    result = check(*FEW, "--json", build=LastRowFirst)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["backend"] == "genlm-core:reference"
    assert report["versions"].keys() >= {"genlm-core", "torch", "hypothesis"}
    assert report["devices"] == ["cpu"]
    assert report["settings"]["seed"] == 0
    assert report["counts"] == {"passed": 1, "failed": 1}
    assert report["certified"] is False
    right, wrong = report["outcomes"]
    assert right["cases"] == {}
    assert wrong["id"] == "batch-equals-map[scripted]"
    assert wrong["example"].keys() >= {"position", "batch"}


def test_an_expected_failure_exits_with_0_and_gives_its_reason(check, tmp_path):
    expected = xfail(tmp_path, "batch-equals-map: rows are turned round")
    result = check(*FEW, *expected, build=LastRowFirst)
    assert result.exit_code == 0, result.output
    assert "expected failure" in result.output
    assert "rows are turned round" in result.output


def test_an_unexpected_pass_exits_with_1(check, tmp_path):
    result = check(*FEW, *xfail(tmp_path, "batch-equals-map: once"))
    assert result.exit_code == 1
    assert "UNEXPECTED PASS batch-equals-map[scripted]" in result.output


def test_an_expected_failure_of_no_check_exits_with_2(check, tmp_path):
    result = check(*FEW, *xfail(tmp_path, "batch-equals-mop: typo"))
    assert result.exit_code == 2
    assert "batch-equals-mop" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "no-such-check"],
        ["--profile", "slow"],
        ["--seed", "-1"],
        ["--model", "demo", "--dtype", "int8"],
        ["--model", "demo", "--dtype", "auto"],
        ["--dtype", "bfloat16"],
    ],
)
def test_what_does_not_exist_exits_with_2(check, arguments):
    assert check(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows-are-rihgt", "Did you mean 'rows-are-right'"),
        ("budget", "tight-budgets-change-nothing"),
        ("nope", "genlm check BACKEND --list"),
    ],
)
def test_an_unknown_check_is_answered_with_a_few_names(check, name, message):
    result = check("--only", name)
    assert message in " ".join(result.output.replace("│", " ").split())
    assert len(result.output.splitlines()) < 10


def test_a_trie_loads_no_model():
    result = CliRunner().invoke(app, ["check", "numpy", "--model", "demo"])
    assert result.exit_code == 2
    assert "'numpy' is a trie; only engines load a model" in result.output


def test_dtypes_are_spelled_as_people_do():
    arguments = ["--model", "demo", "--dtype", "bf16", "--only", "batch-equals-map", "--json"]
    result = CliRunner().invoke(app, ["check", "reference", *arguments])
    assert json.loads(result.stdout)["settings"]["dtype"] == "bfloat16"


def test_a_check_without_an_oracle_is_skipped_and_the_report_says_so():
    arguments = ["check", "reference", "--model", "demo", *FEW]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "rows-are-right[demo]: needs an oracle" in result.output
    assert "oracle   none" in result.output
    result = CliRunner().invoke(app, [*arguments, "--no-skips"])
    assert result.exit_code == 1
    assert "SKIPPED rows-are-right[demo]" in result.output


def test_a_model_that_cannot_be_loaded_is_one_error_and_no_failed_check():
    result = CliRunner().invoke(app, ["check", "reference", "--model", "no-such-file"])
    assert isinstance(result.exception, ModelLoadError)
    assert "'no-such-file'" in str(result.exception)
    assert result.output == ""


def test_the_list_has_every_check_with_its_law_and_runs_none(check):
    result = check("--list", build=pytest.fail)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines == [f"{c.id}[scripted]: {c.property}" for c in all_checks("engine")]


def test_the_list_can_be_json(check):
    result = check("--list", "--json", build=pytest.fail)
    expected = {f"{c.id}[scripted]": c.property for c in all_checks("engine")}
    assert json.loads(result.output) == expected
