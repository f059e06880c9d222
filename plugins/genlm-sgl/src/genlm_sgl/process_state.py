"""What SGLang prints while it is imported and built, kept quiet.

It logs, warns and draws progress bars as a server does. `genlm.preserve_process_state` puts
back what it changes in the process.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["QuietLogger", "quiet"]


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
