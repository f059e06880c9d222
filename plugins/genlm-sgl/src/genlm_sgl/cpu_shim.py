"""Stand-ins for what SGLang asks for and does not use on a CPU: two packages, pinned memory.

`sgl_kernel` and torchvision exist in builds that a machine without a GPU often lacks. SGLang
imports names from both at its top level. The stand-ins give it any name it asks for, and
compute nothing: calling one raises and is recorded in `CALLED`, so a run that left `CALLED`
empty has used neither package. A package that is installed is never replaced.
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

__all__ = ["CALLED", "PACKAGES", "Unpinned", "installed_stand_ins", "standing_in"]

PACKAGES = ("sgl_kernel", "torchvision")
"""What may be stood in for."""

CALLED: list[str] = []
"""Full names of stand-ins that were called, in order."""


class Absent:
    """A name of a package that is not there; has any attribute, can do nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Absent:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self._name}.{attribute}")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        CALLED.append(self._name)
        package = self._name.partition(".")[0]
        raise NotImplementedError(
            f"SGLang called {self._name}; {package} is not installed and genlm-sgl only "
            f"stands in for its names. Use a model or options without it, or install {package}"
        )

    def __repr__(self) -> str:
        return f"<absent {self._name}>"


class _AbsentModule(ModuleType):
    """A module of a package that is not there."""

    __version__ = "0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package: it may have modules

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self.__name__}.{attribute}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the packages it stands in for, whatever their names."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


@contextlib.contextmanager
def standing_in() -> Iterator[tuple[str, ...]]:
    """Stand in for those of `PACKAGES` that are not installed.

    Afterwards no new module of theirs is found, and `torchvision`, which others ask for,
    is unknown again; what SGLang has imported keeps its names.

    Yields:
        The packages stood in for.
    """
    missing = tuple(name for name in PACKAGES if not _is_installed(name))
    if "torchvision" in missing:
        _have_transformers_look()
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
    """Within it, in this thread, tensors that are asked for in pinned memory are in any.

    Pinned memory makes copies to an accelerator faster; without one, torch raises. Values do
    not depend on it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, but pin nothing."""
        if func is torch.Tensor.pin_memory:
            return args[0]
        options = dict(kwargs or {})
        options.pop("pin_memory", None)
        return func(*args, **options)


def installed_stand_ins() -> list[str]:
    """Names of the stand-in modules that are importable now."""
    return sorted(
        name for name, module in sys.modules.items() if isinstance(module, _AbsentModule)
    )


def _is_installed(package: str) -> bool:
    known = sys.modules.get(package)
    if known is not None:
        return not isinstance(known, _AbsentModule)
    return importlib.util.find_spec(package) is not None


def _have_transformers_look() -> None:
    # transformers remembers whether torchvision is there: it must look before we pretend.
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
