"""Simulated accelerators, whose tensors have values and cannot be mixed with those of the CPU.

A tensor on a simulated device is computed on the CPU. It raises the errors of a tensor on a
CUDA device: operations with tensors of other devices, except indices and scalars, and
conversions to numpy. `Pretence` does the same for operations that create tensors on a device.

Uninitialised memory is NaN.

The simulation does not show errors of kernels, rounding, streams, memory that runs out, or code
that runs only on devices of type "cuda".
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["FIRST", "SECOND", "Pretence", "accelerated", "moved", "simulated_devices"]

_KIND = "privateuseone"  # the name that torch reserves for devices that it does not know
_CPU = torch.device("cpu")
FIRST, SECOND = torch.device(_KIND, 0), torch.device(_KIND, 1)

_MOVES = {"aten::to", "aten::_to_copy", "aten::copy_"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class _Elsewhere(torch.Tensor):
    """A tensor on a simulated device; `here` has its values."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor, device: torch.device) -> Self:
        with torch.inference_mode(False):  # torch gives no views of other wrappers
            wrapper = torch.Tensor._make_wrapper_subclass(
                cls,
                here.shape,
                strides=here.stride(),
                storage_offset=here.storage_offset(),
                dtype=here.dtype,
                device=device,
            )
        wrapper.here = here
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, operation: Any, _: Any, args: Any = (), kwargs: Any = None):
        return _run(operation, args, kwargs or {})

    def __repr__(self) -> str:
        return f"{self.here!r} on {self.device}"

    def tolist(self) -> Any:
        """Return the values."""
        return self.here.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the values."""
        return self.here.untyped_storage()


class Pretence(TorchDispatchMode):
    """The mode in which a thread can create tensors on the simulated devices.

    Args:
        has_float64: Whether the devices have float64, which Apple's GPUs lack.

    Attributes:
        copies: Devices to which tensors of the CPU were copied, in order.
        reads: Number of copies from a device to the CPU, which wait for the device.
    """

    _entered: ClassVar[int] = 0

    def __init__(self, *, has_float64: bool = True) -> None:
        super().__init__()
        self._has_float64 = has_float64
        self.copies: list[torch.device] = []
        self.reads = 0

    def __enter__(self) -> Self:
        Pretence._entered += 1
        torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor() bypasses the mode
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        Pretence._entered -= 1
        torch._C._set_only_lift_cpu_tensors(Pretence._entered > 0)  # for all threads

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None):
        result = _run(operation, args, kwargs or {})
        if not self._has_float64:
            _refuse_float64(operation._schema.name, result)
        if operation._schema.name in _MOVES and args[0].device == _CPU:
            self.copies += [result.device] * (result.device != _CPU)
        elif operation._schema.name in _MOVES and result.device == _CPU:
            self.reads += 1
        return result


def moved(module: Any, device: torch.device) -> Any:
    """Move a module's parameters and buffers to a device; returns the module."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            setattr(part, name, torch.nn.Parameter(weight.detach().to(device), False))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return module


@contextmanager
def simulated_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate devices on this thread and on threads that are started meanwhile."""
    run = threading.Thread.run

    def run_with_devices(thread: threading.Thread) -> None:
        with Pretence():
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_with_devices)
    with Pretence():
        yield


@contextmanager
def accelerated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate devices, and make `SECOND` the default device of `genlm-hf`."""
    from genlm_hf import loading

    to, default_device = torch.nn.Module.to, loading._device

    def move(module: Any, *args: Any, **kwargs: Any) -> Any:
        return moved(module, SECOND) if args == (SECOND,) else to(module, *args, **kwargs)

    def device_of(device: Any) -> torch.device:
        return SECOND if device is None else default_device(device)

    monkeypatch.setattr(torch.nn.Module, "to", move)
    monkeypatch.setattr(loading, "_device", device_of)
    with simulated_devices(monkeypatch):
        yield


def _run(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU; its results are on the device of its arguments."""
    leaves = tree_leaves((args, kwargs))
    inputs = {id(x.here): x for x in leaves if isinstance(x, _Elsewhere)}
    name = operation._schema.name
    if name not in _MOVES:
        _refuse_mixture(name, leaves, tree_leaves(args[1]) if name in _INDEXING else [])
    named = [x for x in leaves if isinstance(x, torch.device)]
    elsewhere = [x.device for x in inputs.values()]
    device = args[0].device if name == "aten::copy_" else [*named, *elsewhere, _CPU][0]

    def from_cpu(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or device == _CPU:
            return x
        original = inputs.get(id(x))
        return (
            original
            if original is not None and original.device == device
            else _Elsewhere(x, device)
        )

    result = operation(*tree_map(_to_cpu, args), **tree_map(_to_cpu, kwargs))
    if name in _MOVES and args[0].device != device:
        result = result.clone()
    if "empty" in name and result.is_floating_point():
        result.fill_(torch.nan)
    return tree_map(from_cpu, result)


def _to_cpu(x: Any) -> Any:
    if isinstance(x, _Elsewhere):
        return x.here
    return _CPU if isinstance(x, torch.device) else x


def _refuse_mixture(name: str, leaves: list[Any], indices: list[Any]) -> None:
    devices = {x.device for x in leaves if isinstance(x, _Elsewhere)}
    cpu_tensors = [
        x for x in leaves if isinstance(x, torch.Tensor) and x.device == _CPU and x.ndim
    ]
    if devices:
        devices |= {x.device for x in cpu_tensors if all(x is not index for index in indices)}
    if len(devices) > 1:
        raise RuntimeError(f"{name} mixes {sorted(map(str, devices))}")


def _refuse_float64(name: str, result: Any) -> None:
    if any(isinstance(x, _Elsewhere) and x.dtype == torch.float64 for x in tree_leaves(result)):
        raise TypeError(f"{name} makes a tensor of float64, which the device does not have")


class _Guard(torch._C._acc.DeviceGuard):  # without one torch indexes nothing there
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


_guard = _Guard()
torch._C._acc.register_python_privateuseone_device_guard(_guard)
_module = SimpleNamespace(_is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None)
torch._register_device_module(_KIND, _module)
