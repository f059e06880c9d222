"""Sequences of llama.cpp that hold the rows of a generation."""

from __future__ import annotations

import numpy as np

from genlm.plugin import GroupQuery
from genlm_llamacpp.batch import Integers
from genlm_llamacpp.sequences import Sequences

__all__ = ["HeldRows", "held_rows"]


class HeldRows:
    """Table of the sequences of llama.cpp that hold the rows of a generation.

    The table is the state of the generation. After the last population that refers to it is
    dropped, on any thread, the next `Sequences.collect` frees the sequences without other uses.

    Args:
        owner: Owner of the sequences.
        seq_ids: Sequence that begins with each row, -1 for none, shape `(n,)`.
        versions: Version of this sequence when it held the row, shape `(n,)`.
        lengths: Number of tokens of the row in the sequence, shape `(n,)`.
    """

    __slots__ = ("_versions", "lengths", "owner", "seq_ids")

    def __init__(
        self,
        owner: Sequences,
        seq_ids: Integers,
        versions: Integers,
        lengths: Integers,
    ) -> None:
        self.owner = owner
        held = (seq_ids >= 0) & (owner.versions(seq_ids) == versions)
        self.seq_ids = np.where(held, seq_ids, -1)
        self._versions, self.lengths = versions, lengths
        owner.hold(seq_ids[held])

    @classmethod
    def empty(cls, owner: Sequences, count: int) -> HeldRows:
        """Return a table of rows without sequences."""
        zeros = np.zeros(count, np.int64)
        return cls(owner, zeros - 1, zeros, zeros.copy())

    def select(self, rows: Integers) -> HeldRows:
        """Return the table of some rows, which may be repeated."""
        columns = (self.seq_ids[rows], self._versions[rows], self.lengths[rows])
        return HeldRows(self.owner, *columns)

    def can_continue(self, rows: Integers, starts: Integers) -> Integers:
        """Return the indices of `rows` that can be continued after `starts` tokens."""
        versions = self._versions[rows]
        return np.flatnonzero(self.owner.still_hold(self.seq_ids[rows], versions, starts))

    def set(
        self, rows: Integers, seq_ids: Integers, versions: Integers, lengths: Integers
    ) -> None:
        """Record the sequences that hold some rows, unless their versions have changed."""
        previous = self.seq_ids[rows], self._versions[rows]
        held = self.owner.versions(seq_ids) == versions
        self.owner.hold(seq_ids[held])
        self.seq_ids[rows] = np.where(held, seq_ids, -1)
        self._versions[rows], self.lengths[rows] = versions, lengths
        self.owner.unhold(*previous)

    def __del__(self) -> None:
        self.owner.dropped.append((self.seq_ids, self._versions))


def held_rows(group: GroupQuery, owner: Sequences) -> HeldRows:
    """Return the table of a generation, initially that of the generation which it extends."""
    generation = group.generation
    base = generation.with_state()
    state = None if base is None else base.state
    count = len(generation.lineage)
    if base is None or not isinstance(state, HeldRows):
        rows = HeldRows.empty(owner, count)
    elif base is generation:
        return state
    else:
        places = generation.lineage.suffixes(np.arange(count), base.lineage).places
        rows = state.select(places)
    generation.keep(rows)
    return rows
