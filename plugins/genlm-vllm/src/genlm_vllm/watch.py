"""`Watch`: a guard over vLLM's processes, so that nobody waits for a dead one.

vLLM's synchronous client wakes nobody when its engine's process is killed, and leaves
calls to workers unanswered when it fails.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from genlm import EngineDiedError
from genlm_vllm.failures import FailureLog

__all__ = ["Watch"]


class Watch:
    """Ends whatever waits for vLLM's processes when one of them ends.

    Args:
        engine: A `vllm.LLMEngine` that computes in processes of its own.
        failures: What these log.
    """

    def __init__(self, engine: Any, failures: FailureLog) -> None:
        self._client = engine.engine_core
        self._failures = failures
        manager = self._client.resources.engine_manager
        self._processes = list(getattr(manager, "processes", ()))  # other managers have none
        self._dead = False
        stopped, self._stop = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(
            target=self._run, args=(stopped,), name="genlm-vllm-watch", daemon=True
        )
        self._thread.start()

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Guard calls of vLLM.

        Raises:
            EngineDiedError: One of vLLM's processes has ended, before or meanwhile.
            Exception: Whatever else the calls raise.
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
        """Stop watching; the processes are about to be ended."""
        self._stop.close()
        self._thread.join()

    def _run(self, stopped: Connection) -> None:
        with stopped:
            ended = wait([stopped, *(process.sentinel for process in self._processes)])
            if stopped in ended:
                return
        self._dead = True
        # From here on the client refuses new calls, so that these are the last to wait.
        self._client.resources.engine_dead = True
        error = EngineDiedError("vLLM's engine process ended")
        self._client.outputs_queue.put(error)
        for future in list(self._client.utility_results.values()):
            if not future.done():
                future.set_exception(error)
