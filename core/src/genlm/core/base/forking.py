"""Renewing locks in forked processes.

A lock that another thread held at the moment of `os.fork` is never released in the child
process, so the locks of registered objects are replaced there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_Lock = type(threading.Lock())


class cached_property(functools.cached_property[T]):  # noqa: N801 - as in functools
    """`functools.cached_property` without a lock, as in Python 3.12.

    Python 3.11 holds a lock, shared by all instances, while it computes the attribute.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = contextlib.nullcontext()


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_in_forks(owner: object) -> None:
    """Replace the locks among an object's attributes in every later fork of this process.

    If the object has a method `_after_fork`, it is called first, to restore state that another
    thread may have left inconsistent. A lock that the method replaced is not replaced again.
    """
    _owners.add(owner)


def _renew_all() -> None:
    for owner in list(_owners):
        locks = {name: value for name, value in vars(owner).items() if type(value) is _Lock}
        if hasattr(owner, "_after_fork"):
            owner._after_fork()  # noqa: SLF001 - called here only
        for name, lock in locks.items():
            if getattr(owner, name) is lock:
                setattr(owner, name, threading.Lock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
