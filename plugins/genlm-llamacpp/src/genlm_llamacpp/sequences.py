"""Which tokens are in which sequence of llama.cpp's memory.

llama.cpp numbers its sequences; a sequence holds the keys and values, or the recurrent state,
of one token sequence. A new sequence copies another up to where both are equal, which with
a unified cache takes no memory. The least recently used one is evicted when a number or
room is needed. The tree of `genlm.prefix` does not serve here: it allocates slots, of which
llama.cpp shows none, holds any number of branches, and cuts them anywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from genlm.plugin import TokenSequence

__all__ = ["Claim", "Memory", "Sequences"]

_MOST_MARKS = 64
"""Sequences that end within one of llama.cpp's and are found by key; others by comparison."""


class Memory(Protocol):
    """What changes the memory of a llama.cpp context."""

    can_cut: bool
    """Whether the end of a sequence can be removed; recurrent states cannot be taken back."""
    is_unified: bool
    """Whether sequences can share tokens; otherwise a copy copies keys and values."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Make an empty sequence hold the first `length` tokens of another."""
        ...

    def can_continue(self, sequence: int, length: int, held: int) -> bool:
        """Whether all that the tokens after the first `length` of `held` need is there."""
        ...

    def cut(self, sequence: int, length: int) -> bool:
        """Keep the first `length` tokens; False, and nothing happens, if that cannot be."""
        ...


@dataclass(slots=True)
class Claim:
    """A sequence of llama.cpp that is about to hold the tokens of a request.

    Attributes:
        number: The sequence.
        tokens: The tokens of the request.
        start: How many of them it holds already.
        source: The sequence that these came from; itself, or -1 if there are none.
        is_new: Whether it was empty before.
    """

    number: int
    tokens: TokenSequence
    start: int
    source: int
    is_new: bool


class Sequences:
    """The sequences of one context, by number.

    Invariant: between requests a sequence is free, idle or pinned, and llama.cpp's memory
    holds exactly its tokens.

    Args:
        memory: The memory of the context.
        count: Number of sequences.
        max_length: Most tokens of a sequence.

    Attributes:
        evicted: Number of sequences that were removed to make room.
    """

    def __init__(self, memory: Memory, count: int, max_length: int) -> None:
        self._memory = memory
        self._count = count
        self._ids = np.empty((count, max_length), np.int32)
        self._lengths = np.zeros(count, np.int64)
        self._adapters: list[str | None] = [None] * count
        # Ends of requests within each sequence; those that programs still refer to.
        self._marks: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(count)]
        self._places: dict[tuple[str | None, bytes], int] = {}
        self._uses = [0] * count  # how often each was emptied
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pinned: list[int] = []
        self.evicted = 0

    @property
    def used(self) -> int:
        """Number of sequences that hold tokens."""
        return self._count - len(self._free)

    @property
    def most_requests(self) -> int:
        """How many requests can be claimed for at once."""
        return self._count - len(self._pinned)

    @property
    def pinned(self) -> int:
        """Number of sequences that are kept."""
        return len(self._pinned)

    def is_next(self, adapter: str | None, tokens: TokenSequence) -> bool:
        """Whether all tokens but the last are known to be held. Fast."""
        before = len(tokens) - 1
        return before > 0 and (adapter, tokens.prefix_key(before)) in self._places

    def claim(
        self, adapter: str | None, requests: Sequence[tuple[TokenSequence, int]]
    ) -> list[Claim]:
        """Give each request a sequence of its own, which holds as many of its tokens as any.

        A sequence all of whose tokens are the request's is taken itself, others are copied.
        End with `commit` or `roll_back`.

        Args:
            adapter: Adapter of all requests.
            requests: At most as many as there are sequences: their tokens, and how many of
                these may be held already.
        """
        found = [self._find(adapter, *request) for request in requests]
        for number, _ in found:  # so that no request evicts what another one continues
            if number in self._idle:
                self._idle.move_to_end(number)
        uses = list(self._uses)
        claims: list[Claim | None] = [None] * len(found)
        for index, (number, start) in enumerate(found):
            tokens = requests[index][0]
            if number in self._idle and self._may_take(number, tokens, start):
                self._truncate(number, start)
                del self._idle[number]
                claims[index] = Claim(number, tokens, start, number, is_new=False)
        for index, (tokens, limit) in enumerate(requests):
            if claims[index] is None:
                source, start = found[index]
                if start and (
                    self._uses[source] != uses[source] or self._lengths[source] < start
                ):
                    # Evicted or shortened since.
                    source, start = self._find(adapter, tokens, limit)
                claims[index] = self._new(tokens, source, start)
        return [claim for claim in claims if claim is not None]

    def commit(self, adapter: str | None, claims: Sequence[Claim]) -> None:
        """Note that the memory holds all tokens of the requests."""
        for claim in claims:
            number, tokens, start = claim.number, claim.tokens, claim.start
            length = len(tokens)
            self._ids[number, start:length] = tokens.ids_from(start)
            self._lengths[number] = length
            self._adapters[number] = adapter
            if not self._memory.can_cut:
                self._forget(number)  # its state is no longer that of shorter requests
            self._mark(number, adapter, tokens.key, length)
            self._idle[number] = None

    def roll_back(self, adapter: str | None, claims: Sequence[Claim]) -> None:
        """Note that some tokens may be missing: restore what was held before."""
        for claim in claims:
            self._adapters[claim.number] = adapter
            if claim.is_new or not self._memory.cut(claim.number, claim.start):
                self._remove(claim.number)
            else:
                self._idle[claim.number] = None

    def make_room(self) -> bool:
        """Evict a quarter of the idle sequences; False if there are none."""
        number = -(-len(self._idle) // 4)
        for _ in range(number):
            self._evict()
        return number > 0

    def drop_pinned(self) -> bool:
        """Evict all pinned sequences; False if there are none."""
        pinned, self._pinned = self._pinned, []
        for number in pinned:
            self._remove(number)
        return bool(pinned)

    def pin(self, adapter: str | None, tokens: TokenSequence) -> bool:
        """Keep a sequence that was just computed; False if no other one would remain."""
        number = self._places[adapter, tokens.key]
        if number in self._pinned:
            return True
        if len(self._pinned) + 1 >= self._count:
            return False
        del self._idle[number]
        self._pinned.append(number)
        return True

    def release(self, adapter: str | None, key: bytes) -> None:
        """Remove what only a request holds that no program refers to any more."""
        number = self._places.get((adapter, key))
        if number is None or number not in self._idle:
            return
        length = self._marks[number].pop(key)
        del self._places[adapter, key]
        longest = max(self._marks[number].values(), default=0)
        if length == self._lengths[number] and longest < length:
            del self._idle[number]
            if longest and self._memory.cut(number, longest):
                self._lengths[number] = longest
                self._idle[number] = None
                self._idle.move_to_end(number, last=False)
            else:
                self._remove(number)

    def clear(self, adapter: str | None = None, *, all_adapters: bool = False) -> None:
        """Remove all sequences, or those of one adapter; none may be claimed."""
        for number in [*self._idle, *self._pinned]:
            if all_adapters or self._adapters[number] == adapter:
                self._idle.pop(number, None)
                if number in self._pinned:
                    self._pinned.remove(number)
                self._remove(number)

    # -- parts ------------------------------------------------------------------------

    def _find(self, adapter: str | None, tokens: TokenSequence, limit: int) -> tuple[int, int]:
        """Return a sequence with the longest common beginning, and its length up to `limit`."""
        length = len(tokens)
        for common in range(length, max(0, length - 2), -1):
            number = self._places.get((adapter, tokens.prefix_key(common)), -1)
            if number >= 0:
                found, start = self._usable(number, common, limit)
                if start:  # else its state cannot be cut; that of its beginning may be held
                    return found, start
        return self._compare(adapter, tokens, limit)

    def _usable(self, number: int, common: int, limit: int) -> tuple[int, int]:
        start, held = min(common, limit), int(self._lengths[number])
        usable = start and self._memory.can_continue(number, start, held)
        return (number, start) if usable else (-1, 0)

    def _compare(
        self, adapter: str | None, tokens: TokenSequence, limit: int
    ) -> tuple[int, int]:
        """Compare with the tokens of all sequences."""
        numbers = [n for n in (*self._idle, *self._pinned) if self._adapters[n] == adapter]
        if not numbers or not limit:
            return -1, 0
        ids = np.array(tokens.token_ids, np.int32)
        lengths = np.minimum(self._lengths[numbers], len(ids))
        same = self._ids[numbers, : len(ids)] == ids
        differs = ~same | (np.arange(len(ids)) >= lengths[:, None])
        common = np.where(differs.any(1), differs.argmax(1), len(ids))
        for best in np.argsort(-common, kind="stable"):
            number, start = self._usable(numbers[best], int(common[best]), limit)
            if start:
                return number, start
        return -1, 0

    def _may_take(self, number: int, tokens: TokenSequence, start: int) -> bool:
        """Whether a request computes again all that a sequence loses to it."""
        length = int(self._lengths[number])
        if not self._memory.can_cut:  # the state before is lost: only if it cannot be copied
            return not self._free and len(self._idle) < 2
        if length <= start:
            return True
        if length > len(tokens):
            return False
        return (
            tuple(self._ids[number, start:length].tolist())
            == tokens.ids_from(start)[: length - start]
        )

    def _new(self, tokens: TokenSequence, source: int, start: int) -> Claim:
        if not self._free:
            self._evict(other_than=source)
        number = self._free.pop()
        if number == source:  # the only one that could be evicted
            start = 0
        if start:
            self._memory.copy(source, number, start)
            self._ids[number, :start] = self._ids[source, :start]
        else:
            source = -1
        self._lengths[number] = start
        return Claim(number, tokens, start, source, is_new=True)

    def _truncate(self, number: int, length: int) -> None:
        if self._lengths[number] > length:
            self._memory.cut(number, length)
            self._lengths[number] = length
            self._forget(number, beyond=length)

    def _mark(self, number: int, adapter: str | None, key: bytes, length: int) -> None:
        before = self._places.get((adapter, key), number)
        if before != number:  # found in the younger one from now on
            self._marks[before].pop(key, None)
        self._places[adapter, key] = number
        marks = self._marks[number]
        marks[key] = length
        if len(marks) > _MOST_MARKS:
            del self._places[adapter, marks.popitem(last=False)[0]]

    def _forget(self, number: int, beyond: int = 0) -> None:
        """Forget the requests that end within a sequence, beyond a length."""
        marks, adapter = self._marks[number], self._adapters[number]
        for key in [key for key, length in marks.items() if length > beyond]:
            del marks[key], self._places[adapter, key]

    def _evict(self, other_than: int = -1) -> None:
        number = next((each for each in self._idle if each != other_than), other_than)
        del self._idle[number]
        self._remove(number)
        self.evicted += 1

    def _remove(self, number: int) -> None:
        self._memory.cut(number, 0)
        self._forget(number)
        self._lengths[number] = 0
        self._uses[number] += 1
        self._free.append(number)
