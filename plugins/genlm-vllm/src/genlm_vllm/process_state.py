"""Restores the state of a process that vLLM changes when it loads a model.

vLLM configures logging, replaces functions of torch on the CPU, and decorates classes of
transformers, all for the rest of the process. `genlm.preserve_process_state` restores other
state.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

_LOG_VARIABLES = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")


def log_variables() -> dict[str, str]:
    """Return environment variables that limit vLLM's log to errors.

    The dict is empty if the user has set any variable of vLLM's log.
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
    replacements. The constructor installs the replacements, `restore` the functions of torch.
    """

    _NAMES = ("synchronize", "empty_cache", "get_memory_info")
    _vllm_functions: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        self._torch_functions = self._installed_functions()
        self._install(Accelerator._vllm_functions)

    def restore(self) -> None:
        """Install the functions that were installed before this object was created."""
        Accelerator._vllm_functions = self._installed_functions()
        self._install(self._torch_functions)

    def _installed_functions(self) -> Mapping[str, Any]:
        return {name: getattr(torch.accelerator, name) for name in self._NAMES}

    def _install(self, functions: Mapping[str, Any]) -> None:
        for name, function in functions.items():
            setattr(torch.accelerator, name, function)


_State = tuple[tuple[type, ...], Mapping[str, Any]]


@contextmanager
def keep_transformers_classes(model_of: Callable[[], torch.nn.Module]) -> Iterator[None]:
    """Restore transformers' classes that vLLM changes while it builds a model.

    If vLLM has no implementation of a model, it uses transformers' and decorates the class of
    the decoder for `torch.compile`. The class could then be neither built nor called outside
    vLLM in this process, by another engine or to check an adapter. vLLM's model keeps the
    changes: its decoder becomes an instance of a subclass that has them.

    Args:
        model_of: Function that returns vLLM's model after it was built.
    """
    from vllm.model_executor.models.transformers import base

    decorate = base.support_torch_compile
    before: dict[type, _State] = {}

    def support_torch_compile(**options: Any) -> Callable[[type], type]:
        def decorate_class(cls: type) -> type:
            before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
            result: type = decorate(**options)(cls)
            return result

        return decorate_class

    base.support_torch_compile = support_torch_compile
    replaced: dict[type, type] = {}
    try:
        yield
        replaced |= {cls: _restore_class(cls, *state) for cls, state in before.items()}
        for module in model_of().modules():
            if type(module) in replaced:
                module.__class__ = replaced[type(module)]
    finally:
        base.support_torch_compile = decorate
        for cls, state in before.items():
            if cls not in replaced:
                _restore_class(cls, *state)


def _restore_class(cls: type, bases: tuple[type, ...], attributes: Mapping[str, Any]) -> type:
    """Restore a class and return a subclass with the changes."""
    changes = {
        name: value
        for name, value in vars(cls).items()
        if name not in attributes or attributes[name] is not value
    }
    added = tuple(base for base in cls.__bases__ if base not in bases)
    cls.__bases__ = bases
    for name in changes:
        if name in attributes:
            setattr(cls, name, attributes[name])
        else:
            delattr(cls, name)
    return type(cls.__name__, (cls, *added), {**changes, "__module__": cls.__module__})
