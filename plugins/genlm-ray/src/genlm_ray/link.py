"""`ReplicaLink`: an actor, and this driver's session with it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from genlm.plugin import Count, Query, TokenSequence, pack_sequences
from genlm_ray.router import RoutedQuery
from genlm_ray.wire import (
    PackedGroup,
    Prefix,
    ReplicaRequest,
    pack_group,
    pack_queries,
)


class Configuration(NamedTuple):
    """Adapters and prefixes that all replicas have.

    Attributes:
        adapters: Paths by name.
        prefixes: Cached prefixes, without repetition.
    """

    adapters: dict[str, str]
    prefixes: list[Prefix]


class ReplicaLink:
    """An actor and this driver's session with it.

    Attributes:
        index: Index of the replica.
        session: Number of the session, which the router uses too; 0 without a session.
        configuration: Adapters and prefixes of the session.
        lost: Future that receives the reason when the session is lost.
        calls: Number of unanswered messages of the session.
        pending_queries: Maximum number of queries that the replica accepts at a time.
        dropped: Ids of aborted queries, and numbers of generations that programs have dropped;
            any thread may append.
        released: Contexts that the program has dropped.
        is_dead: Whether the replica cannot be restarted.
        restarts: Number of ended incarnations.
        pid: Process id.
        engine_statistics: The latest statistics of the engine in this incarnation.
        ended: Counts of the ended incarnations.
    """

    session = 0
    configuration: Configuration
    lost: asyncio.Future[BaseException]
    calls: int
    pending_queries: int
    dropped: deque[int]
    released: list[tuple[str | None, TokenSequence]]

    def __init__(self, index: int, actor: Any) -> None:
        self.index, self.actor = index, actor
        self.is_dead, self.restarts, self.pid = False, 0, 0
        self.engine_statistics: dict[str, Any] = {}
        self.ended: Counter[str] = Counter()

    def begin(
        self,
        session: int,
        configuration: Configuration,
        description: dict[str, Any],
    ) -> None:
        """Store the description of a session that the replica has begun."""
        self.configuration, self.calls = configuration, 0
        self.lost = asyncio.get_running_loop().create_future()
        self.dropped, self.released = deque(), []
        self.pid = description["pid"]
        self.pending_queries = description["pending_queries"]
        self.engine_statistics = description["statistics"]
        self.session = session

    def pack_request(self, queries: Sequence[RoutedQuery], turn: int) -> ReplicaRequest:
        """Pack queries, what was aborted and dropped, and released contexts into a message.

        Args:
            queries: The queries.
            turn: The program's current turn.
        """
        singles: list[Query] = []
        turns: list[int] = []
        groups: list[PackedGroup] = []
        for item in queries:
            if isinstance(item.query, Query):
                singles.append(item.query)
                turns.append(item.turn)
            else:
                root = item.query.generation.root
                item.bases = root, root.joined
                groups.append(pack_group(item.query, self.session))
        dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        request = ReplicaRequest(pack_queries(singles, turns), groups, dropped, turn=turn)
        if self.released:
            adapters, sequences = zip(*self.released, strict=True)
            request.released = list(adapters), pack_sequences(sequences)
            self.released = []
        return request

    def mark_lost(self, error: BaseException) -> None:
        """Make the replica's task end the session."""
        if not self.lost.done():
            self.lost.set_result(error)

    def end(self) -> None:
        """Remove a lost session."""
        statistics, self.engine_statistics = self.engine_statistics, {}
        self.ended.update(counts(statistics))
        self.session = 0
        self.restarts += 1

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the actor.

        Raises:
            Exception: Ray was shut down or refuses the call.
        """
        if not ray.is_initialized():  # otherwise Ray would start another cluster
            raise ConnectionError("Ray was shut down in this process")
        return asyncio.wrap_future(getattr(self.actor, method).remote(*arguments).future())

    def statistics(self) -> dict[str, int | float | str]:
        """Return the replica's state and its statistics. May be called on any thread."""
        latest = self.engine_statistics
        totals = self.ended.copy()
        totals.update(counts(latest))
        return {
            "state": "dead" if self.is_dead else "up" if self.session else "starting",
            "restarts": self.restarts,
            "pid": self.pid,
            **latest,
            **{name: Count(total) for name, total in totals.items()},
        }


def counts(statistics: Mapping[str, Any]) -> Counter[str]:
    """Return the counts among the statistics of an engine."""
    return Counter(
        {name: number for name, number in statistics.items() if isinstance(number, Count)}
    )
