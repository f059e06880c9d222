"""Names of genlm 1.0 that were replaced work until 1.1, with a DeprecationWarning."""

from __future__ import annotations

import dataclasses
import json

import pytest
from scripted_target import scripted_target
from typer.testing import CliRunner

import genlm.testing
from genlm.cli import app
from genlm.testing import (
    QUICK,
    CheckTimeout,
    EngineFixture,
    Outcome,
    TrieFixture,
    TrieTarget,
    all_checks,
    cases_of,
)
from genlm.testing.checks import _FORMER_IDS
from genlm.testing.outcome import ExpectedFailures
from genlm.testing.selection import chosen


def deprecated(name: str):
    return pytest.warns(DeprecationWarning, match=f"{name}.* is deprecated .* until 1.1")


@pytest.mark.parametrize(
    ("former", "value"),
    [
        ("NeverEnded", CheckTimeout),
        ("EngineTrial", EngineFixture),
        ("TrieTrial", TrieFixture),
    ],
)
def test_former_classes_are_the_new_ones(former, value):
    with deprecated(former):
        assert getattr(genlm.testing, former) is value
    assert former not in genlm.testing.__all__


def test_targets_take_and_have_their_former_time_limit():
    with deprecated("TrieTarget"):
        target = TrieTarget(model="numpy", build=len, patience_s=3)
    assert target.timeout_s == 3
    with deprecated("EngineTarget"):
        engine = dataclasses.replace(scripted_target(), patience_s=4)
    assert engine.timeout_s == 4
    with deprecated("EngineTarget.patience_s"):
        assert engine.patience_s == 4
    assert dataclasses.replace(engine, timeout_s=5).timeout_s == 5


def test_timeouts_and_fixtures_have_their_former_time_limit():
    with deprecated("CheckTimeout.patience_s"):
        assert CheckTimeout("a call", 2.0).patience_s == 2
    with deprecated("CheckTimeout"):
        assert CheckTimeout("a call", patience_s=2.0).timeout_s == 2
    target = TrieTarget(model="numpy", build=len, timeout_s=7)
    with TrieFixture(target, QUICK, 0) as fixture, deprecated("Fixture.patience_s"):
        assert fixture.patience_s == 7


def test_checks_and_outcomes_have_their_former_law():
    check = all_checks("engine")[0]
    with deprecated("Check.law"):
        assert check.law == check.property
    with deprecated("Outcome"):
        outcome = Outcome(id="a[b]", law="It holds.", status="passed")
    with deprecated("Outcome.law"):
        assert outcome.law == outcome.property == "It holds."


def test_former_ids_of_checks_can_be_named(tmp_path):
    cases = cases_of([scripted_target()])
    for former in ("bad-requests-hurt-nobody", "bad-requests-hurt-nobody[scripted]"):
        with deprecated(former.replace("[", r"\[")):
            (case,) = chosen(cases, [former], [])
        assert case.check.id == "bad-requests-fail-alone"
    (tmp_path / "xfail.txt").write_text("results-come-as-asked[cpu]: issue 3")
    with deprecated("results-come-as-asked"):
        expected = ExpectedFailures.read(tmp_path / "xfail.txt")
    assert expected.reasons == {"results-have-the-requested-type[cpu]": "issue 3"}


def test_former_ids_name_checks_that_exist():
    ids = {check.id for kind in ("engine", "trie") for check in all_checks(kind)}
    assert set(_FORMER_IDS.values()) <= ids
    assert not set(_FORMER_IDS) & ids


def test_json_reports_have_the_former_key():
    arguments = ["check", "reference", "--only", "rows-are-distributions", "--json"]
    (outcome,) = json.loads(CliRunner().invoke(app, arguments).stdout)["outcomes"]
    assert outcome["law"] == outcome["property"]
