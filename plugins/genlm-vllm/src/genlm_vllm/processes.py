"""The workers of vLLM in other processes: transport, and the reasons of their failures.

vLLM logs an exception in the process that raises it. If a worker fails while it starts, the
process that loaded the model learns only that it did. `FailureLog` and `record_failures`
transfer the reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from genlm import EngineDiedError
from genlm.plugin import GroupReduction, Reduction, Transport

__all__ = [
    "TRANSPORT",
    "VARIABLE",
    "FailureLog",
    "Outputs",
    "engine_died",
    "record_failures",
    "unpacked",
    "without_frames",
]

VARIABLE = "GENLM_VLLM_FAILURES"
"""Environment variable that names the file of a `FailureLog`."""

TRANSPORT = Transport("vLLM's process")
"""Packs what passes between this process and the workers'."""

Outputs = tuple[Reduction | GroupReduction | None, ...]
"""Requested outputs of a row or a text, see `genlm.plugin.Query`."""

_MOST_BYTES = 2**12
"""Maximum bytes of a line, and of all lines of a process."""


class FailureLog:
    """The first exception that vLLM's processes log, in memory that they write to.

    They find it by the path of this process's file descriptor. It has no name in the file
    system, so nothing is left of it when this process is killed. Ray's workers on other
    machines do not write to it.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("genlm-vllm-failures"), "r+b", buffering=0)
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def first(self) -> str | None:
        """Return the first exception that a process logged, None without one or once closed."""
        if self._file.closed:
            return None
        text = os.pread(self._file.fileno(), _MOST_BYTES, 0).decode("utf-8", errors="replace")
        return text.partition("\n")[0] or None

    def close(self) -> None:
        """Free the memory."""
        self._file.close()


class _Recorder:
    """A factory of log records that writes vLLM's first exceptions to a file, a line each.

    Not a handler: vLLM configures logging when its processes have started, which removes
    handlers.
    """

    def __init__(self, file: int) -> None:
        self._make_record = logging.getLogRecordFactory()
        self._file = file
        self._room = _MOST_BYTES

    def __call__(self, *arguments: Any, **options: Any) -> logging.LogRecord:
        record = self._make_record(*arguments, **options)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.name.startswith("vllm") and self._room > 0:
            # An error here must not hide the logged exception.
            with contextlib.suppress(Exception):
                text = " ".join(f"{type(error).__name__}: {error}".split())
                self._room -= os.write(self._file, f"{text}\n".encode()[:_MOST_BYTES])
        return record


def record_failures() -> bool:
    """Record the exceptions that vLLM logs in this process, if `VARIABLE` names a file.

    Returns:
        Whether it does: this is a process of vLLM's on the machine that loaded the model.
    """
    try:
        # Open from here on: an exception may be logged when no file can be opened.
        file = os.open(os.environ.get(VARIABLE, ""), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    logging.setLogRecordFactory(_Recorder(file))
    return True


def unpacked(outputs: Outputs | bytes) -> Outputs:
    """Return requested outputs, which in another process arrive as bytes."""
    return tuple(TRANSPORT.unpack_outputs(outputs)) if isinstance(outputs, bytes) else outputs


def without_frames(error: Exception) -> Exception:
    """Return an error without the frames of its traceback, which would keep tensors alive."""
    error.__context__ = None
    return error.with_traceback(None)


def engine_died(engine: Any, failures: FailureLog) -> EngineDiedError:
    """Return the error of an engine whose workers failed.

    Args:
        engine: The `vllm.LLMEngine`.
        failures: Log of its workers.
    """
    workers = getattr(engine.model_executor, "workers", ())  # Ray's are no processes of ours
    codes = {each.proc.exitcode for each in workers if hasattr(each, "proc")}
    ended = ", ".join(map(str, codes - {None}))
    which = f" (exit code {ended})" if ended else ""
    first = failures.first()
    why = "its log says more" if first is None else f"the first failure was {first}"
    return EngineDiedError(f"a worker of vLLM failed{which}; {why}. Load the model again")
