"""Restoring what vLLM changes in the process that loads a model.

vLLM logs, replaces functions of torch on the CPU, and decorates classes of transformers, each
for the rest of the process. `genlm.preserve_process_state` restores everything else.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

__all__ = ["Accelerator", "keep_transformers_classes", "quiet"]

_LOG_VARIABLES = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")


def quiet() -> dict[str, str]:
    """Return environment variables that limit vLLM's log to errors.

    Returns an empty dict if the user has set any variable of the log.
    """
    if any(name in os.environ for name in _LOG_VARIABLES):
        return {}
    log = logging.getLogger("vllm")
    if "vllm" not in sys.modules and log.level == logging.NOTSET:
        log.setLevel(logging.ERROR)  # until vLLM configures its log
    return {"VLLM_LOGGING_LEVEL": "ERROR"}


class Accelerator:
    """Functions of `torch.accelerator` that vLLM's CPU build replaces.

    vLLM replaces them once, when it is imported, and its engines in this process need the
    replacements. Making an object installs them again; `restore` installs torch's own.
    """

    _NAMES = ("synchronize", "empty_cache", "get_memory_info")
    _of_vllm: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        self._of_torch = self._functions()
        self._put(Accelerator._of_vllm)

    def restore(self) -> None:
        """Install the functions that were installed when this object was made."""
        Accelerator._of_vllm = self._functions()
        self._put(self._of_torch)

    def _functions(self) -> Mapping[str, Any]:
        return {
            name: getattr(torch.accelerator, name)
            for name in self._NAMES
            if hasattr(torch.accelerator, name)
        }

    def _put(self, functions: Mapping[str, Any]) -> None:
        for name, function in functions.items():
            setattr(torch.accelerator, name, function)


_State = tuple[tuple[type, ...], Mapping[str, Any]]


@contextmanager
def keep_transformers_classes(model_of: Callable[[], torch.nn.Module]) -> Iterator[None]:
    """Restore transformers' classes that vLLM changes while it builds a model.

    Where vLLM has no implementation of a model, it runs transformers' and decorates the class
    of the decoder for `torch.compile`. The class could then be neither built nor called
    outside vLLM in this process, for another engine or to check an adapter. vLLM's own model
    keeps the changes: its decoder becomes an instance of a subclass that has them.

    Args:
        model_of: Returns vLLM's model after it was built.
    """
    from vllm.model_executor.models.transformers import base

    decorate = base.support_torch_compile
    before: dict[type, _State] = {}

    def recording(**options: Any) -> Callable[[type], type]:
        def decorated(cls: type) -> type:
            before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
            result: type = decorate(**options)(cls)
            return result

        return decorated

    base.support_torch_compile = recording
    replaced: dict[type, type] = {}
    try:
        yield
        replaced |= {cls: _restored(cls, *state) for cls, state in before.items()}
        for module in model_of().modules():
            if type(module) in replaced:
                module.__class__ = replaced[type(module)]
    finally:
        base.support_torch_compile = decorate
        for cls, state in before.items():
            if cls not in replaced:
                _restored(cls, *state)


def _restored(cls: type, bases: tuple[type, ...], attributes: Mapping[str, Any]) -> type:
    """Restore a class; return a subclass with its changes."""
    changed = {
        name: value
        for name, value in vars(cls).items()
        if name not in attributes or attributes[name] is not value
    }
    added = tuple(base for base in cls.__bases__ if base not in bases)
    cls.__bases__ = bases
    for name in changed:
        if name in attributes:
            setattr(cls, name, attributes[name])
        else:
            delattr(cls, name)
    return type(cls.__name__, (cls, *added), {**changed, "__module__": cls.__module__})
