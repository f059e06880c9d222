"""Renewing locks in forked processes.

A lock that another thread held at the moment of `os.fork` is never released in the child, so
its owner replaces it there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

__all__ = ["LockOwner", "cached_property", "renew_in_forks"]

T = TypeVar("T")


class LockOwner(Protocol):
    """An object with locks of its own."""

    def _after_fork(self) -> None:
        """Renew the locks, and restore the state that a thread may have left inconsistent."""
        ...


class cached_property(functools.cached_property[T]):  # noqa: N801 - as in functools
    """`functools.cached_property` as Python 3.12 has it: without a lock.

    Python 3.11 holds one for the attribute of all instances while it is computed.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = contextlib.nullcontext()


_owners: weakref.WeakSet[LockOwner] = weakref.WeakSet()


def renew_in_forks(owner: LockOwner) -> None:
    """Have `owner._after_fork` called in every later fork of this process."""
    _owners.add(owner)


def _renew_all() -> None:
    for owner in list(_owners):
        owner._after_fork()  # noqa: SLF001 - called here only


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
