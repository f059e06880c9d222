"""Options for two ranks, and the processes of the ranks after rank 0."""

from __future__ import annotations

from typing import Any

import psutil

PARALLEL: dict[str, Any] = {
    "tp_size": 2,
    "max_total_tokens": 2048,
    "max_running_requests": 16,
}

ENDED = r"rank 1 of SGLang ended with exit code -9; load the model again"
"""Error of requests after the process of rank 1 was killed."""


def children() -> list[psutil.Process]:
    """Return the processes of the ranks after rank 0."""
    processes = psutil.Process().children()
    return [process for process in processes if "run_rank" in " ".join(process.cmdline())]
