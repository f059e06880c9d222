"""Bookkeeping of the sequences in llama.cpp's memory and their tokens.

llama.cpp numbers its sequences; a sequence holds the keys and values, or the recurrent state,
of one token sequence. A new sequence copies another up to where both are equal, which with
a unified cache takes no memory. The least recently used one is evicted when a number or
room is needed. The tree of `genlm.prefix` does not serve here: it allocates slots, of which
llama.cpp shows none, holds any number of branches, and cuts them anywhere.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from genlm.plugin import TokenSequence
from genlm_llamacpp.batch import Extensions, Integers
from genlm_llamacpp.context import LlamaContext

__all__ = ["Sequences"]

_MOST_MARKS = 64
"""Sequences that end within one of llama.cpp's and are found by key; others by comparison."""


class Sequences:
    """The sequences of one context, by number.

    Invariant: between requests a sequence is free, idle or pinned, and llama.cpp's memory
    holds exactly its tokens.

    Args:
        memory: The context, of whose memory this class is in charge.
        count: Number of sequences.

    Attributes:
        evicted: Number of sequences that were removed to make room.
        dropped: Sequences that populations held, and their versions then; the next `collect`
            counts a holder less for each. Populations are dropped on any thread.
    """

    def __init__(self, memory: LlamaContext, count: int) -> None:
        self._memory = memory
        self._count = count
        self._ids = np.empty((count, memory.max_context), np.int32)
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
        """Maximum number of sequences in one call of `claim`."""
        return self._count - len(self._pinned)

    @property
    def pinned(self) -> int:
        """Number of sequences that are kept."""
        return len(self._pinned)

    def is_next(self, adapter: str | None, tokens: TokenSequence) -> bool:
        """Whether a sequence is known by key to hold all tokens but the last."""
        before = len(tokens) - 1
        return before > 0 and (adapter, tokens.prefix_key(before)) in self._places

    def find(
        self, adapter: str | None, requests: Sequence[TokenSequence], firsts: Integers
    ) -> Extensions:
        """Return the uncached tokens of requests, after their longest cached prefixes.

        Args:
            adapter: Adapter of all requests.
            requests: Their tokens.
            firsts: First position of each whose logits are requested.
        """
        limits = zip(requests, firsts.tolist(), strict=True)
        found = [self._find(adapter, tokens, limit) for tokens, limit in limits]
        sources, starts, common = np.array(found, np.int64).T
        pairs = zip(requests, starts.tolist(), strict=True)
        token_ids = [tokens.ids_from(start) for tokens, start in pairs]
        joined = np.fromiter(itertools.chain.from_iterable(token_ids), np.int64)
        counts = np.array([len(ids) for ids in token_ids])
        return Extensions(sources, starts, common, joined, counts, firsts)

    def claim(self, rows: Extensions) -> bool:
        """Assign each row a sequence that holds its first tokens.

        A sequence all of whose tokens are the row's is continued by the first such row; for the
        other rows, their first tokens are copied. End with `commit` or `roll_back`.

        Returns:
            False, without any change, if there are too few sequences for several rows.
        """
        sources, starts = rows.sources, rows.starts
        takes = self._takers(rows)
        used = dict.fromkeys(sources.tolist())
        others = [number for number in self._idle if number not in used]
        needed = len(sources) - len(takes)
        if needed > len(self._free) + len(others):
            if len(sources) > 1:
                return False
            # The row continues its source, whose other tokens are lost.
            takes, needed = np.zeros(1, np.int64), 0
            self._versions[sources] += 1
            self._holders[sources] = 0
        for number in others[: max(0, needed - len(self._free))]:
            self._evict(number)
        for number in used:
            if number in self._idle:
                self._idle.move_to_end(number)
        numbers, is_new = sources.copy(), np.ones(len(sources), bool)
        is_new[takes] = False
        numbers[is_new] = [self._free.pop() for _ in range(needed)]
        copies = np.flatnonzero(is_new & (starts > 0))
        longest = int(starts.max())
        self._ids[numbers[copies], :longest] = self._ids[sources[copies], :longest]
        for place in copies.tolist():
            self._memory.copy(int(sources[place]), int(numbers[place]), int(starts[place]))
        for place in takes.tolist():
            self._truncate(int(numbers[place]), int(starts[place]))
            del self._idle[int(numbers[place])]
        self._lengths[numbers] = starts
        rows.numbers, rows.is_new = numbers, is_new
        return True

    def commit(self, adapter: str | None, rows: Extensions) -> None:
        """Record that the memory holds all tokens of claimed rows."""
        self._ids[np.repeat(rows.numbers, rows.counts), rows.positions] = rows.token_ids
        self._lengths[rows.numbers] = rows.lengths
        for number in rows.numbers.tolist():
            if not self._memory.can_cut:
                self._forget(number)  # its state is no longer that of shorter requests
            self._adapters[number] = adapter
            self._idle[number] = None

    def mark(
        self, adapter: str | None, numbers: Integers, requests: Sequence[TokenSequence]
    ) -> None:
        """Index the sequences that hold requests by the keys of these."""
        for number, tokens in zip(numbers.tolist(), requests, strict=True):
            self._mark(number, adapter, tokens.key, len(tokens))

    def roll_back(self, rows: Extensions) -> None:
        """Restore the state before `claim`, because some tokens may be missing."""
        columns = (rows.numbers.tolist(), rows.starts.tolist(), rows.is_new.tolist())
        for number, start, is_new in zip(*columns, strict=True):
            self._restore(number, start, is_new=is_new)

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
        oldest = list(self._idle)[: -(-len(self._idle) // 4)]
        for number in oldest:
            self._evict(number)
        return bool(oldest)

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

    def _find(
        self, adapter: str | None, tokens: TokenSequence, limit: int
    ) -> tuple[int, int, int]:
        """Find a sequence with a long common prefix.

        Returns:
            The sequence, -1 for none; how many of its tokens a request can use, at most
            `limit`; and the length of the common prefix.
        """
        length = len(tokens)
        for common in range(length, max(0, length - 2), -1):
            number = self._places.get((adapter, tokens.prefix_key(common)), -1)
            if number >= 0:
                start = self._usable(number, common, limit)
                if start:  # else its state cannot be cut; that of its beginning may be held
                    return number, start, common
        return self._compare(adapter, tokens, limit)

    def _usable(self, number: int, common: int, limit: int) -> int:
        start = min(common, limit)
        held = int(self._lengths[number])
        return start if start and self._memory.can_continue(number, start, held) else 0

    def _compare(
        self, adapter: str | None, tokens: TokenSequence, limit: int
    ) -> tuple[int, int, int]:
        """Compare with the tokens of all sequences."""
        numbers = [n for n in (*self._idle, *self._pinned) if self._adapters[n] == adapter]
        if not numbers or not limit:
            return -1, 0, 0
        ids = np.array(tokens.token_ids, np.int32)
        lengths = np.minimum(self._lengths[numbers], len(ids))
        same = self._ids[numbers, : len(ids)] == ids
        differs = ~same | (np.arange(len(ids)) >= lengths[:, None])
        common = np.where(differs.any(1), differs.argmax(1), len(ids))
        for best in np.argsort(-common, kind="stable"):
            number, length = numbers[best], int(common[best])
            start = self._usable(number, length, limit)
            if start:
                return number, start, length
        return -1, 0, 0

    def _takers(self, rows: Extensions) -> Integers:
        """Return the rows that continue their sources in place, one for each source."""
        if not self._memory.can_cut:  # a recurrent state is lost when it is continued
            return np.empty(0, np.int64)
        may_take = (rows.sources >= 0) & (self._lengths[rows.sources] == rows.common)
        may_take &= ~np.isin(rows.sources, np.array(self._pinned, np.int64))
        places = np.flatnonzero(may_take)
        return places[np.unique(rows.sources[places], return_index=True)[1]]

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

    def _evict(self, number: int) -> None:
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
