"""Workers of vLLM that are forked from a process which has imported vLLM.

A spawned worker takes 15 seconds of a core to import vLLM, a forked one has it. Programs that
tests run as subprocesses spawn their workers.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from . import frozen_modules

# Not genlm_vllm: its workers configure themselves by the environment when they import it.
MODULES = (
    "genlm.plugin",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


class PreloadedProcess(ForkServerProcess):
    """A process with the environment of its parent instead of that of the fork server."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        frozen_modules.keep_frozen()
        gc.freeze()
        super().run()


class PreloadedContext(ForkServerContext):
    """Starts processes of the class `PreloadedProcess`."""

    Process = PreloadedProcess


def fork_spawned_processes() -> None:
    """Fork the processes that vLLM would spawn, from a server that starts with the first."""
    context, get_context = PreloadedContext(), multiprocessing.get_context
    multiprocessing.set_forkserver_preload(list(MODULES))

    def get_preloaded_context(method: str | None = None) -> Any:
        return context if method == "spawn" else get_context(method)

    multiprocessing.get_context = get_preloaded_context
