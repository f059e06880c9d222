"""Failure messages of programs are short and end with the error."""

from __future__ import annotations

import pytest
from programs import error_of, run_code, run_program

FAILING = """
import json, sys
print(json.dumps([0.5] * 100_000))
print("noise of a library\\n" * 1000, file=sys.stderr)
try:
    raise ValueError("the cause")
finally:
    print(json.dumps([0.5] * 100_000), file=sys.stderr)
"""


def test_the_error_of_a_program_that_fails_comes_last_and_is_short():
    with pytest.raises(AssertionError) as failure:
        run_code(FAILING)
    message = str(failure.value)
    assert message.splitlines()[-1] == "ValueError: the cause"
    assert "exit status 1, expected 0" in message.splitlines()[0]
    assert len(message) < 3000


def test_noise_after_the_error_does_not_bury_it():
    said = "KeyError: 'the cause'\n" + "a library says goodbye\n" * 50
    assert error_of("", said)[-1] == "KeyError: 'the cause'"
    failed = "FAILED test_a.py::test_b - AssertionError: the cause\n1 failed in 2 s\n"
    assert error_of(failed, "")[-2:] == failed.splitlines()


def test_a_program_returns_what_it_printed_and_may_exit_otherwise():
    assert run_code("print(6 * 7)").stdout == "42\n"
    assert run_code("import sys; sys.exit(3)", status=3).returncode == 3
    assert run_program("false", status=None).returncode == 1
