"""What vLLM changes in the process around it, and how it is put back.

Importing it logs and, on the CPU, replaces functions of torch for good. Two engines that
compute in one process corrupt each other's answers, so there is at most one.
`genlm.preserve_process_state` puts back the rest.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from genlm import ModelLoadError

__all__ = ["Accelerator", "claim_process", "quiet", "release_process"]


_LOG_VARIABLES = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")


def quiet() -> dict[str, str]:
    """Return the variables that let vLLM log errors only, none if the user set any."""
    if any(name in os.environ for name in _LOG_VARIABLES):
        return {}
    log = logging.getLogger("vllm")
    if "vllm" not in sys.modules and log.level == logging.NOTSET:
        log.setLevel(logging.ERROR)  # for what it says before it configures its log
    return {"VLLM_LOGGING_LEVEL": "ERROR"}


class Accelerator:
    """Functions of `torch.accelerator` that vLLM's CPU build disables for good.

    An engine that computes in this process relies on that while it lives, and vLLM may
    disable them only once, when it is imported.
    """

    _NAMES = ("synchronize", "empty_cache", "get_memory_info")
    _of_vllm: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        self._of_torch = self._functions()
        self._put(Accelerator._of_vllm)

    def restore(self) -> None:
        """Put back the functions that were there when this object was made."""
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


_lock = threading.Lock()
_living: weakref.ref[Any] | None = None


def claim_process(engine: Any) -> None:
    """Make an engine the one that computes in this process, until it is released or gone.

    Raises:
        ModelLoadError: Another engine is.
    """
    global _living  # noqa: PLW0603 - the process is what is claimed
    with _lock:
        if _living is not None and _living() is not None:
            raise ModelLoadError(
                "asked for a second vLLM engine in this process, and vLLM's engines in one "
                "process corrupt each other's answers. Close the first one, or load with "
                "multiprocess=True, which gives every engine processes of its own"
            )
        _living = weakref.ref(engine)


def release_process(engine: Any) -> None:
    """Let another engine claim the process."""
    global _living  # noqa: PLW0603
    with _lock:
        if _living is not None and _living() is engine:
            _living = None
