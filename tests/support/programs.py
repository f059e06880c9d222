"""`run_program`: run a program for a test; a failure message is short and ends with the error.

Programs may print whole rows, and libraries log; neither must hide the cause of a failure.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

LINES, WIDTH = 15, 200
ERROR = re.compile(r"(E +)?([A-Za-z_]\w*\.)*\w*(Error|Exception|Failure|Interrupt)\b.*")


def run_program(
    *command: str | Path, status: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program and return what it printed.

    Args:
        *command: The program and its arguments.
        status: How it must exit; None for any status.
        **options: Of `subprocess.run`.

    Raises:
        AssertionError: It exited otherwise. The last line of the message is its error.
    """
    __tracebackhide__ = True
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if status is not None and done.returncode != status:
        heading = f"{_cut(' '.join(words))}: exit status {done.returncode}, expected {status}"
        raise AssertionError("\n".join([heading, *error_of(done.stdout, done.stderr)]))
    return done


def run_code(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code as a program; see `run_program`."""
    __tracebackhide__ = True
    return run_program(sys.executable, "-c", code, *arguments, **options)


def error_of(stdout: str, stderr: str) -> list[str]:
    """The last lines of the output, then the line that names the error."""
    said = [line for line in (stderr.strip() or stdout.strip()).splitlines() if line.strip()]
    named = [line for line in said if ERROR.match(line)]
    return [_cut(line) for line in said[-LINES:]] + [_cut(line) for line in named[-1:]]


def _cut(text: str) -> str:
    first = text.partition("\n")[0]
    return text if first == text and len(text) <= WIDTH else f"{first[:WIDTH]} ..."
