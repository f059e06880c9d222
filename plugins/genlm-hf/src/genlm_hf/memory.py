"""How much memory is free, on CUDA devices and within what a container may have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["free_bytes"]

_PROCESS = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_UNKNOWN = 2**32


def free_bytes(device: torch.device) -> int:
    """Return how much can be allocated on a device before others suffer."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return max(0, min([_free_in_the_machine(), *_free_in_control_groups()]))


def _free_in_the_machine() -> int:
    meminfo = _PROCESS / "meminfo"
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return _UNKNOWN


def _free_in_control_groups() -> Iterator[int]:
    """Yield what each of Linux' control groups leaves that this process is in.

    Inside a container a group's own path may be hidden; its limits are then at the root.
    """
    membership = _PROCESS / "self" / "cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root = _CONTROL_GROUPS
            limit, used, unneeded = "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root = _CONTROL_GROUPS / "memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            unneeded = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / limit).exists():
                text = (folder / limit).read_text().strip()
                if text != "max":
                    taken = int((folder / used).read_text()) - _statistic(folder, unneeded)
                    yield int(text) - taken


def _statistic(folder: Path, name: str) -> int:
    lines = (folder / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
