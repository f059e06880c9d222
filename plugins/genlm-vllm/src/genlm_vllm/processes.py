"""The processes in which vLLM computes: why they failed, and that they end together.

vLLM logs an exception in the process that raises it, and tells the process that loaded the
model only that one was raised. `FailureLog` and `record_failures` bring it over. vLLM's
synchronous client waits forever for an engine process that was killed: `ProcessMonitor` ends
its waits. An engine process outlives a client that was killed: `start_parent_watchdog` ends it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from genlm import EngineDiedError

__all__ = [
    "VARIABLE",
    "FailureLog",
    "ProcessMonitor",
    "record_failures",
    "start_parent_watchdog",
]

VARIABLE = "GENLM_VLLM_FAILURES"
"""Environment variable that names the file of a `FailureLog`."""


class FailureLog:
    """The exceptions that vLLM's processes log, in a file whose name they inherit.

    Ray's workers on other machines do not write to it.
    """

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="genlm-vllm-", suffix=".log")
        os.close(handle)
        self.path = Path(name)

    def first(self) -> str | None:
        """Return the first exception that a process logged, None without one."""
        try:
            lines = self.path.read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return None
        return lines[0] if lines else None

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


class _Recorder:
    """A factory of log records that appends vLLM's logged exceptions to a file, a line each.

    Not a handler: vLLM configures logging when its processes have started, which removes
    handlers.
    """

    def __init__(self, path: str) -> None:
        self._make_record = logging.getLogRecordFactory()
        self._path = Path(path)

    def __call__(self, *arguments: Any, **options: Any) -> logging.LogRecord:
        record = self._make_record(*arguments, **options)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.name.startswith("vllm"):
            text = " ".join(f"{type(error).__name__}: {error}".split())
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")
        return record


def record_failures() -> bool:
    """Record the exceptions that vLLM logs in this process, if `VARIABLE` names a file.

    Returns:
        Whether it does: this is a process of vLLM's on the machine that loaded the model.
    """
    path = os.environ.get(VARIABLE)
    if path is None or not Path(path).exists():
        return False
    logging.setLogRecordFactory(_Recorder(path))
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
        """Stop, before the processes are ended on purpose."""
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
