"""How much memory is free."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["free_bytes"]

_UNKNOWN = 2**32


def free_bytes(device: torch.device) -> int:
    """Return how much can be allocated on a device without harm to others."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return _UNKNOWN
