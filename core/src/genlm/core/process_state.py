"""`preserve_process_state`: what a library changes in the process around it, put back.

Inference engines are made to own their process: importing and building one sets environment
variables, seeds the global random generators and replaces log handlers. For plugins that run
such an engine inside a user's process.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

__all__ = ["preserve_process_state"]


@contextmanager
def preserve_process_state(**variables: str) -> Iterator[None]:
    """Restore, when the body ends or raises, the process state that libraries change.

    That is: the environment; the random generators of Python, numpy, torch and of CUDA
    devices in use; torch's number of threads, default dtype, gradient mode and
    `set_num_threads`; the root logger's handlers and level; `sys.excepthook`.

    Other threads see the changes while the body runs, and never an environment that lacks a
    variable which the body left alone: only differences are put back. What they change
    themselves in the meantime is put back too.

    Args:
        **variables: Environment variables to set while the body runs.
    """
    with ExitStack() as stack:
        for restorer_of in (_environment, _random_generators, _torch_settings, _hooks):
            stack.callback(restorer_of())
        os.environ.update(variables)
        yield


def _environment() -> Callable[[], None]:
    before = dict(os.environ)

    def restore() -> None:
        for name in set(os.environ) - set(before):
            os.environ.pop(name, None)
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    return restore


def _random_generators() -> Callable[[], None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if on_cuda else []

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore


def _torch_settings() -> Callable[[], None]:
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()

    def restore() -> None:
        torch.set_num_threads = set_threads  # vLLM disables it
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)

    return restore


def _hooks() -> Callable[[], None]:
    handlers, level, hook = list(logging.root.handlers), logging.root.level, sys.excepthook

    def restore() -> None:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        sys.excepthook = hook

    return restore
