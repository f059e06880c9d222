"""Hides transformers' progress bars while a model is loaded.

Progress bars of downloads from the hub, which may take long, remain visible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_users = 0


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Hide transformers' bars within this context, on all threads.

    A hook that the program has installed keeps its effect. When the last of several
    contexts ends, the previous state is restored.
    """
    from transformers.utils.logging import set_tqdm_hook

    global _users  # noqa: PLW0603 - the hook is transformers' global, and so is its count
    with _lock:
        _users += 1
        _replace(set_tqdm_hook, None, _create_hidden_bar)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _replace(set_tqdm_hook, _create_hidden_bar, None)


def _replace(set_hook: Callable[[Any], Any], old: Any, new: Any) -> None:
    current = set_hook(new)
    if current is not old:
        set_hook(current)


def _create_hidden_bar(
    factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    return factory(*args, **{**kwargs, "disable": True})
