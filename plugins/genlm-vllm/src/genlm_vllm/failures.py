"""`FailureLog`: why vLLM's own processes failed.

There vLLM logs the exception, and tells the process that loaded the model only that one was
raised. So its log's exceptions are written to a file whose name the processes inherit. On
other machines, where Ray may put workers, that file is not written.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

__all__ = ["VARIABLE", "FailureLog", "record_failures"]

VARIABLE = "GENLM_VLLM_FAILURES"
"""Environment variable that names the file."""


class FailureLog:
    """The file, as the process that loads the model sees it."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="genlm-vllm-", suffix=".log")
        os.close(handle)
        self.path = Path(name)

    def first(self) -> str | None:
        """Return the first exception that a process logged; None if there was none."""
        try:
            lines = self.path.read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return None
        return lines[0] if lines else None

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


class _Recorder(logging.Handler):
    """Appends the exceptions that are logged to a file, a line each."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        text = " ".join(f"{type(error).__name__}: {error}".split())
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def record_failures() -> None:
    """Record what vLLM logs in this process, if the process that started it asks for that."""
    path = os.environ.get(VARIABLE)
    if path is not None and Path(path).exists():
        logging.getLogger("vllm").addHandler(_Recorder(path))
