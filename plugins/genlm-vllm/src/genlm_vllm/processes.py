"""vLLM's processes: the reasons of their failures, and their common end.

vLLM logs an exception in the process that raises it, and tells the process that loaded the
model only that one was raised. `FailureLog` and `record_failures` transfer it. vLLM's
synchronous client waits forever for an engine process that was killed: `ProcessMonitor` ends
its waits. An engine process outlives a client that was killed: `start_parent_watchdog` ends it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from genlm import EngineDiedError
from genlm.plugin import Transport

__all__ = [
    "TRANSPORT",
    "VARIABLE",
    "FailureLog",
    "ProcessMonitor",
    "record_failures",
    "start_parent_watchdog",
]

VARIABLE = "GENLM_VLLM_FAILURES"
"""Environment variable that names the file of a `FailureLog`."""

TRANSPORT = Transport("vLLM's process")
"""Packs what passes between this process and the workers'."""

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


class ProcessMonitor:
    """Fails all calls that wait for vLLM's processes when one of them ends.

    Args:
        engine: A `vllm.LLMEngine` that computes in processes of its own.
        failures: Their log.
    """

    def __init__(self, engine: Any, failures: FailureLog) -> None:
        self._client = engine.engine_core
        self._failures = failures
        manager = self._client.resources.engine_manager
        # Other managers, Ray's for one, have no processes.
        self._processes = list(getattr(manager, "processes", ()))
        self._dead = False
        stopped, self._stop = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(
            target=self._run, args=(stopped,), name="genlm-vllm-monitor", daemon=True
        )
        self._thread.start()

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Run calls of vLLM.

        Raises:
            EngineDiedError: One of vLLM's processes has ended, before or during the calls.
            Exception: Any other error of the calls.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._dead:
            raise self._died()
        try:
            yield
        except EngineDeadError as error:  # vLLM may notice it first
            self._dead = True
            raise self._died() from error
        except Exception as error:
            if self._dead:
                raise self._died() from error
            raise

    def _died(self) -> EngineDiedError:
        codes = {process.exitcode for process in self._processes} - {None}
        which = f" (exit code {', '.join(map(str, codes))})" if codes else ""
        first = self._failures.first()
        why = "its log says more" if first is None else f"the first failure was {first}"
        return EngineDiedError(
            f"vLLM's engine process ended{which}; {why}. Load the model again"
        )

    def stop(self) -> None:
        """Stop before the processes are shut down."""
        self._stop.close()
        self._thread.join()

    def _run(self, stopped: Connection) -> None:
        with stopped:
            ended = wait([stopped, *(process.sentinel for process in self._processes)])
            if stopped in ended:
                return
        self._dead = True
        # The client refuses new calls from here on; then fail those that wait already.
        self._client.resources.engine_dead = True
        error = EngineDiedError("vLLM's engine process ended")
        self._client.outputs_queue.put(error)
        for future in list(self._client.utility_results.values()):
            if not future.done():
                future.set_exception(error)


def start_parent_watchdog(client: int) -> None:
    """End vLLM's engine process, and with it its workers, when the client's process ends.

    Called in a worker. Does nothing where the client is not an ancestor of this process, as
    with Ray's workers, and where the system has no `pidfd_open`.

    Args:
        client: Id of the process that loaded the model.
    """
    import psutil

    family = [psutil.Process(), *psutil.Process().parents()]
    engine = next((own for own in family if own.ppid() == client), None)
    if engine is None or not hasattr(os, "pidfd_open"):
        return
    ended = os.pidfd_open(client)

    def wait() -> None:
        select.select([ended], [], [])
        engine.kill()

    threading.Thread(target=wait, name="genlm-vllm-parent-watchdog", daemon=True).start()
