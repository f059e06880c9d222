"""The resident requests of the sequences of populations."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from genlm.plugin import Generation, MemberStates, Query
from genlm_vllm.running_requests import Parent

_MAX_GENERATIONS = 8
"""Maximum number of generations that are searched for the request of a sequence."""


class MemberRequests(MemberStates):
    """The `ResidentRequest` of each sequence of a generation."""


class RecentGenerations:
    """Finds the requests of the populations that were queried last.

    It is used for contexts, texts to score and new populations. For the sequences of a
    population itself, `MemberRequests.of` returns the requests.

    Args:
        max_missing: Maximum number of tokens by which a query may extend a sequence. It may
            find the full blocks of further tokens in vLLM's prefix cache.
    """

    def __init__(self, max_missing: int) -> None:
        self._max_missing = max_missing
        self._recent: deque[weakref.ref[Generation]] = deque(maxlen=_MAX_GENERATIONS)

    def add(self, generation: Generation) -> None:
        """Add a generation, whose state is a `MemberRequests`."""
        if not self._recent or self._recent[0]() is not generation:
            self._recent.appendleft(weakref.ref(generation))

    def parent(self, query: Query, length: int) -> Parent | None:
        """Find the longest sequence that a query extends by few enough tokens.

        Args:
            query: The query.
            length: Maximum number of tokens of the sequence.
        """
        parents = []
        sequence, shortest = query.sequence, max(1, length - self._max_missing)
        token_ids = np.array(sequence.ids_from(shortest - 1))
        for reference in self._recent:
            if (generation := reference()) is None:
                continue
            lineage, (residents, lengths, *_) = generation.lineage, generation.state
            places = np.flatnonzero((shortest <= lengths) & (lengths <= length))
            if lineage.parent is not None:  # the last tokens are known without the sequences
                last = lineage.token_ids[places]
                is_last = last == token_ids[lengths[places] - shortest]
                places = places[is_last | (last < 0)]
            for place in places[np.argsort(-lengths[places])].tolist():
                resident, end = residents[place], int(lengths[place])
                if (
                    resident is not None
                    and resident.adapter == query.adapter
                    and lineage.sequence(place).key == sequence.prefix_key(end)
                ):
                    parents.append(Parent(resident, end, list(sequence.ids_from(end))))
                    break
        return max(parents, key=lambda parent: parent.length, default=None)
