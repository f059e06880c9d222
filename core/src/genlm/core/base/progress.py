"""Stages of loading a model, which engines report and `load_model` can show."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

TICK_S = 1.0
"""Seconds between two refreshes of the elapsed time of a stage."""

_current: ContextVar[Stages | None] = ContextVar("genlm_loading_stages", default=None)


def loading_stage(text: str) -> bool:
    """Report a new stage of building an engine, which ends the previous stage.

    Args:
        text: Short description, such as `"weights"`.

    Returns:
        Whether stages are shown. If so, the engine may also show its library's progress bars.
    """
    stages = _current.get()
    if stages is None:
        return False
    stages.begin(text)
    return True


@contextmanager
def show_stages(*, enabled: bool) -> Iterator[None]:
    """Show the stages that are reported in this context, on standard error."""
    if not enabled:
        yield
        return
    with Stages() as stages:
        token = _current.set(stages)
        try:
            yield
        finally:
            _current.reset(token)


class Stages:
    """Prints a line for each stage with its elapsed time, and a last line with the total time.

    Lines are bars of tqdm, which do not overwrite other bars and work in notebooks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: Any = None
        self._ended = threading.Event()
        self._start_s = time.monotonic()

    def __enter__(self) -> Stages:
        threading.Thread(target=self._tick, name="genlm-progress", daemon=True).start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        with self._lock:
            self._close()
            elapsed = f"{time.monotonic() - self._start_s:.1f} s"
            self._bar = _line("failed" if error else "ready", f"after {elapsed}")
            self._close()

    def begin(self, text: str) -> None:
        """End the current stage, if any, and begin a new one."""
        with self._lock:
            self._close()
            self._bar = _line(text, "{elapsed}")

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._lock:
                if self._bar is not None:
                    self._bar.refresh()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _line(text: str, time_format: str) -> Any:
    from tqdm.auto import tqdm

    return tqdm(desc=f"genlm: {text}", bar_format="{desc} " + time_format)
