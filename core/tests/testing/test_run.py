"""Which cases a backend's name and the options select."""

from __future__ import annotations

import dataclasses
import os
import tempfile

import pytest
from scripted_target import CertifiedEngine, scripted_target

from genlm import find_backend
from genlm.plugin import BrokenPluginError
from genlm.testing import Settings, TrieTarget, all_checks, cases_of, prepared
from genlm.testing.run import find, select_cases, targets_of


@pytest.fixture
def cases():
    return cases_of([scripted_target(model="red"), scripted_target(model="blue")])


def test_every_check_runs_with_every_target(cases):
    checks = [check.id for check in all_checks("engine")]
    assert [case.id for case in cases] == [f"{c}[{m}]" for m in ("red", "blue") for c in checks]


def test_checks_cases_and_models_can_be_named(cases):
    only = ["rows-are-right", "batch-equals-map[blue]"]
    ids = [case.id for case in select_cases(cases, only, [])]
    assert ids == ["rows-are-right[red]", "rows-are-right[blue]", "batch-equals-map[blue]"]
    ids = [case.id for case in select_cases(cases, only, ["blue"])]
    assert ids == ["rows-are-right[blue]", "batch-equals-map[blue]"]


def test_a_misspelt_check_or_model_is_an_error_with_a_suggestion(cases):
    with pytest.raises(
        LookupError, match=r"no check 'rows-are-rihgt'\. Did you mean 'rows-are-r"
    ):
        select_cases(cases, ["rows-are-rihgt"], [])
    with pytest.raises(LookupError, match=r"no model 'bleu'\. Did you mean 'blue'"):
        select_cases(cases, [], ["bleu"])


def test_every_check_has_an_id_of_its_own_and_states_its_property_in_a_sentence():
    for kind in ("engine", "trie"):
        checks = all_checks(kind)
        assert len({check.id for check in checks}) == len(checks)
        for check in checks:
            assert check.property.endswith("."), check.id
            assert len(check.property) > 20


def test_a_backend_is_found_by_its_name():
    assert find("reference").name == "reference"


def test_a_backend_without_a_target_says_what_to_do(tmp_path, monkeypatch):
    info = dataclasses.replace(find_backend("reference"), conformance=None)
    with pytest.raises(LookupError, match="genlm check reference --model MODEL"):
        targets_of(info, tmp_path)
    (target,) = targets_of(info, tmp_path, model="demo")
    assert target.model == "demo"
    assert target.oracle is None
    (target,) = targets_of(info, tmp_path, model="demo", dtype="bfloat16")
    assert target.largest_error == 0.15


def test_a_model_without_a_target_is_loaded_once_for_all_checks(monkeypatch):
    built = []

    def build(model):
        built.append(CertifiedEngine())
        return built[-1]

    monkeypatch.setattr("genlm.testing.run.get_backend", lambda _: build)
    only = (
        "batch-equals-map",
        "closing-ends-every-request",
        "rows-hold-no-more-than-themselves",
    )
    with prepared(Settings("reference", model="demo", only=only)) as run:
        assert [outcome.status for outcome in run.outcomes()] == ["passed"] * 3
        assert not built[0].closed
    assert len(built) == 1
    assert built[0].closed


@pytest.mark.parametrize(
    "brought",
    [scripted_target(), [scripted_target()], lambda _folder: iter([scripted_target()])],
)
def test_a_target_may_be_one_several_or_made_by_a_function(tmp_path, monkeypatch, brought):
    monkeypatch.setattr("genlm.testing.core_targets.reference_targets", brought)
    (target,) = targets_of(find_backend("reference"), tmp_path)
    assert target.model == "scripted"


@pytest.mark.parametrize("brought", [42, TrieTarget(model="numpy", build=len)])
def test_something_else_is_no_target_of_an_engine(tmp_path, monkeypatch, brought):
    monkeypatch.setattr("genlm.testing.core_targets.reference_targets", [brought])
    with pytest.raises(BrokenPluginError, match=r"gave .*; expected a target of an engine"):
        targets_of(find_backend("reference"), tmp_path)


@pytest.mark.parametrize(
    ("conformance", "reason"),
    [
        ("genlm.testing.core_targets:no_targets", "has no attribute 'no_targets'"),
        ("genlm.testing.no_targets:targets", "No module named 'genlm.testing.no_targets'"),
    ],
)
def test_a_target_that_cannot_be_imported_is_an_error_of_the_plugin(
    tmp_path, conformance, reason
):
    info = dataclasses.replace(find_backend("reference"), conformance=conformance)
    message = rf"genlm-core:reference is broken: importing '{conformance}' failed: .*{reason}"
    with pytest.raises(BrokenPluginError, match=message):
        targets_of(info, tmp_path)


def test_the_engine_that_users_load_is_imported(tmp_path, monkeypatch):
    monkeypatch.setattr("genlm.testing.core_targets.reference_targets", scripted_target())
    monkeypatch.setattr("genlm.core.reference.engine.ReferenceEngine", None)
    with pytest.raises(BrokenPluginError, match="ReferenceEngine' is not callable"):
        targets_of(find_backend("reference"), tmp_path)


@pytest.mark.parametrize("changes", [{"build": CertifiedEngine()}, {"oracle": [0.0]}])
def test_the_engine_and_the_oracle_of_a_target_are_functions(changes):
    [name] = changes
    with pytest.raises(TypeError, match=f"{name}=.*; expected a function that returns"):
        scripted_target(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": 2e-4}, "tolerance=0.0002: a target may tighten"),
        ({"tolerance": 0.0}, r"tolerance=0\.0"),
        ({"dtype": "int8"}, "dtype='int8': expected one of float32, float16, bfloat16"),
    ],
)
def test_a_target_may_not_loosen_the_tolerance(changes, message):
    with pytest.raises(ValueError, match=message):
        scripted_target(**changes)


def test_a_target_may_tighten_the_tolerance():
    assert scripted_target().largest_error == 1e-4
    assert scripted_target(tolerance=1e-6).largest_error == 1e-6


def test_unknown_checks_and_missing_files_are_errors(tmp_path):
    with (
        pytest.raises(LookupError, match="no check 'no-such-check'"),
        prepared(Settings("reference", only=("no-such-check",))),
    ):
        pass
    missing = tmp_path / "missing.txt"
    with (
        pytest.raises(ValueError, match=r"missing\.txt"),
        prepared(Settings("reference", xfail=missing)),
    ):
        pass


def test_files_that_cannot_be_deleted_are_left(monkeypatch, tmp_path):
    """As files of weights that are mapped on Windows."""

    def refuse(*_, **__):
        raise PermissionError("used by another process")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch, prepared(Settings("reference")):
        [folder] = tmp_path.iterdir()
        (folder / "weights").touch()
        patch.setattr(os, "unlink", refuse)
    assert (folder / "weights").exists()
