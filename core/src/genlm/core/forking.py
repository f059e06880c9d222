"""Locks in a forked process: their holders may be threads that it does not have.

A lock that another thread held at the moment of `os.fork` is never released in the child.
Whoever owns one renews it there.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["LockOwner", "renew_in_forks"]


class LockOwner(Protocol):
    """An object with locks of its own."""

    def _after_fork(self) -> None:
        """Renew the locks, and whatever a thread may have left half done under them."""
        ...


_owners: weakref.WeakSet[LockOwner] = weakref.WeakSet()


def renew_in_forks(owner: LockOwner) -> None:
    """Have `owner._after_fork` called in every later fork of this process."""
    _owners.add(owner)


def _renew_all() -> None:
    for owner in list(_owners):
        owner._after_fork()  # noqa: SLF001 - nobody else is to call it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
