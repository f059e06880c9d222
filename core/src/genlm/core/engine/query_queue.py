"""The order of pending queries: those of a long request take turns with those of later ones.

`Turns` numbers the turns. `QueryQueue` has the pending queries of a `BatchEngine`; engines that
keep their queries in other queues order these by the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from genlm.core.base.errors import EvaluationError
from genlm.core.queries.query import Query


class Turns:
    """Numbers the turns of pending queries, which are computed by turn, then by age.

    The turn of a query is the current turn at its submission, plus the number of queries of its
    request before it (`Query.turn`). The current turn is always larger than the turn of the
    first query of the last step. The turns of later queries are then larger, too, so later
    queries do not delay a pending query indefinitely.

    Attributes:
        current: The current turn.
    """

    def __init__(self) -> None:
        self.current = 0

    def begin_step(self, first: int) -> None:
        """Update the current turn before a step, for the turn of the first pending query."""
        self.current = max(self.current, first + 1)


class QueryQueue:
    """The pending queries of an engine that evaluates some of them in each step."""

    def __init__(self) -> None:
        self._queries: dict[int, Query] = {}
        self._turn_of: dict[int, int] = {}
        self._turns = Turns()
        self._unfinished: set[int] = set()

    def __len__(self) -> int:
        return len(self._queries)

    def add(self, query: Query) -> None:
        """Add a query."""
        self._queries[query.query_id] = query
        self._turn_of[query.query_id] = self._turns.current + query.turn

    def put_back(self, query: Query) -> None:
        """Add a query of which a step has computed a part, behind queries that arrive now."""
        self._queries[query.query_id] = query
        self._turn_of[query.query_id] = self._turns.current + 1
        self._unfinished.add(query.query_id)

    def drop(self, query_id: int) -> Query | None:
        """Remove and return a query; None if it is not pending."""
        self._turn_of.pop(query_id, None)
        self._unfinished.discard(query_id)
        return self._queries.pop(query_id, None)

    def take(
        self, choose: Callable[[Sequence[Query]], Sequence[Query]], engine: str
    ) -> list[Query]:
        """Remove and return the queries that `BatchEngine.choose` of an engine chooses.

        At least one query must be pending.

        Raises:
            EvaluationError: The choice contains a query that is not pending, or does not
                contain the first one although no query is unfinished.
        """
        pending = sorted(self._queries.values(), key=lambda q: self._turn_of[q.query_id])
        first, must_contain_first = pending[0].query_id, not self._unfinished
        batch = list(choose(pending) or ())
        turns = [self._turn_of[q.query_id] for q in batch if q.query_id in self._turn_of]
        self._turns.begin_step(min(turns, default=0))
        for query in batch:
            if self.drop(query.query_id) is None:
                raise EvaluationError(
                    f"{engine}.choose returned query {query.query_id}, which is not pending, "
                    f"or returned it twice; return pending queries, without repetition"
                )
        if not batch:
            raise EvaluationError(
                f"{engine}.choose returned none of {len(pending)} pending queries; return at "
                f"least one"
            )
        if must_contain_first and first in self._queries:
            raise EvaluationError(
                f"{engine}.choose returned {len(batch)} of {len(pending)} pending queries "
                f"without the first, which might never be evaluated; include pending[0]"
            )
        return batch
