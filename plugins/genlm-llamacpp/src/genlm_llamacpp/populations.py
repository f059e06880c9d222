"""Maps each sequence of a generation to the sequence of llama.cpp that holds it, as columns."""

from __future__ import annotations

import numpy as np

from genlm.plugin import GroupQuery
from genlm_llamacpp.batch import Integers
from genlm_llamacpp.sequences import Sequences

__all__ = ["HeldRows", "held_rows"]


class HeldRows:
    """The sequences of llama.cpp that hold a generation's sequences, one row each.

    It is the generation's state: when the last population that refers to it is dropped, on any
    thread, the sequences that nothing else needs are freed by the next `Sequences.collect`.

    Args:
        owner: Owner of the sequences.
        numbers: The sequence that begins with each row, -1 for none, shape `(n,)`.
        versions: The version of each then, shape `(n,)`.
        lengths: Number of tokens of each row that it holds, shape `(n,)`.
    """

    __slots__ = ("_versions", "lengths", "numbers", "owner")

    def __init__(
        self,
        owner: Sequences,
        numbers: Integers,
        versions: Integers,
        lengths: Integers,
    ) -> None:
        self.owner = owner
        held = (numbers >= 0) & (owner.versions(numbers) == versions)
        self.numbers = np.where(held, numbers, -1)
        self._versions, self.lengths = versions, lengths
        owner.hold(numbers[held])

    @classmethod
    def of_nothing(cls, owner: Sequences, count: int) -> HeldRows:
        """Return rows that no sequence holds."""
        nothing = np.zeros(count, np.int64)
        return cls(owner, nothing - 1, nothing, nothing.copy())

    def selected(self, rows: Integers) -> HeldRows:
        """Return some rows, repeated or not."""
        columns = (self.numbers[rows], self._versions[rows], self.lengths[rows])
        return HeldRows(self.owner, *columns)

    def can_continue(self, rows: Integers, starts: Integers) -> Integers:
        """Return the rows that can be continued after `starts` tokens, as indices of `rows`."""
        versions = self._versions[rows]
        return np.flatnonzero(self.owner.still_hold(self.numbers[rows], versions, starts))

    def set(
        self, rows: Integers, numbers: Integers, versions: Integers, lengths: Integers
    ) -> None:
        """Record the sequences that hold some rows, if they still have these versions."""
        before = self.numbers[rows], self._versions[rows]
        held = self.owner.versions(numbers) == versions
        self.owner.hold(numbers[held])
        self.numbers[rows] = np.where(held, numbers, -1)
        self._versions[rows], self.lengths[rows] = versions, lengths
        self.owner.unhold(*before)

    def __del__(self) -> None:
        self.owner.dropped.append((self.numbers, self._versions))


def held_rows(group: GroupQuery, owner: Sequences) -> HeldRows:
    """Return the rows of a generation; at first they are those that it extends."""
    generation = group.generation
    base = generation.with_state()
    state = None if base is None else base.state
    count = len(generation.lineage)
    if base is None or not isinstance(state, HeldRows) or state.owner is not owner:
        rows = HeldRows.of_nothing(owner, count)
    elif base is generation:
        return state
    else:
        places = generation.lineage.suffixes(np.arange(count), base.lineage).places
        rows = state.selected(places)
    generation.keep(rows)
    return rows
