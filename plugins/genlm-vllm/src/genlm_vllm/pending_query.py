"""`PendingQuery`: a query whose sequences vLLM's requests compute."""

from __future__ import annotations

from genlm.plugin import GroupQuery, Query
from genlm_vllm.processes import without_frames
from genlm_vllm.running_requests import ResidentRequest


class PendingQuery:
    """A query, the requests that compute its sequences, and its state.

    Attributes:
        query: The query. A `Query` has one sequence, a `GroupQuery` those of `wanted`.
        turn: Turn of its first sequence (`Turns`); the others of a group follow in order.
        residents: The request of each sequence, by place in `wanted`.
        remaining: Number of sequences that are neither computed nor failed.
        errors: Errors of the failed sequences, by place.
    """

    __slots__ = ("errors", "query", "remaining", "residents", "turn")

    def __init__(self, query: Query | GroupQuery, count: int, turn: int) -> None:
        self.query = query
        self.turn = turn
        self.residents: list[ResidentRequest | None] = [None] * count
        self.remaining = count
        self.errors: dict[int, Exception] = {}

    def fail(self, place: int, error: Exception) -> None:
        """Record the error of a sequence."""
        self.errors[place] = without_frames(error)
        self.remaining -= 1
