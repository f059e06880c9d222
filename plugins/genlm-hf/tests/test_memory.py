"""What is free, read from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genlm_hf import memory

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 12 GiB free."""
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {12 * GIB // 1024} kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit_second_version(folder: Path, limit: str) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{2 * GIB}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file 7\n")


def test_without_groups_the_machine_decides() -> None:
    assert memory.free_bytes(CPU) == 12 * GIB


@pytest.mark.parametrize(
    ("path", "limited", "limit", "expected"),
    [
        ("/", ".", 4 * GIB, 3 * GIB),
        ("/a/b", "a/b", 4 * GIB, 3 * GIB),
        ("/a/b", "a", 4 * GIB, 3 * GIB),
        ("/of/the/host", ".", 4 * GIB, 3 * GIB),
        ("/a", "a", "max", 12 * GIB),
        ("/a", "a", 64 * GIB, 12 * GIB),
        ("/a", "a", GIB // 2, 0),
        ("/a", "b", 4 * GIB, 12 * GIB),
    ],
)
def test_limits_of_the_second_version(
    machine: Path, path: str, limited: str, limit: object, expected: int
) -> None:
    write(machine / "proc/self/cgroup", f"0::{path}\n")
    limit_second_version(machine / "cgroup" / limited, str(limit))
    assert memory.free_bytes(CPU) == expected


def test_the_narrowest_of_nested_groups_decides(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/a/b\n")
    limit_second_version(machine / "cgroup/a", str(8 * GIB))
    limit_second_version(machine / "cgroup/a/b", str(6 * GIB))
    assert memory.free_bytes(CPU) == 5 * GIB


def test_limits_of_the_first_version(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "9:cpu:/x\n4:hugetlb,memory:/jobs/7\n0::/\n")
    folder = machine / "cgroup/memory/jobs/7"
    write(folder / "memory.limit_in_bytes", f"{4 * GIB}\n")
    write(folder / "memory.usage_in_bytes", f"{2 * GIB}\n")
    write(folder / "memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}\n")
    assert memory.free_bytes(CPU) == 3 * GIB


def test_the_machine_of_this_test_has_some_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 2**20 < memory.free_bytes(CPU) < 2**50
