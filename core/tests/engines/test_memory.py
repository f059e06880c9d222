"""Free memory, read from files as Linux writes them."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from genlm import ModelLoadError, cache_budget_bytes, free_memory_bytes
from genlm.engines import memory

GIB = 2**30
UNLIMITED_V1 = 2**63 - 4096


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 12 GiB free on two memory nodes, 9 of them on node 0."""
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_NODES", tmp_path / "node")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12 * GIB))
    used = SimpleNamespace(vms=2 * GIB)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: used)
    write_node(tmp_path, 0, free=4, active=2, inactive=2, slab=1)
    write_node(tmp_path, 1, free=3)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_node(
    machine: Path, node: int, *, free: int, active: int = 0, inactive: int = 0, slab: int = 0
) -> None:
    gibs = {
        "MemTotal": 99,
        "MemFree": free,
        "Active(file)": active,
        "Inactive(file)": inactive,
        "SReclaimable": slab,
        "AnonPages": 50,
    }
    lines = [f"Node {node} {name}: {size * GIB // 1024:>9} kB" for name, size in gibs.items()]
    lines.append(f"Node {node} HugePages_Total:     0")
    write(machine / f"node/node{node}/meminfo", "\n".join(lines) + "\n")


def limit_version_2(folder: Path, limit: object, *, high: object = "max") -> None:
    """A group that uses 5 GiB, 3 of them files and a slab that the kernel can drop."""
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.high", f"{high}\n")
    write(folder / "memory.current", f"{5 * GIB}\n")
    statistics = f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nslab_reclaimable {GIB}\n"
    write(folder / "memory.stat", statistics)


def limit_version_1(folder: Path, limit: int) -> None:
    """A group that uses 5 GiB with its children, 3 of them files."""
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{5 * GIB}\n")
    group_fields = "inactive_file 5\nactive_file 6\n"
    write(
        folder / "memory.stat",
        f"{group_fields}total_inactive_file {GIB}\ntotal_active_file {2 * GIB}\n",
    )


def test_without_limits_the_machine_decides() -> None:
    assert free_memory_bytes() == 12 * GIB
    assert free_memory_bytes(torch.device("cpu")) == 12 * GIB


@pytest.mark.parametrize("mount", ["", "unified"])
@pytest.mark.parametrize(
    ("path", "limited", "limit", "expected"),
    [
        ("/", ".", 6 * GIB, 4 * GIB),
        ("/a/b", "a/b", 6 * GIB, 4 * GIB),
        ("/a/b", "a", 6 * GIB, 4 * GIB),
        ("/of/the/host", ".", 6 * GIB, 4 * GIB),
        ("/../of/a/sibling", ".", 6 * GIB, 4 * GIB),
        ("/a", "a", "max", 12 * GIB),
        ("/a", "a", 64 * GIB, 12 * GIB),
        ("/a", "a", GIB // 2, 0),
        ("/a", "b", 6 * GIB, 12 * GIB),
    ],
)
def test_limits_of_control_groups_version_2(
    machine: Path, mount: str, path: str, limited: str, limit: object, expected: int
) -> None:
    write(machine / "proc/self/cgroup", f"0::{path}\n")
    limit_version_2(machine / "cgroup" / mount / limited, limit)
    assert free_memory_bytes() == expected


def test_a_limit_that_throttles_counts_as_one_that_kills(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/a\n")
    limit_version_2(machine / "cgroup/a", "max", high=6 * GIB)
    assert free_memory_bytes() == 4 * GIB


def test_the_narrowest_of_nested_groups_decides(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/a/b/c\n")
    limit_version_2(machine / "cgroup", "max")
    limit_version_2(machine / "cgroup/a", 10 * GIB)
    limit_version_2(machine / "cgroup/a/b", 7 * GIB)
    limit_version_2(machine / "cgroup/a/b/c", 8 * GIB)
    assert free_memory_bytes() == 5 * GIB


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"jobs/7": 6 * GIB}, 4 * GIB),
        ({"jobs": 6 * GIB, "jobs/7": UNLIMITED_V1}, 4 * GIB),
        ({".": 6 * GIB}, 4 * GIB),
        ({".": UNLIMITED_V1, "jobs": UNLIMITED_V1}, 12 * GIB),
    ],
)
def test_limits_of_control_groups_version_1(
    machine: Path, limits: dict[str, int], expected: int
) -> None:
    write(machine / "proc/self/cgroup", "9:cpu:/x\n4:hugetlb,memory:/jobs/7\n0::/\n")
    for folder, limit in limits.items():
        limit_version_1(machine / "cgroup/memory" / folder, limit)
    assert free_memory_bytes() == expected


def test_nodes_named_by_the_caller_decide() -> None:
    assert free_memory_bytes(memory_nodes=[0]) == 9 * GIB
    assert free_memory_bytes(memory_nodes=[1]) == 3 * GIB
    assert free_memory_bytes(memory_nodes=[0, 1]) == 12 * GIB
    assert free_memory_bytes(memory_nodes=[7]) == 12 * GIB  # what is unknown limits nothing


def test_the_address_space_decides_where_it_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: (3 * GIB, 8 * GIB)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert free_memory_bytes() == 1 * GIB


def test_files_that_cannot_be_read_limit_nothing(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/a\n")
    write(machine / "cgroup/a/memory.max", f"{6 * GIB}\n")  # without usage
    assert free_memory_bytes() == 12 * GIB


def test_of_a_cuda_device_its_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", {"cuda:1": (7, 9)}.__getitem__)
    assert free_memory_bytes("cuda:1") == 7


def budget(**limits: Any) -> int:
    sizes = {"at_least": GIB, "at_most": 100 * GIB} | limits
    return cache_budget_bytes(share=0.25, option="engine_opts['kv_bytes']", **sizes)


def test_a_budget_is_a_share_of_what_is_free_up_to_a_limit() -> None:
    assert budget() == 3 * GIB
    assert budget(at_most=2 * GIB) == 2 * GIB
    assert budget(at_least=3 * GIB) == 3 * GIB
    sizes = {"share": 0.25, "at_least": 1, "at_most": 100 * GIB, "option": "x"}
    assert cache_budget_bytes(memory_nodes=[1], **sizes) == 3 * GIB // 4


def test_too_little_for_a_useful_cache_is_an_error_that_says_what_limits_it(
    machine: Path,
) -> None:
    write(machine / "proc/self/cgroup", "0::/jobs/7\n")
    limit_version_2(machine / "cgroup/jobs/7", 5 * GIB + 7)
    with pytest.raises(ModelLoadError) as refused:
        budget()
    assert str(refused.value) == (
        "asked for a KV cache of the default size, 0.25 of the free memory; 3072 MiB are free, "
        "as limited by the control group /jobs/7, and the smallest useful cache of 1024 MiB "
        "needs 4096 MiB. Free memory, raise that limit, or choose a size with "
        "engine_opts['kv_bytes']"
    )


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({"at_least": 4 * GIB}, "the machine,"),
        ({"memory_nodes": [1]}, "NUMA memory node 1,"),
        ({"group": 4 * GIB}, "the control group /,"),
    ],
)
def test_the_error_names_the_narrowest_limit(
    machine: Path, limits: dict[str, Any], limit: str
) -> None:
    write(machine / "proc/self/cgroup", "0::/\n")
    if group := limits.pop("group", None):
        limit_version_2(machine / "cgroup", group)
    with pytest.raises(ModelLoadError, match=f"as limited by {limit}"):
        budget(**{"at_least": 2 * GIB} | limits)


def test_the_process_of_this_test_has_some_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 2**20 < free_memory_bytes() < 2**50
