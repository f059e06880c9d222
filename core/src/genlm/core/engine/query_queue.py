"""`QueryQueue`: the pending queries of an engine, in the order of their turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from genlm.core.base.errors import EvaluationError
from genlm.core.queries.query import Query

__all__ = ["QueryQueue"]


class QueryQueue:
    """Pending queries; those of a long request take turns with those of later requests.

    The turn of a query is the number of queries of its request before it (`Query.turn`), plus
    the turn of the first pending query when it was submitted. Queries are ordered by turn, then
    by age.
    """

    def __init__(self) -> None:
        self._queries: dict[int, Query] = {}
        self._turns: dict[int, int] = {}
        self._turn = 0  # of the first query of the last batch, or larger

    def __len__(self) -> int:
        return len(self._queries)

    def add(self, query: Query) -> None:
        """Add a query."""
        self._queries[query.query_id] = query
        self._turns[query.query_id] = self._turn + query.turn

    def drop(self, query_id: int) -> Query | None:
        """Remove and return a query; None if it is not pending."""
        self._turns.pop(query_id, None)
        return self._queries.pop(query_id, None)

    def take(
        self, choose: Callable[[Sequence[Query]], Sequence[Query]], engine: str
    ) -> list[Query]:
        """Remove and return the queries that a function chooses; at least one must be pending.

        Args:
            choose: As `BatchEngine.choose`.
            engine: Name of the engine's class for messages.

        Raises:
            EvaluationError: The choice contains a query that is not pending, or does not
                contain the first one.
        """
        pending = sorted(self._queries.values(), key=lambda q: self._turns[q.query_id])
        first = pending[0].query_id
        # It grows in each step, so a query is preceded by later ones in finitely many steps.
        self._turn = max(self._turn + 1, self._turns[first])
        batch = list(choose(pending))
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
        if first in self._queries:
            raise EvaluationError(
                f"{engine}.choose returned {len(batch)} of {len(pending)} pending queries "
                f"without the first, which might never be evaluated; include pending[0]"
            )
        return batch
