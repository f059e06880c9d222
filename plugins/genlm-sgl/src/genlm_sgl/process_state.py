"""Suppression of SGLang's logs, warnings and progress bars.

`genlm.preserve_process_state` restores other state of the process that SGLang changes.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and progress bars while the body runs."""
    import tqdm.std

    bar = tqdm.std.tqdm
    original = bar.__init__

    def init_disabled(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **(options | {"disable": True}))

    bar.__init__ = init_disabled
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        bar.__init__ = original


class QuietLogger:
    """Sets the level of a logger to ERROR unless a level is set.

    Args:
        name: Name of the logger.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._changed = self._logger.level == logging.NOTSET
        if self._changed:
            self._logger.setLevel(logging.ERROR)

    def restore(self) -> None:
        """Restore the level of the logger."""
        if self._changed:
            self._logger.setLevel(logging.NOTSET)
