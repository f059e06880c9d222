"""vLLM's workers in other processes: how they end, and the reasons of failures.

vLLM logs an exception in the process that raises it. If a worker fails while it starts, vLLM
reports to the process that loads the model only that a worker failed. `FailureLog` and
`record_failures` transfer the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from genlm import EngineDiedError
from genlm.plugin import describe_error

SOCKETS = "GENLM_VLLM_SOCKETS"
"""Environment variable with the folder for the sockets of vLLM's processes."""

VARIABLE = "GENLM_VLLM_FAILURES"
"""Environment variable that names the file of a `FailureLog`."""

_MAX_BYTES = 2**12
"""Maximum number of bytes of a line, and of all lines of a process."""


class FailureLog:
    """Exceptions that vLLM's processes log, in shared memory.

    The memory is an anonymous file, which the kernel frees even if this process is killed.
    vLLM's processes open it by the path of this process's file descriptor. Ray's workers on
    other machines do not write to it.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("genlm-vllm-failures"), "r+b", buffering=0)
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def first(self) -> str | None:
        """Return the first logged exception, None if there is none or after `close`."""
        if self._file.closed:
            return None
        text = os.pread(self._file.fileno(), _MAX_BYTES, 0).decode("utf-8", errors="replace")
        return text.partition("\n")[0] or None

    def close(self) -> None:
        """Free the memory."""
        self._file.close()


class _Recorder:
    """Factory of log records that writes vLLM's first exceptions to a file, one per line.

    It is not a handler because vLLM configures logging after its processes have started, and
    removes handlers.
    """

    def __init__(self, file: int) -> None:
        self._make_record = logging.getLogRecordFactory()
        self._file = file
        self._remaining_bytes = _MAX_BYTES

    def __call__(self, *arguments: Any, **options: Any) -> logging.LogRecord:
        record = self._make_record(*arguments, **options)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.name.startswith("vllm") and self._remaining_bytes > 0:
            # An error here must not hide the logged exception.
            with contextlib.suppress(Exception):
                text = " ".join(describe_error(error).split())
                line = f"{text}\n".encode()[:_MAX_BYTES]
                self._remaining_bytes -= os.write(self._file, line)
        return record


def record_failures() -> bool:
    """Record the exceptions that vLLM logs in this process, if `VARIABLE` names a file.

    Returns:
        Whether exceptions are recorded, as in vLLM's processes on the machine that loads the
        model.
    """
    try:
        # The file stays open: an exception may be logged when no file can be opened.
        file = os.open(os.environ.get(VARIABLE, ""), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    logging.setLogRecordFactory(_Recorder(file))
    return True


def skip_finalization() -> None:
    """Make a process of `multiprocessing` exit without finalising the interpreter.

    After vLLM was imported, Python needs three seconds to finalise its modules, for which
    `close` would wait.
    """
    atexit.register(_exit)


def _exit() -> None:
    if multiprocessing.parent_process() is None:  # Ray's worker
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None
            stream.flush()
    if SOCKETS in os.environ:  # the client may have been killed
        shutil.rmtree(os.environ[SOCKETS], ignore_errors=True)
    os._exit(0)


def ignore_interrupts() -> None:
    """Make a process of `multiprocessing` ignore SIGINT, by which vLLM's workers end.

    Terminals and notebooks send it to all processes of a group, also when the user only
    interrupts a call of the client.
    """
    if multiprocessing.parent_process() is not None:  # otherwise Ray's worker
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def without_frames(error: Exception) -> Exception:
    """Remove the traceback of an error, whose frames would keep tensors alive."""
    error.__context__ = None
    return error.with_traceback(None)


class ExecutorError(Exception):
    """vLLM's executor raised the cause of this error instead of returning results."""


def engine_died(engine: Any, failures: FailureLog, error: BaseException) -> EngineDiedError:
    """Return the error of an engine whose workers failed.

    Args:
        engine: The `vllm.LLMEngine`.
        failures: Log of its workers.
        error: The exception of vLLM in this process.
    """
    # Workers of Ray have no exit codes.
    ends = describe_ends(getattr(engine.model_executor, "workers", ()))
    first = failures.first()
    if first is not None:
        reason = f"the first failure was {first}"
    elif ends:  # vLLM only raises that it waits in vain
        reason = "see its log"
    else:
        reason = f"vLLM raised {describe_error(error)}"
    status = f" ({ends})" if ends else ""
    return EngineDiedError(f"a worker of vLLM failed{status}; {reason}. Load the model again")


def ends_while_starting(error: Exception) -> str:
    """Describe how workers ended before an executor of vLLM was built.

    Args:
        error: The exception of its constructor, whose frame alone refers to the workers.
    """
    frames = (frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
    handles = (names.get("unready_workers") for names in frames)
    return describe_ends(next(filter(None, handles), ()))


def shut_down_executor(executor: Any) -> None:
    """End the processes of an executor of vLLM."""
    # vLLM's finalizer refers to the executor until it is called.
    getattr(executor, "_finalizer", executor.shutdown)()


def shut_down_unfinished(error: BaseException) -> None:
    """End the processes of an engine that could not be built, which vLLM leaves running.

    Args:
        error: The exception of the engine's constructor, whose frames refer to its executor.
    """
    from vllm.v1.executor import Executor

    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        executor = getattr(owner, "model_executor", owner)
        if isinstance(executor, Executor):
            # An executor that is not complete may raise other errors.
            with contextlib.suppress(Exception):
                shut_down_executor(executor)
            break


def describe_ends(handles: Iterable[Any]) -> str:
    """Describe how the processes of workers ended; an empty string if none has ended."""
    codes = [getattr(getattr(handle, "proc", None), "exitcode", None) for handle in handles]
    return ", ".join(
        f"worker {rank} {_describe_end(code)}"
        for rank, code in enumerate(codes)
        if code is not None
    )


def _describe_end(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit status {exit_code}"
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"was ended by signal {-exit_code}"
