"""Python's garbage collector leaves out the modules of vLLM in tests.

A collection of all objects takes half a second of a core once vLLM has been imported, and vLLM
starts eight for each engine. The conftest.py of the repository freezes modules. vLLM freezes
all objects when an engine has started and unfreezes them when it is closed; in tests, only the
first freezing has an effect.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_freeze, _unfreeze, _collect = gc.freeze, gc.unfreeze, gc.collect
_frozen_by_vllm: list[bool] = []


def _is_vllm() -> bool:
    """Whether vLLM has called the function that calls this one."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("vllm.")


def _freeze_once_for_vllm() -> None:
    if not _is_vllm():
        _freeze()
    elif not _frozen_by_vllm:
        _frozen_by_vllm.append(True)
        _freeze()


def _have_no_effect() -> None:
    pass


def _collect_unless_for_vllm(generation: int = 2) -> int:
    return 0 if _is_vllm() else _collect(generation)


def keep_frozen() -> None:
    """Keep modules frozen while vLLM freezes and unfreezes objects."""
    gc.freeze, gc.unfreeze = _freeze_once_for_vllm, _have_no_effect


@contextmanager
def unfrozen() -> Iterator[None]:
    """Let vLLM freeze and unfreeze all objects, and skip the collections that it starts."""
    _unfreeze()
    gc.freeze, gc.unfreeze, gc.collect = _freeze, _unfreeze, _collect_unless_for_vllm
    try:
        yield
    finally:
        gc.collect = _collect
        gc.collect()
        gc.freeze()
        keep_frozen()


def unfreeze() -> None:
    """Unfreeze all objects, which Triton's bindings otherwise report at exit as leaked."""
    _unfreeze()
