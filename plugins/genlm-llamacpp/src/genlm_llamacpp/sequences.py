"""Bookkeeping of the sequences in llama.cpp's memory and their tokens.

llama.cpp numbers its sequences; a sequence holds the keys and values, or the recurrent state,
of one token sequence. A new sequence copies another up to where both are equal, which with
a unified cache takes no memory. The least recently used one is evicted when a number or
room is needed. The tree of `genlm.prefix` does not serve here: it allocates slots, of which
llama.cpp shows none, holds any number of branches, and cuts them anywhere.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from genlm.plugin import TokenSequence

__all__ = ["Claim", "Integers", "Memory", "RowClaims", "Sequences"]

Integers = NDArray[np.int64]

_MOST_MARKS = 64
"""Sequences that end within one of llama.cpp's and are found by key; others by comparison."""


class Memory(Protocol):
    """Operations on the memory of a llama.cpp context."""

    can_cut: bool
    """Whether the end of a sequence can be removed; recurrent states cannot be taken back."""
    is_unified: bool
    """Whether sequences can share tokens; otherwise a copy copies keys and values."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Make an empty sequence hold the first `length` tokens of another."""
        ...

    def can_continue(self, sequence: int, length: int, held: int) -> bool:
        """Whether the cache has everything that tokens after the first `length` attend to."""
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
        start: Number of these tokens that it already holds.
        source: The sequence that these were copied from; itself, or -1 without any.
        is_new: Whether the sequence was empty before.
    """

    number: int
    tokens: TokenSequence
    start: int
    source: int
    is_new: bool


@dataclass(frozen=True, slots=True, eq=False)
class RowClaims:
    """Sequences of llama.cpp that are about to hold rows of a population, as columns.

    Attributes:
        numbers: The sequence of each row, shape `(n,)`.
        starts: Number of the row's tokens that it already holds, shape `(n,)`.
        is_new: Whether the sequence was empty before, shape `(n,)`.
    """

    numbers: Integers
    starts: Integers
    is_new: NDArray[np.bool_]


class Sequences:
    """The sequences of one context, by number.

    Invariant: between requests a sequence is free, idle or pinned, and llama.cpp's memory
    holds exactly its tokens.

    Args:
        memory: The memory of the context.
        count: Number of sequences.
        max_length: Maximum length of a sequence.

    Attributes:
        evicted: Number of sequences that were removed to make room.
        dropped: Sequences that populations held, and their versions then; the next `collect`
            counts a holder less for each. Populations are dropped on any thread.
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
        # Changes when a sequence no longer begins with all tokens that it held before.
        self._versions = np.zeros(count, np.int64)
        self._holders = np.zeros(count, np.int64)  # rows of populations that it holds
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pinned: list[int] = []
        self.evicted = 0
        self.dropped: deque[tuple[Integers, Integers]] = deque()

    @property
    def used(self) -> int:
        """Number of sequences that hold tokens."""
        return self._count - len(self._free)

    @property
    def most_requests(self) -> int:
        """Maximum number of requests in one call of `claim`."""
        return self._count - len(self._pinned)

    @property
    def pinned(self) -> int:
        """Number of sequences that are kept."""
        return len(self._pinned)

    def is_next(self, adapter: str | None, tokens: TokenSequence) -> bool:
        """Whether a sequence is known by key to hold all tokens but the last."""
        before = len(tokens) - 1
        return before > 0 and (adapter, tokens.prefix_key(before)) in self._places

    def claim(
        self, adapter: str | None, requests: Sequence[tuple[TokenSequence, int]]
    ) -> list[Claim]:
        """Assign each request a sequence that holds its longest cached prefix.

        A sequence all of whose tokens are the request's is continued, others are copied.
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
        versions = self._versions.copy()
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
                    self._versions[source] != versions[source] or self._lengths[source] < start
                ):
                    # Evicted or shortened since.
                    source, start = self._find(adapter, tokens, limit)
                claims[index] = self._new(tokens, source, start)
        return [claim for claim in claims if claim is not None]

    def commit(
        self, adapter: str | None, claims: Sequence[Claim], *, marked: bool = True
    ) -> None:
        """Record that the memory holds all tokens of the requests.

        Args:
            adapter: Their adapter.
            claims: Results of `claim` for them.
            marked: Whether they are indexed by their keys.
        """
        for claim in claims:
            number, tokens, start = claim.number, claim.tokens, claim.start
            length = len(tokens)
            self._ids[number, start:length] = tokens.ids_from(start)
            self._lengths[number] = length
            self._adapters[number] = adapter
            if not self._memory.can_cut:
                self._forget(number)  # its state is no longer that of shorter requests
            if marked:
                self._mark(number, adapter, tokens.key, length)
            self._idle[number] = None

    def roll_back(self, adapter: str | None, claims: Sequence[Claim]) -> None:
        """Restore the previous state, because some tokens may be missing."""
        for claim in claims:
            self._adapters[claim.number] = adapter
            self._restore(claim.number, claim.start, is_new=claim.is_new)

    # -- rows of populations ----------------------------------------------------------

    def versions(self, numbers: Integers) -> Integers:
        """Return the versions of sequences, which change when these lose tokens."""
        return self._versions[numbers]

    def still_hold(
        self, numbers: Integers, versions: Integers, starts: Integers
    ) -> NDArray[np.bool_]:
        """Return whether sequences can be continued after some of their first tokens.

        Args:
            numbers: Sequences, -1 for none.
            versions: Results of `versions` when they were held.
            starts: Number of tokens before the continuation.
        """
        held = self._lengths[numbers]
        found: NDArray[np.bool_] = (numbers >= 0) & (starts > 0)
        found &= self._versions[numbers] == versions
        for place in np.flatnonzero(found & (held != starts)).tolist():
            found[place] = self._memory.can_continue(
                int(numbers[place]), int(starts[place]), int(held[place])
            )
        return found

    def claim_rows(
        self, sources: Integers, starts: Integers, own: Integers
    ) -> RowClaims | None:
        """Assign each row a sequence that holds its first tokens.

        The first row that continues all tokens of a sequence takes it, the others are copied.
        End with `commit_rows` or `roll_back_rows`.

        Args:
            sources: The sequence that holds the first tokens of each row.
            starts: Number of these tokens.
            own: Number of the row's tokens after `starts` that the sequence holds as well; they
                are computed again.

        Returns:
            None, without any change, if there are too few sequences.
        """
        takes = self._takers(sources, starts, own)
        needed = len(sources) - len(takes)
        used = set(sources.tolist())
        others = [number for number in self._idle if number not in used]
        if needed > len(self._free) + len(others):
            return None
        for number in others[: max(0, needed - len(self._free))]:
            self._evict_one(number)
        numbers, is_new = sources.copy(), np.ones(len(sources), bool)
        is_new[takes] = False
        numbers[is_new] = [self._free.pop() for _ in range(needed)]
        longest = int(starts.max())
        self._ids[numbers, :longest] = self._ids[sources, :longest]
        for place in np.flatnonzero(is_new).tolist():
            self._memory.copy(int(sources[place]), int(numbers[place]), int(starts[place]))
        for number, start in zip(numbers[takes].tolist(), starts[takes].tolist(), strict=True):
            self._truncate(number, start)
            del self._idle[number]
        self._lengths[numbers] = starts
        return RowClaims(numbers, starts, is_new)

    def commit_rows(
        self, adapter: str | None, claims: RowClaims, tokens: NDArray[np.int64]
    ) -> None:
        """Record that the memory holds rows and further tokens, `(n, k)`, -1 for no token."""
        is_token = tokens >= 0
        rows, _ = np.nonzero(is_token)
        places = claims.starts[:, None] + np.cumsum(is_token, axis=1) - 1
        self._ids[claims.numbers[rows], places[is_token]] = tokens[is_token]
        self._lengths[claims.numbers] = claims.starts + is_token.sum(axis=1)
        for number in claims.numbers.tolist():
            self._adapters[number] = adapter
            self._idle[number] = None

    def roll_back_rows(self, adapter: str | None, claims: RowClaims) -> None:
        """Restore the previous state, because some tokens may be missing."""
        columns = (claims.numbers.tolist(), claims.starts.tolist(), claims.is_new.tolist())
        for number, start, is_new in zip(*columns, strict=True):
            self._adapters[number] = adapter
            self._restore(number, start, is_new=is_new)

    def hold(self, numbers: Integers) -> None:
        """Count a row of a population for each sequence."""
        np.add.at(self._holders, numbers, 1)

    def unhold(self, numbers: Integers, versions: Integers) -> None:
        """Subtract a row for each sequence, -1 for none; free sequences without rows."""
        held = (numbers >= 0) & (self._versions[numbers] == versions)
        numbers = numbers[held]
        np.subtract.at(self._holders, numbers, 1)
        for number in np.unique(numbers[self._holders[numbers] == 0]).tolist():
            if number in self._idle:
                self._shorten(number)

    def collect(self) -> None:
        """Free the sequences of dropped populations."""
        while self.dropped:
            self.unhold(*self.dropped.popleft())

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
        """Remove the sequence of a request that programs have dropped."""
        number = self._places.get((adapter, key))
        if number is None or number not in self._idle:
            return
        length = self._marks[number].pop(key)
        del self._places[adapter, key]
        if length == self._lengths[number] and not self._holders[number]:
            self._shorten(number)

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

    def _takers(self, sources: Integers, starts: Integers, own: Integers) -> Integers:
        """Return the rows that continue their sequences in place."""
        held = self._lengths[sources]
        may_take = held == starts + own
        pinned = np.array(self._pinned, np.int64)
        may_take &= ~np.isin(sources, pinned)
        places = np.flatnonzero(may_take)
        return places[np.unique(sources[places], return_index=True)[1]]

    def _shorten(self, number: int) -> None:
        """Remove the tokens of an idle sequence that no request ends after."""
        longest = max(self._marks[number].values(), default=0)
        if longest == self._lengths[number]:
            return
        del self._idle[number]
        self._restore(number, longest, is_new=not longest)
        if number in self._idle:
            self._lengths[number] = longest
            self._idle.move_to_end(number, last=False)

    def _restore(self, number: int, length: int, *, is_new: bool) -> None:
        """Keep the first tokens of a sequence if they can be kept."""
        if is_new or not self._memory.cut(number, length):
            self._remove(number)
            return
        self._versions[number] += 1
        self._holders[number] = 0
        self._idle[number] = None

    def _may_take(self, number: int, tokens: TokenSequence, start: int) -> bool:
        """Whether a request recomputes all tokens that a sequence loses to it."""
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
        self._evict_one(next((each for each in self._idle if each != other_than), other_than))

    def _evict_one(self, number: int) -> None:
        del self._idle[number]
        self._remove(number)
        self.evicted += 1

    def _remove(self, number: int) -> None:
        self._memory.cut(number, 0)
        self._forget(number)
        self._lengths[number] = 0
        self._versions[number] += 1
        self._holders[number] = 0
        self._free.append(number)
