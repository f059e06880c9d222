"""`end_with`: vLLM's processes do not outlive the one that they compute for.

A process that is killed cannot shut its engine down, and vLLM's engine process would keep
its memory and wait for requests for ever. vLLM's workers end with their engine process.
"""

from __future__ import annotations

import os
import select
import threading

__all__ = ["end_with"]


def end_with(client: int) -> None:
    """End vLLM's engine process when a process ends; call it in a worker.

    Does nothing where the process is not an ancestor of this one, as with Ray's workers,
    and where the system cannot wait for it.

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

    threading.Thread(target=wait, name="genlm-vllm-orphans", daemon=True).start()
