"""`OutputCache`: recently used rows of log-probabilities, bounded by number and by bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import TYPE_CHECKING

from cachetools import LRUCache

from genlm.core.forking import renew_in_forks
from genlm.core.validation import checked_integer

if TYPE_CHECKING:
    import torch

__all__ = ["OutputCache"]


class OutputCache:
    """Keeps the most recently used rows, bounded by entries and by bytes.

    The bytes of the rows count, and those of the token ids in their keys, 4 for each id.

    Rows go in and come out as copies, so what a caller does to a row never reaches
    the cache. Safe to use from several threads.

    Args:
        max_entries: Most rows kept; 0 disables the cache.
        max_bytes: Most memory kept, None for no bound. A row that alone takes more is
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

    def get(self, key: Hashable) -> torch.Tensor | None:
        """Return a copy of the row, on the device on which it was put, or None."""
        if self.max_entries == 0:
            return None
        with self._lock:
            if key not in self._entries:  # cheaper than the exception
                return None
            row, device, _ = self._entries[key]
        return row.clone() if row.device == device else row.to(device)

    def put(self, key: Hashable, row: torch.Tensor) -> None:
        """Keep a copy of a row, evicting the least recently used ones it displaces.

        Overwriting a row with one of its size evicts no other row. A row that takes more
        than `max_bytes` is not kept, and the row under its key is removed.
        """
        if self.max_entries == 0:
            return
        nbytes = row.nbytes + _nbytes(key)
        if self.max_bytes is not None and nbytes > self.max_bytes:
            with self._lock:
                self._entries.pop(key, None)
            return
        on_cpu = self.move_to_cpu and row.device.type != "cpu"
        kept = row.cpu() if on_cpu else row.clone()
        with self._lock:
            if key in self._entries:
                # Older cachetools make room for both the old and the new value.
                del self._entries[key]
            self._entries[key] = (kept, row.device, nbytes)
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
        """Renew the lock; start afresh if another thread was changing the entries."""
        if self._lock.locked():
            self._entries = self._no_entries()
        self._lock = threading.Lock()

    def _no_entries(self) -> LRUCache[Hashable, tuple[torch.Tensor, torch.device, int]]:
        bound = float("inf") if self.max_bytes is None else self.max_bytes
        return LRUCache(bound, getsizeof=itemgetter(2))


def _nbytes(key: Hashable) -> int:
    """Memory of the packed token ids in a key."""
    total = 0
    for part in key if type(key) is tuple else (key,):
        if type(part) is bytes:
            total += len(part)
    return total
