"""Keeps transformers' progress bars off the terminal while a model is loaded.

A library that is asked for a model has no business writing to stderr. Downloads, which may
take long, keep the hub's own bars.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["without_bars"]

_lock = threading.Lock()
_users = 0


@contextmanager
def without_bars() -> Iterator[None]:
    """Let transformers show no bars in this context, on any thread.

    A hook that the program has installed for its own display stays in charge; when the
    last of several contexts ends, everything is as it was.
    """
    from transformers.utils.logging import set_tqdm_hook

    global _users  # noqa: PLW0603 - the hook is transformers' global, and so is its count
    with _lock:
        _users += 1
        _replace(set_tqdm_hook, None, _hidden)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _replace(set_tqdm_hook, _hidden, None)


def _replace(set_hook: Callable[[Any], Any], old: Any, new: Any) -> None:
    found = set_hook(new)
    if found is not old:
        set_hook(found)


def _hidden(factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return factory(*args, **{**kwargs, "disable": True})
