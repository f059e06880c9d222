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
        """Return the requests of a generation, or those of the sequences that it extends."""
        base, count = generation.with_state(), len(generation.lineage)
        if base is None or not isinstance(base.state, MemberRequests):
            return cls([None] * count, np.zeros(count, np.int64))
        if base is generation:
            return base.state
        places = generation.lineage.suffixes(np.arange(count), base.lineage).places
        residents, lengths = base.state
        return cls([residents[place] for place in places.tolist()], lengths[places])
