"""Files of expected failures: their format and their effect on an outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from genlm.testing.outcome import Outcome, read_expected_failures


def outcome(status: str, id_: str = "rows-are-right[llama]") -> Outcome:
    return Outcome(id=id_, property="A row is the oracle's.", status=status)


def read(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "xfail.txt"
    path.write_text(text)
    return read_expected_failures(path)


def test_each_line_has_an_id_and_a_reason_and_comments_are_left_out(tmp_path):
    text = "# why\n\na[b]: the reason: twice # said\n  c :x\nd[C:\\model] :y\n"
    expected = {"a[b]": "the reason: twice", "c": "x", "d[C:\\model]": "y"}
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows-are-right\n", "xfail.txt:1: expected 'id: reason', found 'rows-are-right'"),
        ("\nrows-are-right: # later", "xfail.txt:2: expected 'id: reason'"),
        ("a: b\na: c", "xfail.txt:2: 'a' is listed twice"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_it(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no expected failures in .*nothing\.txt"):
        read_expected_failures(tmp_path / "nothing.txt")
    (tmp_path / "latin.txt").write_bytes("check: für später".encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"no expected failures in .*latin\.txt: 'utf-8' codec"
    ):
        read_expected_failures(tmp_path / "latin.txt")


@pytest.mark.parametrize("id_", ["rows-are-right", "rows-are-right[llama]"])
def test_a_failure_that_is_expected_is_no_failure_and_keeps_its_reason(id_):
    applied = outcome("failed").expecting({id_: "issue 7"})
    assert (applied.status, applied.reason) == ("expected failure", "issue 7")


def test_a_failure_of_another_model_is_not_expected():
    expected = {"rows-are-right[gpt2]": "issue 7"}
    assert outcome("failed").expecting(expected).status == "failed"


def test_a_pass_that_is_not_expected_is_told_apart():
    applied = outcome("passed").expecting({"rows-are-right": "issue 7"})
    assert applied.status == "unexpected pass"
    assert "issue 7" in applied.reason


@pytest.mark.parametrize("status", ["skipped", "not applicable"])
def test_what_did_not_run_stays_what_it_is(status):
    expected = {"rows-are-right": "issue 7"}
    assert outcome(status).expecting(expected) == outcome(status)
