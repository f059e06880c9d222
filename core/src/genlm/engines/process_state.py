"""Isolation of libraries that change the state of the user's process.

Importing such a library and building its engine sets environment variables, seeds the global
random generators and replaces log handlers: `preserve_process_state` restores them. Two engines
of the library in one process would share global state: `claim_process` refuses the second.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from genlm.core.base.errors import ModelLoadError

_lock = threading.Lock()
_owners: dict[str, weakref.ref[object]] = {}
"""The live engine of each library that may have only one."""


def claim_process(engine: object, library: str, advice: str) -> None:
    """Register an engine as the only one of its library in this process.

    The claim ends with `release_process`, or when the engine is garbage-collected.

    Args:
        engine: Any object that supports weak references.
        library: Name of the library.
        advice: Advice for the user in the message.

    Raises:
        ModelLoadError: Another engine of the library is alive.
    """
    with _lock:
        owner = _owners.get(library)
        if owner is not None and owner() is not None:
            raise ModelLoadError(
                f"asked for a second {library} engine in this process; {library} keeps global "
                f"state that two engines would corrupt. Close the first one, or {advice}"
            )
        _owners[library] = weakref.ref(engine)


def release_process(engine: object) -> None:
    """Let another engine claim the process; does nothing for an engine without a claim."""
    with _lock:
        for library, owner in list(_owners.items()):
            if owner() is engine:
                del _owners[library]


@contextmanager
def preserve_process_state(**variables: str) -> Iterator[None]:
    """When the body ends or raises, restore the process state that libraries change.

    This state is: the environment; the random generators of Python, numpy, torch and of CUDA
    devices in use; torch's number of threads, default dtype, gradient mode and
    `set_num_threads`; the root logger's handlers and level; `sys.excepthook`.

    Other threads see the changes while the body runs. They always see the variables that the
    body does not change: only differences are restored, including changes by other threads in
    the meantime.

    Args:
        **variables: Environment variables to set while the body runs.
    """
    with ExitStack() as stack:
        stack.callback(_restore_environment, dict(os.environ))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        stack.callback(_restore_threads, torch.get_num_threads())
        # vLLM disables it. The last callback is called first, before the one above.
        stack.callback(setattr, torch, "set_num_threads", torch.set_num_threads)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        stack.callback(setattr, logging.root, "handlers", list(logging.root.handlers))
        stack.callback(logging.root.setLevel, logging.root.level)
        stack.callback(setattr, sys, "excepthook", sys.excepthook)
        os.environ.update(variables)
        yield


def _restore_environment(before: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(before):
        os.environ.pop(name, None)
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _restore_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
