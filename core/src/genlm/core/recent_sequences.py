"""`RecentSequences`: finds the sequence of a list of ids that extends one seen before.

A program that appends a token to a list and asks again passes the whole list each time.
Comparing it with the list before takes a tenth of the time of checking and packing its ids.
"""

from __future__ import annotations

import sys

from genlm.core.sequence import TokenSequence

__all__ = ["SHORTEST", "RecentSequences"]

SHORTEST = 64
"""Shorter lists are checked and packed in less time than it takes to look them up."""

_MOST_IDS = 2**22
"""Ids in the lists of a generation: 32 MiB of references."""

_FINGERPRINT = 8

_Fingerprint = tuple[int, ...]
_Known = tuple[list[int], TokenSequence]


class RecentSequences:
    """Lists of ids that were asked recently, with their sequences. Thread-safe.

    Least recently used lists are dropped in bulk: two generations are kept, and the older one
    is dropped when the younger one is full.
    """

    def __init__(self) -> None:
        self._young: dict[_Fingerprint, _Known] = {}
        self._old: dict[_Fingerprint, _Known] = {}
        self._young_ids = 0

    def find(self, ids: list[int], vocab_size: int) -> TokenSequence | None:
        """Return the sequence of `ids` if they, or all of them but the last, are known.

        Args:
            ids: At least `SHORTEST`; not changed afterwards by the caller.
            vocab_size: The last id must be below it, otherwise the result is None.
        """
        try:
            known = self._known(ids)
            if known is not None:
                return known
            last = ids.pop()
            known = self._known(ids)
            ids.append(last)
        except TypeError:  # something in the list cannot be hashed, so it is no integer
            return None
        if known is None or type(last) is not int or not 0 <= last < vocab_size:
            return None
        sequence = TokenSequence(last.to_bytes(4, sys.byteorder), known)
        self.add(ids, sequence)
        return sequence

    def add(self, ids: list[int], sequence: TokenSequence) -> None:
        """Remember a list that nobody changes any more."""
        # Two threads may lose a list of each other, which costs time only.
        if self._young_ids > _MOST_IDS:
            self._old, self._young, self._young_ids = self._young, {}, 0
        self._young[_fingerprint(ids)] = (ids, sequence)
        self._young_ids += len(ids)

    def _known(self, ids: list[int]) -> TokenSequence | None:
        fingerprint = _fingerprint(ids)
        found = self._young.get(fingerprint)
        if found is None:
            found = self._old.get(fingerprint)
            if found is not None:
                self.add(*found)  # used again, so not among the oldest any more
        return found[1] if found is not None and found[0] == ids else None


def _fingerprint(ids: list[int]) -> _Fingerprint:
    return (len(ids), *ids[-_FINGERPRINT:])
