"""A worker of vLLM that is killed while it starts; vLLM's processes import it."""

from __future__ import annotations

import os
import signal
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class KilledWorker(CPUWorker):  # type: ignore[misc]
    def __init__(self, **_options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
