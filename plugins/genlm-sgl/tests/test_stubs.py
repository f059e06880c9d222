"""Stubs have any name, compute nothing, and do not replace installed packages."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from genlm_sgl.cpu import stubs


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stubs, "CALLED", [])


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a package that is not installed and may be stubbed."""
    monkeypatch.setattr(stubs, "PACKAGES", ("genlm_absent",))
    yield "genlm_absent"
    for name in [name for name in sys.modules if name.partition(".")[0] == "genlm_absent"]:
        del sys.modules[name]


def test_any_name_can_be_imported_and_calling_it_raises_and_is_recorded(absent: str) -> None:
    with stubs.stub_packages() as packages:
        assert packages == (absent,)
        module = importlib.import_module(f"{absent}.deep.inside")
    names = [name for name in stubs.installed_stubs() if name.startswith(absent)]
    assert names == [absent, f"{absent}.deep", f"{absent}.deep.inside"]
    assert stubs.CALLED == []
    for attempt in (module.gelu, module.modes.BICUBIC):
        with pytest.raises(NotImplementedError, match=f"install {absent}"):
            attempt(1, x=2)
    called = [f"{absent}.deep.inside.gelu", f"{absent}.deep.inside.modes.BICUBIC"]
    assert called == stubs.CALLED
    assert not hasattr(module, "__wrapped__")


def test_nothing_new_is_found_afterwards(absent: str) -> None:
    with stubs.stub_packages():
        assert importlib.util.find_spec(absent) is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{absent}.never_imported")
    with stubs.stub_packages() as packages:  # again, for the next engine
        assert packages == (absent,)


def test_an_installed_package_is_never_replaced(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / absent).mkdir()
    (tmp_path / absent / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with stubs.stub_packages() as packages:
        assert packages == ()
        module: Any = importlib.import_module(absent)
    assert module.real
    with stubs.stub_packages() as packages:  # imported by now
        assert packages == ()
    assert absent not in stubs.installed_stubs()


def test_tensors_are_made_without_pinning_in_this_block_and_thread_alone() -> None:
    def pinned() -> list[torch.Tensor]:
        tensor = torch.zeros(2, pin_memory=True)
        return [tensor, torch.tensor([1.0], pin_memory=True), tensor.pin_memory()]

    has_gpu = torch.cuda.is_available()
    outside = contextlib.nullcontext() if has_gpu else pytest.raises(RuntimeError)
    with stubs.Unpinned():
        first, second, third = pinned()
        with ThreadPoolExecutor(1) as elsewhere, outside:
            elsewhere.submit(pinned).result()
    assert (first.tolist(), second.tolist()) == ([0.0, 0.0], [1.0])
    assert not first.is_pinned()
    assert third is first
    with outside:
        pinned()


def test_torchvision_is_unknown_again_to_everybody_else() -> None:
    from transformers.utils import import_utils

    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        assert isinstance(importlib.import_module("torchvision"), ModuleType)
        return
    with stubs.stub_packages():
        importlib.import_module("torchvision.transforms")
    assert not [name for name in sys.modules if name.startswith("torchvision")]
    assert not import_utils.is_torchvision_available()
