"""`MemberRequests`: the state of a generation, the requests of its sequences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from genlm.plugin import Generation
from genlm_vllm.running_requests import Integers64, ResidentRequest


class MemberRequests(NamedTuple):
    """The requests of the sequences of a generation.

    Attributes:
        residents: Request of each sequence; None for no request.
        lengths: Number of first tokens of each sequence that its request has, shape `(n,)`.
    """

    residents: list[ResidentRequest | None]
    lengths: Integers64

    @classmethod
    def of(cls, generation: Generation) -> MemberRequests:
        """Return the requests of a generation, or those that its sequences extend."""
        if isinstance(generation.state, MemberRequests):
            return generation.state
        count = len(generation.lineage)
        members = cls([None] * count, np.zeros(count, np.int64))
        for source, origins, places, lengths in generation.sources():
            state = source.state
            if isinstance(state, MemberRequests):
                for place, origin in zip(places.tolist(), origins.tolist(), strict=True):
                    members.residents[place] = state.residents[origin]
                members.lengths[places] = np.minimum(state.lengths[origins], lengths)
        return members
