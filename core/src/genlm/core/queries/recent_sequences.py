"""`RecentSequences`: looks up the sequences of lists of ids that extend recent lists.

A program that appends a token to a list for every request passes the whole list every time.
Comparing it with the previous list takes a tenth of the time of checking and packing its ids.
"""

from __future__ import annotations

import sys
import threading
from typing import NamedTuple

from genlm.core.queries.sequence import TokenSequence

SHORTEST = 64
"""Shorter lists are not stored: they are packed in less time than a lookup takes."""

_MAX_IDS = 2**21
"""Maximum number of ids in the lists of a generation: up to 90 MB, 42 bytes for each id, 28 of
which are the integer that the caller's list may share."""

_ENTRY_IDS = 32
"""Memory of an entry without its list, in ids."""

_FINGERPRINT = 8
"""A fingerprint has about this number of ids spread over a list, and as many ids at its end. Of
several lists with equal fingerprints, only the last one is stored."""

_Fingerprint = tuple[int, ...]


class _Entry(NamedTuple):
    """The first `length` ids of `ids`, a list that only grows, and their sequence."""

    ids: list[int]
    length: int
    sequence: TokenSequence

    def equals(self, ids: list[int], length: int) -> bool:
        """Whether the ids of this entry equal the first `length` ids of a list."""
        entry_ids = self.ids if len(self.ids) == length else self.ids[:length]
        return entry_ids == (ids if len(ids) == length else ids[:length])


class RecentSequences:
    """Lists of ids of recent requests, with their sequences. Thread-safe.

    The lists are stored in two generations. When the younger generation is full, it replaces
    the older one, whose lists have not been used in the meantime and are dropped.
    """

    def __init__(self) -> None:
        self._young: dict[_Fingerprint, _Entry] = {}
        self._old: dict[_Fingerprint, _Entry] = {}
        self._young_ids = 0
        # Lists of the younger generation, by `id`, and the number of ids that were counted.
        self._counted: dict[int, tuple[list[int], int]] = {}
        # Acquired without waiting: if another thread holds the lock, or if a forked process
        # never releases it, lists are not looked up.
        self._lock = threading.Lock()

    def find(self, ids: list[int], vocab_size: int) -> TokenSequence | None:
        """Return the sequence of `ids` if `ids` or `ids[:-1]` is stored, else None.

        The list has at least `SHORTEST` ids. It is neither changed nor stored.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if not _are_integers(ids):
                return None
            return self._find_equal(ids) or self._find_extended(ids, vocab_size)
        except Exception:  # noqa: BLE001 - an object that cannot be hashed or compared
            return None
        finally:
            self._lock.release()

    def add(self, ids: list[int], sequence: TokenSequence) -> None:
        """Store a list, which the caller must not change afterwards."""
        if self._lock.acquire(blocking=False):
            try:
                self._store(_Entry(ids, len(ids), sequence))
            finally:
                self._lock.release()

    def _find_equal(self, ids: list[int]) -> TokenSequence | None:
        fingerprint = _fingerprint(ids, len(ids))
        entry = self._get(fingerprint)
        if entry is None or not entry.equals(ids, len(ids)):
            return None
        if fingerprint not in self._young:
            self._store(entry)
        return entry.sequence

    def _find_extended(self, ids: list[int], vocab_size: int) -> TokenSequence | None:
        """Find the entry of `ids[:-1]`, and store and return the sequence of `ids`."""
        length, last = len(ids) - 1, ids[-1]
        entry = self._get(_fingerprint(ids, length))
        if entry is None or type(last) is not int or not 0 <= last < vocab_size:
            return None
        entry_ids = entry.ids
        if len(entry_ids) == length:
            entry_ids.append(last)  # so that whole lists are compared, without a copy
            if entry_ids != ids:
                entry_ids.pop()
                return None
        elif entry.equals(ids, length):  # another extension uses the list of the entry
            entry_ids = list(ids)
        else:
            return None
        sequence = TokenSequence(last.to_bytes(4, sys.byteorder), entry.sequence)
        self._store(_Entry(entry_ids, len(ids), sequence))
        return sequence

    def _get(self, fingerprint: _Fingerprint) -> _Entry | None:
        return self._young.get(fingerprint) or self._old.get(fingerprint)

    def _store(self, entry: _Entry) -> None:
        if self._young_ids > _MAX_IDS:
            self._old, self._young, self._young_ids = self._young, {}, 0
            self._counted.clear()
        self._young[_fingerprint(entry.ids, entry.length)] = entry
        _, counted = self._counted.get(id(entry.ids), (entry.ids, 0))
        self._counted[id(entry.ids)] = entry.ids, len(entry.ids)
        self._young_ids += len(entry.ids) - counted + _ENTRY_IDS


def _are_integers(ids: list[int]) -> bool:
    """Whether all ids are integers, not floats or other objects that equal integers.

    Summation, the fastest pass over a list, returns an `int` only for integers and booleans.
    Lists that could be masks are excluded, too: the mean of their ids is below 2.
    """
    total = sum(ids)
    return type(total) is int and total > len(ids)


def _fingerprint(ids: list[int], length: int) -> _Fingerprint:
    spread = ids[: length : length // _FINGERPRINT]
    return (length, *spread, *ids[length - _FINGERPRINT : length])
