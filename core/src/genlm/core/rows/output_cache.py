"""`OutputCache`: an LRU cache of rows and results of reductions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from cachetools import LRUCache

from genlm.core.base.forking import renew_in_forks
from genlm.core.base.validation import checked_integer

if TYPE_CHECKING:
    import torch

Entry: TypeAlias = "tuple[Any, torch.device | None, int]"
"""A result, its original device, and the number of bytes that it counts."""

_OTHER_BYTES = 64
"""Bytes counted for a number or another object without a known size."""


class OutputCache:
    """LRU cache of rows and results of reductions, limited by entries and by bytes.

    The bytes of an entry are those of the row and of the token ids in its key, 4 per id, and
    for a result of a reduction also the `nbytes` of the reduction.

    Rows are copied on insertion and on retrieval, so changes by a caller never affect the
    cache. The cache may be used from several threads.

    Args:
        max_entries: Maximum number of rows; 0 disables the cache.
        max_bytes: Maximum memory, None for no limit. A row that alone exceeds it is not stored.
        move_to_cpu: Whether to store rows in main memory; they are returned on the device on
            which they were inserted.

    Raises:
        TypeError: A limit is not an integer.
        ValueError: A limit is negative.
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
        """Return a copy of a stored result, or None; rows are on their original device."""
        entry = self.find(key)
        return None if entry is None else entry_copy(entry)

    def find(self, key: Hashable) -> Entry | None:
        """Return an entry, whose result must not be changed, or None."""
        if self.max_entries == 0:
            return None
        with self._lock:
            if key not in self._entries:  # cheaper than the exception
                return None
            entry: Entry = self._entries[key]
        return entry

    def put(self, key: Hashable, row: Any) -> None:
        """Store a copy of a row; evict the least recently used rows if necessary.

        Replacing a row by a row of the same size evicts no other row. A row of more than
        `max_bytes` is not stored, and the previous row of its key is removed.
        """
        device = getattr(row, "device", None)
        nbytes = _nbytes(row) + _key_nbytes(key)
        if self.max_bytes is not None and nbytes > self.max_bytes:
            with self._lock:
                self._entries.pop(key, None)
            return
        # Arrays of numpy have a `device`, too: the string "cpu".
        on_cpu = self.move_to_cpu and getattr(device, "type", "cpu") != "cpu"
        stored = row.cpu() if on_cpu else copy_result(row)
        with self._lock:
            if key in self._entries:
                # Older cachetools make room for both the old and the new value.
                del self._entries[key]
            self._entries[key] = (stored, device, nbytes)
            while len(self._entries) > self.max_entries:
                self._entries.popitem()

    def clear(self, which: Callable[[Hashable], bool] = lambda _key: True) -> None:
        """Drop the rows whose keys satisfy `which`; by default all rows."""
        with self._lock:
            for key in [key for key in self._entries if which(key)]:
                del self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __reduce__(self) -> Any:
        raise TypeError(
            "an OutputCache cannot be pickled or copied, because threads share it; create one "
            "with the same limits"
        )

    def __repr__(self) -> str:
        bound = "" if self.max_bytes is None else f" of at most {self.max_bytes:,}"
        return (
            f"<{type(self).__name__}: {len(self)} of at most {self.max_entries} rows, "
            f"{self.nbytes:,}{bound} bytes>"
        )

    @property
    def nbytes(self) -> int:
        """Memory of the stored rows and of the token ids in their keys."""
        return int(self._entries.currsize)

    def _after_fork(self) -> None:
        """Empty the cache in a forked process if another thread was changing the entries."""
        if self._lock.locked():
            self._entries = self._no_entries()

    def _no_entries(self) -> LRUCache[Hashable, Entry]:
        bound = float("inf") if self.max_bytes is None else self.max_bytes
        return LRUCache(bound, getsizeof=itemgetter(2))


def entry_value(entry: Entry) -> Any:
    """Return an entry's result on its original device; it must not be changed."""
    value, device, _ = entry
    return value if device is None or value.device == device else value.to(device)


def entry_copy(entry: Entry) -> Any:
    """Return a copy of an entry's result on its original device."""
    value, device, _ = entry
    return copy_result(value) if device is None or value.device == device else value.to(device)


def copy_result(value: Any) -> Any:
    """Return a copy of a result that shares no mutable memory with it."""
    clone = getattr(value, "clone", None)  # of a tensor
    if clone is not None:
        return clone()
    make = getattr(value, "_make", None)  # of a named tuple: deepcopy takes 20 times as long
    return copy.deepcopy(value) if make is None else make(map(copy_result, value))


def _nbytes(value: Any) -> int:
    """Memory of a result's tensors and of their containers."""
    if isinstance(value, (tuple, list, dict)):
        return sum(map(_nbytes, value.values() if isinstance(value, dict) else value))
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
