"""`Session`: the queries, adapters and prefixes of one driver in a replica.

Used on the replica's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from genlm.plugin import Completion, GroupQuery, SampledGroup
from genlm_ray.client_reductions import ClientReductions, has_client_code
from genlm_ray.router import AnyQuery
from genlm_ray.shared_engine import Share, SharedEngine
from genlm_ray.wire import Generations

__all__ = ["Prefix", "Session"]

Prefix = tuple[tuple[int, ...], str | None]
"""Token ids and the driver's name of the adapter."""


class Session:
    """A driver's connection: it begins anew when the replica or the connection was lost.

    Args:
        driver: Name of the driver, which may have several sessions, one after the other.
        engine: The engine.
        reduction_s: Timeout of the driver's own reductions.

    Attributes:
        generations: Populations that the driver names by number.
        adapters: Paths of its adapters, by its own names.
        prefixes: Prefixes that are kept for it.
        finished: Completions that were not sent yet.
        changed: Set when there may be something to send.
        seen_s: `time.monotonic()` of the driver's last call; infinite while it attaches.
    """

    def __init__(self, driver: str, engine: SharedEngine, reduction_s: float) -> None:
        self.driver = driver
        self.generations = Generations()
        self.adapters: dict[str, str] = {}
        self.prefixes: dict[Prefix, None] = {}
        self.finished: list[Completion] = []
        self.changed = asyncio.Event()
        self.seen_s = math.inf
        self._engine = engine
        self._share = Share()
        self._unanswered: set[int] = set()
        self._reducing: dict[int, asyncio.Task[None]] = {}
        # Numbers of the generations of results, and their queries.
        self._sampled: dict[int, tuple[int, GroupQuery]] = {}
        self._reductions = ClientReductions(
            self._compute, engine.engine.vocabulary.size, reduction_s
        )

    @property
    def unanswered(self) -> int:
        """Number of queries that are not finished."""
        return len(self._unanswered)

    def submit(self, queries: Sequence[AnyQuery], sampled: dict[int, int]) -> None:
        """Accept queries.

        Args:
            queries: The queries.
            sampled: The number of the generation of a result, by the id of its query.
        """
        plain = []
        for query in queries:
            self._unanswered.add(query.query_id)
            if isinstance(query, GroupQuery) and query.query_id in sampled:
                self._sampled[query.query_id] = sampled[query.query_id], query
            if has_client_code(query):
                task = asyncio.create_task(self._reduce(query))
                self._reducing[query.query_id] = task
            else:
                plain.append((query, self._finish))
        self._engine.submit(self._share, plain)

    def abort(self, query_ids: Sequence[int]) -> None:
        """Drop queries."""
        for query_id in query_ids:
            self._unanswered.discard(query_id)
            self._sampled.pop(query_id, None)
            task = self._reducing.pop(query_id, None)
            if task is not None:
                task.cancel()
        self._engine.abort(self._share, query_ids)
        self.changed.set()  # else a poll for the last of them would wait for ever

    def end(self) -> None:
        """Drop all queries, and end what waits for them."""
        self.abort(list(self._unanswered))
        self._reductions.close()

    def _finish(self, completion: Completion) -> None:
        sampled = self._sampled.pop(completion.query_id, None)
        if completion.query_id not in self._unanswered:  # it was aborted
            return
        self._unanswered.remove(completion.query_id)
        result = completion.result
        if sampled is not None and isinstance(result, SampledGroup):
            rest = self.generations.store_sample(*sampled, result)
            completion = completion._replace(result=rest)
        self.finished.append(completion)
        self.changed.set()

    async def _reduce(self, query: AnyQuery) -> None:
        """Compute a query with a reduction that is the driver's code."""
        completion = await self._reductions.reduced(query)
        self._reducing.pop(query.query_id, None)
        self._finish(completion)

    async def _compute(self, query: AnyQuery) -> Any:
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def on_done(completion: Completion) -> None:
            if not done.done():
                done.set_result(completion)

        self._engine.submit(self._share, [(query, on_done)])
        _, result, error = await done
        if error is not None:
            raise error
        return result
