"""`RecentSequences`: finds the sequence of a list of ids that extends a recent one.

A program that appends a token to a list for each request passes the whole list each time.
Comparing it with the list before takes a tenth of the time of checking and packing its ids.
"""

from __future__ import annotations

import sys
import threading
from typing import NamedTuple

from genlm.core.queries.sequence import TokenSequence

__all__ = ["SHORTEST", "RecentSequences"]

SHORTEST = 64
"""Shorter lists are checked and packed in less time than it takes to look them up."""

_MOST_IDS = 2**22
"""Ids in the lists of a generation: 32 MiB of references."""

_ENTRY_IDS = 32
"""An entry takes as much memory as so many ids."""

_FINGERPRINT = 8
"""Lists with equal ids at so many places over their length, and as many at their end, are
mistaken for each other, so that only the last one of them is found."""

_Fingerprint = tuple[int, ...]


class _Known(NamedTuple):
    """The first `length` ids of `ids`, a list that only grows."""

    ids: list[int]
    length: int
    sequence: TokenSequence

    def equals(self, ids: list[int], length: int) -> bool:
        """Whether they are the first `length` of `ids`."""
        mine = self.ids if len(self.ids) == length else self.ids[:length]
        return mine == (ids if len(ids) == length else ids[:length])


class RecentSequences:
    """Lists of ids of recent requests, with their sequences. Thread-safe.

    Two generations of lists are kept. When the younger one is full it becomes the older one,
    and the lists that were not used since are dropped.
    """

    def __init__(self) -> None:
        self._young: dict[_Fingerprint, _Known] = {}
        self._old: dict[_Fingerprint, _Known] = {}
        self._young_ids = 0
        # Taken without waiting: a thread that does not get it does without this class, and so
        # does a forked process in which it is never released.
        self._lock = threading.Lock()

    def find(self, ids: list[int], vocab_size: int) -> TokenSequence | None:
        """Return the sequence of `ids` if they, or all of them but the last, are known.

        The list has at least `SHORTEST` ids, and is neither changed nor kept.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if not _are_integers(ids):
                return None
            return self._same(ids) or self._longer(ids, vocab_size)
        except Exception:  # noqa: BLE001 - an object that cannot be hashed or compared
            return None
        finally:
            self._lock.release()

    def add(self, ids: list[int], sequence: TokenSequence) -> None:
        """Store a list that is not changed afterwards."""
        if self._lock.acquire(blocking=False):
            try:
                self._remember(_Known(ids, len(ids), sequence), len(ids))
            finally:
                self._lock.release()

    def _same(self, ids: list[int]) -> TokenSequence | None:
        known = self._get(_fingerprint(ids, len(ids)))
        if known is None or not known.equals(ids, len(ids)):
            return None
        self._remember(known, 0)  # used again
        return known.sequence

    def _longer(self, ids: list[int], vocab_size: int) -> TokenSequence | None:
        before, last = len(ids) - 1, ids[-1]
        known = self._get(_fingerprint(ids, before))
        if known is None or type(last) is not int or not 0 <= last < vocab_size:
            return None
        mine = known.ids
        if len(mine) == before:
            mine.append(last)  # so that whole lists are compared, without a copy
            is_equal = False
            try:
                is_equal = mine == ids
            finally:
                if not is_equal:
                    mine.pop()
            if not is_equal:
                return None
            added = 1
        elif known.equals(ids, before):  # another extension of it is known already
            mine, added = list(ids), len(ids)
        else:
            return None
        sequence = TokenSequence(last.to_bytes(4, sys.byteorder), known.sequence)
        self._remember(_Known(mine, len(ids), sequence), added)
        return sequence

    def _get(self, fingerprint: _Fingerprint) -> _Known | None:
        return self._young.get(fingerprint) or self._old.get(fingerprint)

    def _remember(self, known: _Known, new_ids: int) -> None:
        if self._young_ids > _MOST_IDS:
            self._old, self._young, self._young_ids = self._young, {}, 0
        self._young[_fingerprint(known.ids, known.length)] = known
        self._young_ids += new_ids + _ENTRY_IDS


def _are_integers(ids: list[int]) -> bool:
    """Whether no object among them is a float or of another type that equals integers.

    Summation, the fastest pass over a list, returns an `int` for these alone. Booleans count as
    integers in it; where they could be a mask, all ids are below 2 and so is their mean.
    """
    total = sum(ids)
    return type(total) is int and total > len(ids)


def _fingerprint(ids: list[int], length: int) -> _Fingerprint:
    spread = ids[: length : length // _FINGERPRINT]
    return (length, *spread, *ids[length - _FINGERPRINT : length])
