"""Renewing locks in forked processes.

A lock that another thread held at the moment of `os.fork` is never released in the child, so
every object with locks has them replaced there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["cached_property", "renew_in_forks"]

T = TypeVar("T")

_Lock = type(threading.Lock())


class cached_property(functools.cached_property[T]):  # noqa: N801 - as in functools
    """`functools.cached_property` as Python 3.12 has it: without a lock.

    Python 3.11 holds one for the attribute of all instances while it is computed.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = contextlib.nullcontext()


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_in_forks(owner: object) -> None:
    """Replace the locks among an object's attributes in every later fork of this process.

    Its method `_after_fork`, if it has one, is called before, to restore what a thread may have
    left inconsistent; a lock that it replaces itself stays.
    """
    _owners.add(owner)


def _renew_all() -> None:
    for owner in list(_owners):
        locks = {name: each for name, each in vars(owner).items() if type(each) is _Lock}
        if hasattr(owner, "_after_fork"):
            owner._after_fork()  # noqa: SLF001 - called here only
        for name, lock in locks.items():
            if getattr(owner, name) is lock:
                setattr(owner, name, threading.Lock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
