"""A vLLM that is newer than the tested versions is refused if its private interface changed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from private_names import uses
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

import genlm
import genlm_vllm
from genlm_vllm import private_interface, versions
from genlm_vllm.private_interface import changes, check_private_interface


def test_the_installed_version_has_all_that_is_listed() -> None:
    assert Version(versions.check_version()) >= Version(versions.TESTED[0])
    assert list(changes()) == []


def test_what_is_listed_of_the_scheduler_and_the_workers_is_compared() -> None:
    compared: dict[type, set[str]] = {}
    for path, names in private_interface._NAMES.items():
        target, (owner, _, name) = private_interface._resolve(path), path.rpartition(".")
        is_class = isinstance(target, type)
        cls = target if is_class else private_interface._resolve(owner)
        compared.setdefault(cls, set()).update(names.split() if is_class else [name])
    attributes = uses(Path(next(iter(genlm_vllm.__path__)))).attributes
    lines = Path(__file__).with_name("private_names.txt").read_text().splitlines()
    checked, missing = 0, []
    for where, *rest in filter(None, (line.split("#")[0].split() for line in lines)):
        cls, name = private_interface._resolve(where), "".join(rest)
        if not (where.startswith("vllm.v1.") and isinstance(cls, type)):
            continue
        known = set[str]().union(*(compared[base] for base in cls.__mro__ if base in compared))
        used = attributes[name[2:]] if name.startswith("*.") else {name}
        checked += len(used)
        missing += [f"{where} {each}" for each in sorted(used - known)]
    assert missing == []
    assert checked > 40


def test_each_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_request(self: Any, request: Any, wave: int) -> None: ...
    def finish_requests(
        self: Any, request_ids: Any, finished_status: Any, reason: str = ""
    ) -> None: ...

    monkeypatch.setattr(Scheduler, "add_request", add_request)
    monkeypatch.setattr(Scheduler, "finish_requests", finish_requests)  # harmless
    monkeypatch.delattr(Scheduler, "get_request_counts")
    monkeypatch.delattr(Scheduler.__mro__[1], "get_request_counts")
    scheduler, request = "vllm.v1.core.sched.scheduler.Scheduler", "vllm.v1.request.Request"
    output = "vllm.v1.core.sched.output.SchedulerOutput"
    names = {
        path: listed
        for path, listed in private_interface._NAMES.items()
        if path.startswith(f"{scheduler}.") or path == output
    }
    names[request] = "block_hashes nothing"
    monkeypatch.setattr(private_interface, "_NAMES", names)
    fields = SchedulerOutput.__dataclass_fields__.copy()
    del fields["new_block_ids_to_zero"]
    monkeypatch.setattr(SchedulerOutput, "__dataclass_fields__", fields)
    assert list(changes()) == [
        f"{scheduler}.get_request_counts is gone",
        f"{scheduler}.add_request has the parameters (self, request, wave)",
        f"{output} has no attribute new_block_ids_to_zero",
        f"{request} has no attribute nothing",
    ]


@pytest.mark.parametrize(
    ("installed", "refused"), [("0.33.1", True), ("0.33.0", False), ("0.32.0", False)]
)
def test_only_newer_versions_are_compared(
    monkeypatch: pytest.MonkeyPatch, installed: str, refused: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    monkeypatch.setattr(private_interface, "changes", lambda: iter(["f is gone", "g is gone"]))
    if not refused:
        check_private_interface()
        return
    with pytest.raises(
        genlm.ModelLoadError, match=rf"vLLM {installed} .*: f is gone; g is gone\."
    ):
        check_private_interface()


def test_a_newer_version_without_changes_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.33.1")
    check_private_interface()


def test_a_model_is_not_loaded_by_a_version_that_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.33.1")
    monkeypatch.setattr(private_interface, "changes", lambda: iter(["f is gone"]))
    with pytest.raises(genlm.ModelLoadError, match="f is gone"):
        genlm.load_model("demo", backend="vllm")
