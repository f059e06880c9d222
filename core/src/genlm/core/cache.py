"""`OutputCache`: recently used rows and results of reductions, bounded by number and bytes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from genlm.core.forking import renew_in_forks
from genlm.core.validation import checked_integer

if TYPE_CHECKING:
    import torch

__all__ = ["OutputCache", "copied"]

_OTHER_BYTES = 64
"""Counted for a number or another object that does not know its size."""


class OutputCache:
    """Keeps the most recently used rows, bounded by entries and by bytes.

    The bytes of the rows count, and those of the token ids in their keys, 4 for each id.
    Results of reductions are kept as rows are; the `nbytes` of a reduction counts as well.

    Rows go in and come out as copies, so what a caller does to a row never reaches
    the cache. Safe to use from several threads.

    Args:
        max_entries: Maximum number of rows; 0 disables the cache.
        max_bytes: Maximum memory, None for no bound. A row that alone takes more is
            not kept.
        move_to_cpu: Keep the rows in main memory; they return to the device on which
            they were put.

    Raises:
        TypeError: A bound that is not an integer.
        ValueError: A negative bound.
    """

    def __init__(
        self, max_entries: int, *, max_bytes: int | None = None, move_to_cpu: bool = False
    ) -> None:
        self.max_entries = checked_integer("max_entries", max_entries, 0)
        self.max_bytes = (
            None if max_bytes is None else checked_integer("max_bytes", max_bytes, 0)
        )
        self.move_to_cpu = move_to_cpu
        self._lock = threading.Lock()
        self._entries = self._no_entries()
        renew_in_forks(self)

    def get(self, key: Hashable) -> Any:
        """Return a copy of a stored result, rows on the device they came from, or None."""
        if self.max_entries == 0:
            return None
        with self._lock:
            if key not in self._entries:  # cheaper than the exception
                return None
            row, device, _ = self._entries[key]
        return copied(row) if device is None or row.device == device else row.to(device)

    def size_of(self, key: Hashable) -> int | None:
        """Return the bytes that an entry and its key take, None if there is none."""
        with self._lock:
            return int(self._entries[key][2]) if key in self._entries else None

    def kept(self, key: Hashable) -> Any:
        """Return a stored result itself, rows on the device they came from, or None.

        The result must not be changed.
        """
        with self._lock:
            if key not in self._entries:
                return None
            row, device, _ = self._entries[key]
        return row if device is None or row.device == device else row.to(device)

    def put(self, key: Hashable, row: Any) -> None:
        """Keep a copy of a row, evicting the least recently used ones it displaces.

        Overwriting a row with one of its size evicts no other row. A row that takes more
        than `max_bytes` is not kept, and the row under its key is removed.
        """
        if self.max_entries == 0:
            return
        device = getattr(row, "device", None)
        nbytes = _nbytes(row) + _key_nbytes(key)
        if self.max_bytes is not None and nbytes > self.max_bytes:
            with self._lock:
                self._entries.pop(key, None)
            return
        on_cpu = self.move_to_cpu and device is not None and device.type != "cpu"
        kept = row.cpu() if on_cpu else copied(row)
        with self._lock:
            if key in self._entries:
                # Older cachetools make room for both the old and the new value.
                del self._entries[key]
            self._entries[key] = (kept, device, nbytes)
            while len(self._entries) > self.max_entries:
                self._entries.popitem()

    def clear(self, which: Callable[[Hashable], bool] = lambda _key: True) -> None:
        """Drop the rows with keys for which `which` is true; by default all."""
        with self._lock:
            for key in [key for key in self._entries if which(key)]:
                del self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __repr__(self) -> str:
        bound = "" if self.max_bytes is None else f" of at most {self.max_bytes:,}"
        return (
            f"<{type(self).__name__}: {len(self)} of at most {self.max_entries} rows, "
            f"{self.nbytes:,}{bound} bytes>"
        )

    @property
    def nbytes(self) -> int:
        """Memory of the rows kept and of the token ids in their keys."""
        return int(self._entries.currsize)

    def _after_fork(self) -> None:
        """Start afresh in a forked process if another thread was changing the entries."""
        if self._lock.locked():
            self._entries = self._no_entries()

    def _no_entries(self) -> LRUCache[Hashable, tuple[Any, torch.device | None, int]]:
        bound = float("inf") if self.max_bytes is None else self.max_bytes
        return LRUCache(bound, getsizeof=itemgetter(2))


def copied(value: Any) -> Any:
    """Return a copy of a result that shares no memory with it that could be changed."""
    clone = getattr(value, "clone", None)  # of a tensor
    return copy.deepcopy(value) if clone is None else clone()


def _nbytes(value: Any) -> int:
    """Memory of a result's tensors, and a little for what holds them."""
    if isinstance(value, tuple):
        return sum(map(_nbytes, value))
    nbytes = getattr(value, "nbytes", None)
    return _OTHER_BYTES if nbytes is None else int(nbytes)


def _key_nbytes(key: Hashable) -> int:
    """Memory of the packed token ids and the reductions in a key."""
    total = 0
    for part in key if isinstance(key, tuple) else (key,):
        if type(part) is bytes:
            total += len(part)
        elif type(part) is tuple:
            total += _key_nbytes(part)
        else:
            total += getattr(part, "nbytes", 0)
    return total
