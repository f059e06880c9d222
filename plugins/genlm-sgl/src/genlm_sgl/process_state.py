"""What importing and building SGLang changes in the process, put back afterwards.

SGLang is made to own its process: it sets variables of the environment, seeds the random
generators, adds log handlers and draws progress bars. An engine is a guest here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["QuietLogger", "guarded", "quiet"]


@contextlib.contextmanager
def guarded(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, and put back what the body changes.

    That is: the environment, the states of the random generators of Python, numpy and
    torch, torch's number of threads, default dtype and gradient mode, the handlers and
    level of the root logger, and the hook for uncaught exceptions.
    """
    environment = dict(os.environ)
    python, numpy, devices = random.getstate(), np.random.get_state(), _cuda_states()
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    handlers, level, hook = list(logging.root.handlers), logging.root.level, sys.excepthook
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(generator)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        sys.excepthook = hook


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show neither the warnings nor the progress bars that the body gives rise to."""
    import tqdm.std

    bar = tqdm.std.tqdm
    original = bar.__init__

    def hidden(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **(options | {"disable": True}))

    bar.__init__ = hidden
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        bar.__init__ = original


class QuietLogger:
    """Raises the level of a logger to that of errors, unless somebody has set one.

    Args:
        name: Of the logger.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._is_ours = self._logger.level == logging.NOTSET
        if self._is_ours:
            self._logger.setLevel(logging.ERROR)

    def restore(self) -> None:
        """Give the logger its level back."""
        if self._is_ours:
            self._logger.setLevel(logging.NOTSET)


def _cuda_states() -> list[torch.Tensor]:
    ready = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if ready else []
