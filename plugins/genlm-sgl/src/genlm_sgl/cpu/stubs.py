"""Stubs for two packages and for pinned memory, which SGLang needs but does not use on a CPU.

SGLang imports names of `sgl_kernel` and torchvision when it is imported, and machines without a
GPU often lack builds of both. The stubs have any name and compute nothing: a call raises an
error and is recorded in `CALLED`. If `CALLED` is empty, neither package was used. Installed
packages are not replaced.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

PACKAGES = ("sgl_kernel", "torchvision")
"""Packages that are stubbed if they are not installed."""

CALLED: list[str] = []
"""Full names of the stubs that were called, in order."""


class Absent:
    """An object of an absent package, which has every attribute and raises when called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Absent:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self._name}.{attribute}")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise an error that names the absent package."""
        CALLED.append(self._name)
        package = self._name.partition(".")[0]
        raise NotImplementedError(
            f"SGLang called {self._name}; {package} is not installed, and genlm-sgl provides "
            f"only its names. Use a model or options without it, or install {package}"
        )

    def __repr__(self) -> str:
        return f"<absent {self._name}>"


class _AbsentModule(ModuleType):
    """A module of an absent package."""

    __version__ = "0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # makes the module a package

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self.__name__}.{attribute}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the stubbed packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing; the module has no code."""


@contextlib.contextmanager
def stub_packages() -> Iterator[tuple[str, ...]]:
    """Stub the packages of `PACKAGES` that are not installed.

    On exit, further imports of the packages fail, and `torchvision`, which other libraries look
    for, is absent again; SGLang keeps the names that it has imported.

    Yields:
        The stubbed packages.
    """
    missing = tuple(name for name in PACKAGES if not _is_installed(name))
    if "torchvision" in missing:
        _cache_transformers_lookup()
    finder = _Finder(missing)
    sys.meta_path.append(finder)
    try:
        yield missing
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            if isinstance(sys.modules[name], _AbsentModule):
                del sys.modules[name]


class Unpinned(TorchFunctionMode):
    """Allocates tensors in ordinary memory where pinned memory is requested, in this thread.

    Pinned memory makes copies to an accelerator faster; without an accelerator torch raises.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func` without pinning."""
        if func is torch.Tensor.pin_memory:
            return args[0]
        options = dict(kwargs or {})
        options.pop("pin_memory", None)
        return func(*args, **options)


def installed_stubs() -> list[str]:
    """Return the names of the stub modules that are importable now."""
    return sorted(
        name for name, module in sys.modules.items() if isinstance(module, _AbsentModule)
    )


def _is_installed(package: str) -> bool:
    module = sys.modules.get(package)
    if module is not None:
        return not isinstance(module, _AbsentModule)
    return importlib.util.find_spec(package) is not None


def _cache_transformers_lookup() -> None:
    # transformers caches whether torchvision is installed, so it must look before it is
    # stubbed.
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
