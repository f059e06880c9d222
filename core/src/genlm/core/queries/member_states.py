"""`MemberStates`: the state of a generation as an object for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from genlm.core.queries.generations import Generation, Integers64, Source

MAX_WAITING = 16
"""Number of queries after which the state of a sequence that none of them wanted is dropped:
its members may have finished."""


class MemberStates(NamedTuple):
    """The engine's state of each sequence of a generation; subclasses say what a state is.

    Attributes:
        states: State of each sequence, or of the computed one that it extends; None for no
            state. Shape `(n,)`.
        lengths: Number of first tokens of each sequence that its state has, shape `(n,)`.
        waiting: Number of queries that did not want each sequence since its state was last
            wanted, shape `(n,)`.
        lease: Object that keeps the states alive in the engine, None if they need none.
    """

    states: npt.NDArray[Any]
    lengths: Integers64
    waiting: Integers64
    lease: object = None

    @classmethod
    def of(cls, generation: Generation, sources: Sequence[Source] | None = None) -> Self:
        """Return the states of a generation, or those of the sequences that it extends.

        Args:
            generation: The generation.
            sources: Its `sources()`, if they are known.
        """
        count = len(generation.lineage)
        members = cls(
            np.full(count, None), np.zeros(count, np.int64), np.zeros(count, np.int64)
        )
        for source, origins, places, lengths in (
            generation.sources() if sources is None else sources
        ):
            if isinstance(source.state, cls):
                states, state_lengths, waiting, _ = source.state
                members.states[places] = states[origins]
                members.lengths[places] = np.minimum(state_lengths[origins], lengths)
                members.waiting[places] = waiting[origins]
        return members

    def count_query(self, wanted: Integers64) -> None:
        """Count a query for some sequences, and drop the states of those that waited for long.

        The states of other sequences, such as those of particles that wait for others, are kept
        for `MAX_WAITING` queries.
        """
        self.waiting[:] += 1
        self.waiting[wanted] = 0
        is_unused = self.waiting > MAX_WAITING
        self.states[is_unused] = None
        self.lengths[is_unused] = 0

    def put(self, places: Integers64, states: Sequence[Any], lengths: Integers64) -> None:
        """Set the states of some sequences, and the numbers of first tokens that these have."""
        for place, state in zip(places.tolist(), states, strict=True):
            self.states[place] = state
        self.lengths[places] = lengths


class Contexts(MemberStates):
    """Keys of the contexts that an engine without states of generations has computed."""


NO_CONTEXTS = Contexts(np.empty(0, object), np.empty(0, np.int64), np.empty(0, np.int64))
"""State of a generation on an engine that stores no state of contexts."""
