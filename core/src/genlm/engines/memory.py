"""Free memory of this process, for engines that choose the size of a cache.

On the CPU it is the minimum of: the available memory of the machine, the remainder of each
Linux control group (versions 1 and 2, nested, in containers), the free memory of the NUMA nodes
of an engine, and the remainder of RLIMIT_AS.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from genlm.core.base.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

_PROCESS = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_MIB = 2**20


@dataclass(frozen=True, slots=True, order=True)
class _Bound:
    """A number of bytes that can be allocated, and the limit that determines it."""

    nbytes: int
    limit: str


def free_memory_bytes(
    device: torch.device | str = "cpu", *, memory_nodes: Collection[int] | None = None
) -> int:
    """Return the number of bytes that this process can allocate without failure or swapping.

    Pages of the file cache, which the kernel frees on demand, count as free.

    Args:
        device: A torch device. For a CUDA device the result is the driver's figure, for other
            devices that of the CPU.
        memory_nodes: NUMA nodes of the allocation; by default any.
    """
    return _free(device, memory_nodes).nbytes


def cache_budget_bytes(
    device: torch.device | str = "cpu",
    *,
    share: float,
    at_least: int,
    at_most: int,
    option: str,
    memory_nodes: Collection[int] | None = None,
) -> int:
    """Return the default size of an engine's cache: a share of the free memory.

    Args:
        device: Device of the cache.
        share: Fraction of the free memory for this cache.
        at_least: Size of the smallest useful cache.
        at_most: Maximum size.
        option: Option that sets the size, for the error message.
        memory_nodes: As for `free_memory_bytes`.

    Raises:
        ModelLoadError: The share is smaller than `at_least`.
    """
    free = _free(device, memory_nodes)
    budget = min(int(free.nbytes * share), at_most)
    if budget < at_least:
        raise ModelLoadError(
            f"asked for a KV cache of the default size, {share:.3g} of the free memory; "
            f"{free.nbytes // _MIB} MiB are free, as limited by {free.limit}, and the smallest "
            f"useful cache of {-(-at_least // _MIB)} MiB needs "
            f"{-(-int(at_least / share) // _MIB)} MiB. Free memory, raise that limit, or "
            f"choose a size with {option}"
        )
    return budget


def _free(device: torch.device | str, memory_nodes: Collection[int] | None) -> _Bound:
    if str(device).startswith("cuda"):
        import torch

        return _Bound(int(torch.cuda.mem_get_info(device)[0]), f"the device {device}")
    import psutil

    machine = _Bound(psutil.virtual_memory().available, "the machine")
    nodes = _node_bounds(memory_nodes or ())
    smallest = min([machine, *_control_group_bounds(), *_address_space_bounds(), *nodes])
    return _Bound(max(0, smallest.nbytes), smallest.limit)


def _control_group_bounds() -> Iterator[_Bound]:
    """Yield the remaining memory of each control group of this process.

    Inside a container the path of a group may be hidden; its limits are then at the root.
    """
    for line in _lines(_PROCESS / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # If both versions are in use, version 2 may be mounted below.
            for root in (_CONTROL_GROUPS, _CONTROL_GROUPS / "unified"):
                yield from _group_bounds(
                    root, path, ("memory.max", "memory.high"), "current", ""
                )
        elif "memory" in controllers.split(","):
            root = _CONTROL_GROUPS / "memory"
            limits = ("memory.limit_in_bytes",)
            yield from _group_bounds(root, path, limits, "usage_in_bytes", "total_")


def _group_bounds(
    root: Path, path: str, limits: Collection[str], used: str, prefix: str
) -> Iterator[_Bound]:
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        maxima = [limit for name in limits if (limit := _number(folder / name)) is not None]
        usage = _number(folder / f"memory.{used}")
        if maxima and usage is not None:
            name = "/" + str(folder.relative_to(root)).strip(".")
            reclaimable = _reclaimable(folder / "memory.stat", prefix)
            yield _Bound(min(maxima) - usage + reclaimable, f"the control group {name}")


def _reclaimable(statistics: Path, prefix: str) -> int:
    """Return the memory of a group that the kernel frees on demand.

    A line of the statistics is a name and a number.
    """
    kinds = (f"{prefix}inactive_file", f"{prefix}active_file", "slab_reclaimable")
    words = (line.split() for line in _lines(statistics))
    return sum(int(number) for name, number, *_ in words if name in kinds)


def _address_space_bounds() -> Iterator[_Bound]:
    try:
        import resource
    except ImportError:  # not on this system
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        import psutil

        used = psutil.Process().memory_info().vms
        yield _Bound(limit - used, "the address space (RLIMIT_AS, ulimit -v)")


def _node_bounds(nodes: Collection[int]) -> Iterator[_Bound]:
    free, readable = 0, []
    for node in sorted(nodes):
        # Each line begins with the words Node and 0.
        lines = [line.split()[2:] for line in _lines(_NODES / f"node{node}" / "meminfo")]
        sizes = {name: int(size) * 1024 for name, size, *_ in lines}
        if sizes:
            readable.append(str(node))
            kinds = ("MemFree:", "Active(file):", "Inactive(file):", "SReclaimable:")
            free += sum(sizes.get(kind, 0) for kind in kinds)
    if readable:
        yield _Bound(free, f"NUMA memory node {', '.join(readable)}")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; an empty list if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Return the number in a file; None for `max` and for other contents."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None
