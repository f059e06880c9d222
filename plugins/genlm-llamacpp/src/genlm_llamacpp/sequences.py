"""Bookkeeping of the sequences in llama.cpp's memory and their tokens.

llama.cpp identifies sequences by integers (`seq_id`). A sequence holds the keys and values, or
the recurrent state, of one token sequence. A new sequence copies the common prefix of another
one, which takes no memory in a unified cache. The least recently used sequence is evicted if an
id or cells are needed. The tree of `genlm.prefix` is not used: it allocates slots, which
llama.cpp does not expose, has any number of branches, and cuts them anywhere.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from genlm.plugin import TokenSequence
from genlm_llamacpp.batch import Extensions, Integers
from genlm_llamacpp.context import LlamaContext

_MAX_MARKS = 64
"""Maximum number of requests per sequence that are indexed by key; `_compare` finds others."""


class Sequences:
    """The sequences of one context, by `seq_id`.

    Invariant: between requests, a sequence is free, idle or pinned, and llama.cpp's memory
    holds exactly its tokens.

    Args:
        memory: The context, whose memory this class manages.

    Attributes:
        evicted: Number of sequences that were removed to make room.
    """

    def __init__(self, memory: LlamaContext) -> None:
        self._memory = memory
        self.evicted = 0
        self._reset()

    def _reset(self) -> None:
        """Begin without sequences, as the memory after its creation."""
        count = self._memory.n_seq_max
        self._ids = np.empty((count, self._memory.max_context), np.int32)
        self._lengths = np.zeros(count, np.int64)
        self._adapters: list[str | None] = [None] * count
        # Length by key of the requests that a sequence holds and programs still refer to.
        self._marks: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(count)]
        self._seq_id_by_key: dict[tuple[str | None, bytes], int] = {}
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pinned: dict[int, None] = {}  # oldest first
        self._of_populations: set[int] = set()
        self._prompts: set[int] = set()  # sequences that hold only a prompt of scored texts

    def divide(self, parts: int) -> None:
        """Evict all sequences, and divide the memory into parts, or share it for 0 parts.

        Raises:
            EvaluationError: As `LlamaContext.divide`.
        """
        self.evicted += self.used
        try:
            self._memory.divide(parts)
        finally:
            self._reset()

    @property
    def used(self) -> int:
        """Number of sequences with tokens."""
        return self._memory.n_seq_max - len(self._free)

    @property
    def max_requests(self) -> int:
        """Maximum number of rows in one call of `claim`."""
        return self._memory.n_seq_max - len(self._pinned)

    @property
    def available(self) -> int:
        """Number of sequences that are free or idle and of no population."""
        return len(self._free) + len(self._idle) - len(self._of_populations & self._idle.keys())

    @property
    def pinned(self) -> int:
        """Number of pinned sequences."""
        return len(self._pinned)

    def is_next(self, adapter: str | None, tokens: TokenSequence) -> bool:
        """Whether the index has a sequence with all tokens except the last."""
        length = len(tokens) - 1
        return length > 0 and (adapter, tokens.prefix_key(length)) in self._seq_id_by_key

    def find(
        self, adapter: str | None, requests: Sequence[TokenSequence], firsts: Integers
    ) -> Extensions:
        """Return the uncached tokens of requests, after their longest cached prefixes.

        The logits of each request are requested from its position in `firsts` on. The sequences
        with these prefixes are evicted after all others.
        """
        limits = zip(requests, firsts.tolist(), strict=True)
        matches = [self._find(adapter, tokens, limit) for tokens, limit in limits]
        sources, starts, common = np.array(matches, np.int64).T
        for seq_id in dict.fromkeys(sources.tolist()):
            if seq_id in self._idle:
                self._idle.move_to_end(seq_id)
        pairs = zip(requests, starts.tolist(), strict=True)
        token_ids = [tokens.ids_from(start) for tokens, start in pairs]
        joined = np.fromiter(itertools.chain.from_iterable(token_ids), np.int64)
        counts = np.array([len(ids) for ids in token_ids])
        return Extensions(sources, starts, common, joined, counts, firsts)

    def claim(self, rows: Extensions) -> bool:
        """Assign each row a sequence that holds its prefix.

        If a row begins with all tokens of its source, the first such row continues the source
        in place. The prefixes of the other rows are copied. Call `commit` or `roll_back`
        afterwards.

        Returns:
            False, without any change, if there are too few sequences for several rows.
        """
        sources, starts = rows.sources, rows.starts
        in_place = self._rows_in_place(rows)
        in_use = set(sources.tolist())
        evictable = [seq_id for seq_id in self._idle if seq_id not in in_use]
        needed = len(sources) - len(in_place)
        if needed > len(self._free) + len(evictable):
            if len(sources) > 1:
                return False
            # The row continues its source, whose other tokens are lost.
            in_place, needed = np.zeros(1, np.int64), 0
        for seq_id in evictable[: max(0, needed - len(self._free))]:
            self._evict(seq_id)
        seq_ids, is_new = sources.copy(), np.ones(len(sources), bool)
        is_new[in_place] = False
        seq_ids[is_new] = [self._free.pop() for _ in range(needed)]
        copies = np.flatnonzero(is_new & (starts > 0))
        longest = int(starts.max())
        self._ids[seq_ids[copies], :longest] = self._ids[sources[copies], :longest]
        for row in copies.tolist():
            self._memory.copy(int(sources[row]), int(seq_ids[row]), int(starts[row]))
        for row in in_place.tolist():
            self._truncate(int(seq_ids[row]), int(starts[row]))
            del self._idle[int(seq_ids[row])]
        self._lengths[seq_ids] = starts
        rows.seq_ids, rows.is_new = seq_ids, is_new
        return True

    def commit(
        self,
        adapter: str | None,
        rows: Extensions,
        requests: Sequence[TokenSequence],
        *,
        are_texts: bool = False,
    ) -> None:
        """Record that the memory holds all tokens of the claimed rows of requests.

        Of scored texts, only the prompts are kept, because every cell of a shared cache slows
        down later requests.
        """
        self._ids[np.repeat(rows.seq_ids, rows.counts), rows.positions] = rows.token_ids
        self._lengths[rows.seq_ids] = rows.lengths
        columns = (rows.seq_ids.tolist(), requests, rows.firsts.tolist(), rows.is_new.tolist())
        for seq_id, tokens, first, is_new in zip(*columns, strict=True):
            if not self._memory.can_cut:
                self._forget(seq_id)  # the state of shorter requests is overwritten
            self._adapters[seq_id] = adapter
            self._idle[seq_id] = None
            if not are_texts:
                self._prompts.discard(seq_id)
                self._mark(seq_id, adapter, tokens.key, len(tokens))
                continue
            if is_new:
                self._prompts.add(seq_id)
            if first:  # a prompt of one token saves nothing
                self._mark(seq_id, adapter, tokens.prefix_key(first + 1), first + 1)
            self._shorten(seq_id)

    def roll_back(self, rows: Extensions) -> None:
        """Restore the state before `claim` after a failure."""
        columns = (rows.seq_ids.tolist(), rows.starts.tolist(), rows.is_new.tolist())
        for seq_id, start, is_new in zip(*columns, strict=True):
            if is_new or not self._memory.cut(seq_id, start):
                self._remove(seq_id)
            else:
                self._idle[seq_id] = None

    def remove_prompts(self, rows: Extensions) -> None:
        """Remove prompts that only scored texts had, except those that `rows` continue."""
        for seq_id in self._prompts.difference(rows.sources.tolist()):
            self._remove(seq_id)

    def idle_by_key(self, adapter: str | None, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Return the idle sequences of indexed requests by their keys."""
        found = ((key, self._seq_id_by_key.get((adapter, key), -1)) for key in keys)
        return {key: seq_id for key, seq_id in found if seq_id in self._idle}

    def assign_to_populations(self, adapter: str | None, keys: Iterable[bytes]) -> None:
        """Record that indexed requests are members of populations."""
        self._of_populations.update(self.idle_by_key(adapter, keys).values())

    def sort_for_eviction(self, first: Iterable[int], last: Iterable[int]) -> None:
        """Evict some idle sequences before all others, and others last.

        Sequences of populations are evicted after the remaining ones.

        Args:
            first: Sequences to evict first.
            last: Sequences to evict last, in this order.
        """
        of_populations = [n for n in self._idle if n in self._of_populations]
        for seq_id in (*of_populations, *last):
            self._idle.move_to_end(seq_id)
        for seq_id in first:
            self._idle.move_to_end(seq_id, last=False)

    def make_room(self) -> bool:
        """Evict a quarter of the idle sequences; False if there are none."""
        oldest = list(self._idle)[: -(-len(self._idle) // 4)]
        for seq_id in oldest:
            self._evict(seq_id)
        return bool(oldest)

    def drop_pinned(self) -> bool:
        """Evict all pinned sequences; False if there are none."""
        pinned = list(self._pinned)
        for seq_id in pinned:
            self._remove(seq_id)
        return bool(pinned)

    def pin(self, adapter: str | None, tokens: TokenSequence) -> bool:
        """Pin a sequence that was just computed, unless an equal one is pinned.

        Returns:
            False if it is the last unpinned one.
        """
        ids = list(tokens.token_ids)
        for pinned in self._pinned:
            length = self._lengths[pinned]
            if self._adapters[pinned] == adapter and self._ids[pinned, :length].tolist() == ids:
                return True
        seq_id = self._seq_id_by_key[adapter, tokens.key]
        if len(self._pinned) + 1 >= self._memory.n_seq_max:
            return False
        del self._idle[seq_id]
        self._pinned[seq_id] = None
        return True

    def release(self, adapter: str | None, key: bytes) -> None:
        """Free the tokens of a request without references."""
        seq_id = self._seq_id_by_key.get((adapter, key))
        if seq_id is None or seq_id not in self._idle:
            return
        length = self._marks[seq_id].pop(key)
        del self._seq_id_by_key[adapter, key]
        if length == self._lengths[seq_id]:
            self._shorten(seq_id)

    def clear(self, adapter: str | None = None, *, all_adapters: bool = False) -> None:
        """Remove all sequences, or those of one adapter. No sequence may be claimed."""
        for seq_id in [*self._idle, *self._pinned]:
            if all_adapters or self._adapters[seq_id] == adapter:
                self._remove(seq_id)

    # -- parts ------------------------------------------------------------------------

    def _find(
        self, adapter: str | None, tokens: TokenSequence, limit: int
    ) -> tuple[int, int, int]:
        """Find a sequence with a long common prefix.

        Returns:
            The sequence, -1 for none; the number of its tokens that the request can use, at
            most `limit`; and the length of the common prefix.
        """
        length = len(tokens)
        for common in range(length, max(0, length - 2), -1):
            seq_id = self._seq_id_by_key.get((adapter, tokens.prefix_key(common)), -1)
            if seq_id >= 0:
                start = self._usable(seq_id, common, limit)
                if start:  # else the state cannot be cut; a shorter sequence may be cached
                    return seq_id, start, common
        return self._compare(adapter, tokens, limit)

    def _usable(self, seq_id: int, common: int, limit: int) -> int:
        start = min(common, limit)
        length = int(self._lengths[seq_id])
        return start if self._memory.can_continue(start, length) else 0

    def _compare(
        self, adapter: str | None, tokens: TokenSequence, limit: int
    ) -> tuple[int, int, int]:
        """Find the longest usable common prefix by comparison with all sequences."""
        seq_ids = [n for n in (*self._idle, *self._pinned) if self._adapters[n] == adapter]
        if not seq_ids:
            return -1, 0, 0
        ids = np.array(tokens.token_ids, np.int32)
        lengths = np.minimum(self._lengths[seq_ids], len(ids))
        same = self._ids[seq_ids, : len(ids)] == ids
        differs = ~same | (np.arange(len(ids)) >= lengths[:, None])
        common = np.where(differs.any(1), differs.argmax(1), len(ids))
        for best in np.argsort(-common, kind="stable"):
            seq_id, length = seq_ids[best], int(common[best])
            start = self._usable(seq_id, length, limit)
            if start:
                return seq_id, start, length
        return -1, 0, 0

    def _rows_in_place(self, rows: Extensions) -> Integers:
        """Return the rows that continue their sources in place, one per source."""
        is_candidate = (rows.sources >= 0) & (self._lengths[rows.sources] == rows.common)
        is_candidate &= ~np.isin(rows.sources, np.array([*self._pinned], np.int64))
        ends = zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)
        # Otherwise the source, to which programs may still refer, could not be restored.
        is_candidate &= [self._memory.can_continue(start, end) for start, end in ends]
        candidates = np.flatnonzero(is_candidate)
        return candidates[np.unique(rows.sources[candidates], return_index=True)[1]]

    def _shorten(self, seq_id: int) -> None:
        """Remove the last tokens of an idle sequence that belong to no indexed request."""
        longest = max(self._marks[seq_id].values(), default=0)
        if longest == self._lengths[seq_id]:
            return
        if not longest or not self._memory.cut(seq_id, longest):
            self._remove(seq_id)
            return
        self._lengths[seq_id] = longest
        self._of_populations.discard(seq_id)
        self._idle.move_to_end(seq_id, last=False)

    def _truncate(self, seq_id: int, length: int) -> None:
        if self._lengths[seq_id] > length:
            self._memory.cut(seq_id, length)
            self._lengths[seq_id] = length
            self._forget(seq_id, beyond=length)

    def _mark(self, seq_id: int, adapter: str | None, key: bytes, length: int) -> None:
        previous = self._seq_id_by_key.get((adapter, key), seq_id)
        if previous != seq_id:  # the index refers to the newer sequence
            self._marks[previous].pop(key, None)
        self._seq_id_by_key[adapter, key] = seq_id
        marks = self._marks[seq_id]
        marks[key] = length
        if len(marks) > _MAX_MARKS:
            del self._seq_id_by_key[adapter, marks.popitem(last=False)[0]]

    def _forget(self, seq_id: int, beyond: int = 0) -> None:
        """Remove the requests of a sequence that are longer than `beyond` from the index."""
        marks, adapter = self._marks[seq_id], self._adapters[seq_id]
        for key in [key for key, length in marks.items() if length > beyond]:
            del marks[key], self._seq_id_by_key[adapter, key]

    def _evict(self, seq_id: int) -> None:
        self._remove(seq_id)
        self.evicted += 1

    def _remove(self, seq_id: int) -> None:
        """Make a sequence free, whether it was idle, pinned or claimed."""
        self._idle.pop(seq_id, None)
        self._pinned.pop(seq_id, None)
        self._memory.cut(seq_id, 0)
        self._forget(seq_id)
        self._of_populations.discard(seq_id)
        self._prompts.discard(seq_id)
        self._lengths[seq_id] = 0
        self._free.append(seq_id)
