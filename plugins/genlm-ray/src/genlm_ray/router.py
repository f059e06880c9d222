"""`Router`: assignment of queries to replicas, without Ray and without clocks.

Queries wait in the router until a replica accepts them, so a faster replica receives more.
Those of a long request take turns with those of later requests (`genlm.plugin.Turns`). The
work of a replica is counted in rows: its unanswered queries, and the tokens of their contexts
that it has not computed. A query is assigned to the replica that has most of its context,
unless another replica has so much less work that recomputing the missing tokens saves time. A
part of a population (`division`) is assigned to the replica that has its state.

The router is deterministic: equal calls have equal results. `benchmarks/simulate_replicas.py`
therefore runs it at any scale.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from genlm.plugin import GroupQuery, Query, TokenSequence, Turns
from genlm_ray.division import TOKEN_COST
from genlm_ray.wire import AnyQuery, holder_of, row_count

ContextKey = tuple[str | None, bytes]
"""Adapter and complete key of a sequence: sequences with equal hashes must not share rows."""

MIN_SHARED_QUERIES = 8
"""Minimum number of queries of a batch that continue the same context for the context to be a
shared prompt, which every replica may compute once. For fewer queries, recomputed tokens count
against `MAX_RECOMPUTED`."""

MAX_RECOMPUTED = 0.04
"""Maximum share of requested tokens that are recomputed to balance the replicas' work."""

BLOCK_TOKENS = 128
"""Prefixes whose lengths are multiples of it are contexts too, for queries without a parent."""

MAX_LOOK_BACK = 4
"""Maximum number of tokens by which a query may extend its parent, apart from whole blocks."""


class Context:
    """A requested sequence, or a prefix of one.

    Attributes:
        length: Number of tokens.
        replicas: Replicas that have computed the context or will compute it.
        fork: The longest prefix that more replicas had when the context was added.
        sequence: The sequence; None for a prefix that was not requested.
    """

    __slots__ = ("fork", "length", "replicas", "sequence")

    def __init__(self, length: int, fork: Context | None) -> None:
        self.length = length
        self.fork = fork
        self.replicas: dict[int, None] = {}
        self.sequence: TokenSequence | None = None

    def missing_in(self, replica: int) -> int:
        """Return the number of last tokens that a replica has not computed."""
        context: Context | None = self
        while context is not None:
            if replica in context.replicas:
                return self.length - context.length
            context = context.fork
        return self.length


@dataclass(slots=True, eq=False)
class RoutedQuery:
    """A query, its context, the context that it continues, and its replica.

    Attributes:
        query: The query.
        turn: Turn of the query in this program.
        context: The query's context; None for a population.
        parent: The longest known prefix of the context; None if there is none.
        replica: The assigned replica, -1 while the query waits.
        bases: Generations whose state in the replica a population's message refers to. The
            replica keeps it while the query is unanswered.
        cost: The query's share of the replica's work.
    """

    query: AnyQuery
    turn: int
    context: Context | None
    parent: Context | None
    replica: int = -1
    bases: object = None
    cost: float = 0.0


class Router:
    """The unanswered queries, which are waiting or sent to a replica.

    Args:
        max_contexts: Maximum number of contexts; the least recently used are evicted.

    Attributes:
        work: Pending work in rows, by replica.
        in_flight: Number of sent queries, by replica.
        tokens_requested: Number of tokens that queries added to known contexts.
        tokens_recomputed: Number of tokens that a further replica was assigned to compute.
    """

    def __init__(self, max_contexts: int = 2**15) -> None:
        self._max_contexts = max_contexts
        self._contexts: OrderedDict[ContextKey, Context] = OrderedDict()
        self._turns = Turns()
        self._unanswered: dict[int, RoutedQuery] = {}  # by query id
        # Heaps with lazy deletion: the waiting queries by turn and id, and the ids of the
        # unanswered queries of a single sequence by turn.
        self._queue: list[tuple[int, int, RoutedQuery]] = []
        self._turn_queue: list[tuple[int, int]] = []
        self._siblings: Counter[Context | None] = Counter()  # number of waiting queries
        self.in_flight: Counter[int] = Counter()
        self.work: dict[int, float] = {}
        self._budget_used = 0
        self.tokens_requested = self.tokens_recomputed = 0

    @property
    def turn(self) -> int:
        """The current turn (`Turns.current`)."""
        return self._turns.current

    # -- replicas ---------------------------------------------------------------------

    def add(self, replica: int) -> None:
        """Add a replica that has computed nothing. Numbers of replicas are never reused."""
        self._set_work(replica, 0.0)

    def reassign_from(self, replica: int) -> None:
        """Remove a replica; its queries wait again, in the order of their turns and ids."""
        del self.work[replica], self.in_flight[replica]
        for routed in self._unanswered.values():
            if routed.replica == replica:
                routed.replica = -1
                self._enqueue(routed)

    # -- queries ----------------------------------------------------------------------

    def submit(self, queries: Iterable[AnyQuery]) -> None:
        """Accept queries, which wait until `take` assigns them."""
        self._update_turn()
        for query in queries:
            context = parent = None
            turn = self._turns.current
            if isinstance(query, Query):
                turn += query.turn
                context, parent = self._context_of(query.adapter, query.sequence)
                known = 0 if parent is None else parent.length
                self.tokens_requested += max(1, context.length - known)
                heapq.heappush(self._turn_queue, (turn, query.query_id))
            routed = RoutedQuery(query, turn, context, parent)
            self._unanswered[query.query_id] = routed
            self._enqueue(routed)

    def _enqueue(self, routed: RoutedQuery) -> None:
        self._siblings[routed.parent] += 1
        heapq.heappush(self._queue, (routed.turn, routed.query.query_id, routed))

    def _end_waiting(self, routed: RoutedQuery) -> None:
        self._siblings[routed.parent] -= 1
        if not self._siblings[routed.parent]:
            del self._siblings[routed.parent]

    def _update_turn(self) -> None:
        """Set the current turn to that of the first unanswered query of a single sequence."""
        while self._turn_queue:
            turn, query_id = self._turn_queue[0]
            if query_id in self._unanswered:
                self._turns.begin_step(turn)
                return
            heapq.heappop(self._turn_queue)

    def take(self, room: Mapping[int, int]) -> dict[int, list[RoutedQuery]]:
        """Assign waiting queries, by turn, to replicas with room for further queries."""
        remaining = {replica: count for replica, count in room.items() if count > 0}
        taken: dict[int, list[RoutedQuery]] = {}
        if not remaining or not self._queue:
            return taken
        self._update_turn()
        passed_over = []
        while remaining and self._queue:
            entry = heapq.heappop(self._queue)
            routed = entry[-1]
            if routed.query.query_id not in self._unanswered:
                continue
            replica = self._choose(routed, self._siblings[routed.parent], remaining)
            if replica not in remaining:
                passed_over.append(entry)
                continue
            self._assign(routed, replica)
            taken.setdefault(replica, []).append(routed)
            remaining[replica] -= 1
            if not remaining[replica]:
                del remaining[replica]
        for entry in passed_over:
            heapq.heappush(self._queue, entry)
        for routed in itertools.chain(*taken.values()):
            self._end_waiting(routed)
        return taken

    def finish(self, query_id: int, replica: int | None = None) -> RoutedQuery | None:
        """Remove a query that a replica has answered or that is aborted, and return it.

        Returns:
            None if the query is unknown or assigned to another replica.
        """
        routed = self._unanswered.get(query_id)
        if routed is None or (replica is not None and routed.replica != replica):
            return None
        del self._unanswered[query_id]
        if routed.replica < 0:
            self._end_waiting(routed)
            self._compact()
        else:
            self.in_flight[routed.replica] -= 1
            self._set_work(routed.replica, self.work[routed.replica] - routed.cost)
        return routed

    def _compact(self) -> None:
        """Remove the entries of queries that do not wait from the queue, if most are such."""
        unanswered = self._unanswered
        if len(self._queue) > 2 * (len(unanswered) - self.in_flight.total()):
            self._queue = [
                entry for entry in self._queue if entry[-1].query.query_id in unanswered
            ]
            heapq.heapify(self._queue)

    # -- contexts ---------------------------------------------------------------------

    def computed_everywhere(self, adapter: str | None, sequence: TokenSequence) -> None:
        """Record that every replica has computed a prefix."""
        context, _ = self._context_of(adapter, sequence)
        context.replicas |= dict.fromkeys(self.work)

    def release(self, adapter: str | None, key: bytes) -> Context | None:
        """Remove and return a context that the program dropped, if it is known."""
        return self._contexts.pop((adapter, key), None)

    def _context_of(
        self, adapter: str | None, sequence: TokenSequence
    ) -> tuple[Context, Context | None]:
        """Return the context of a sequence, and the longest known one that it continues."""
        key, length = (adapter, sequence.key), len(sequence)
        context = parent = self._contexts.get(key)
        if context is not None:
            self._contexts.move_to_end(key)
        else:
            parent = prefix = self._find_prefix(adapter, sequence)
            begin = 0 if parent is None else parent.length // BLOCK_TOKENS
            for block in range(begin + 1, (length - 1) // BLOCK_TOKENS + 1):
                block_key = (adapter, sequence.prefix_key(block * BLOCK_TOKENS))
                if block_key not in self._contexts:
                    self._add_context(block_key, block * BLOCK_TOKENS, prefix)
                prefix = self._contexts[block_key]
            context = self._add_context(key, length, prefix)
        context.sequence = sequence
        return context, parent

    def _find_prefix(self, adapter: str | None, sequence: TokenSequence) -> Context | None:
        """Find the longest known prefix near the end of a sequence or at the end of a block."""
        length = len(sequence)
        for shorter in itertools.chain(
            range(length - 1, max(0, length - 1 - MAX_LOOK_BACK), -1),
            range((length - 1) // BLOCK_TOKENS * BLOCK_TOKENS, 0, -BLOCK_TOKENS),
        ):
            context = self._contexts.get((adapter, sequence.prefix_key(shorter)))
            if context is not None:
                return context
        return None

    def _add_context(self, key: ContextKey, length: int, parent: Context | None) -> Context:
        fork = parent
        if parent is not None and len(parent.replicas) == 1 and parent.fork is not None:
            fork = parent.fork
        context = self._contexts[key] = Context(length, fork)
        if len(self._contexts) > self._max_contexts:
            self._contexts.popitem(last=False)
        return context

    # -- assignment -------------------------------------------------------------------

    def _choose(self, routed: RoutedQuery, siblings: int, room: Mapping[int, int]) -> int:
        """Choose a replica and set the cost. If the replica has no room, the query waits.

        The siblings, all waiting queries that continue the same context, share the recomputed
        tokens.
        """
        idlest = min(self.work, key=self.work.__getitem__)
        if idlest not in room:
            idlest = min(room, key=self.work.__getitem__)
        rows = routed.cost = row_count(routed.query)
        if isinstance(routed.query, GroupQuery):
            holder = holder_of(routed.query.generation, self.work)
            return idlest if holder is None else holder
        context, parent = routed.context, routed.parent
        assert context is not None  # noqa: S101 - only populations have none
        holder = self._find_holder(parent, idlest)
        if holder is None or holder == idlest or parent is None:
            known = 0 if parent is None else parent.length - parent.missing_in(idlest)
            routed.cost += TOKEN_COST * (max(1, context.length - known) - 1)
            return idlest
        missing = parent.missing_in(idlest)
        # Balancing the work of two replicas saves half of the difference.
        difference = self.work[holder] - self.work[idlest]
        if difference <= rows + 2 * TOKEN_COST * missing / siblings:
            return holder
        if missing and siblings < MIN_SHARED_QUERIES:
            if self._budget_used + missing > MAX_RECOMPUTED * self.tokens_requested:
                return holder
            self._budget_used += missing
        if TOKEN_COST * missing < difference:
            routed.cost += TOKEN_COST * missing
        # Otherwise recomputing saves time only over several steps; their rows are balanced.
        self.tokens_recomputed += missing
        return idlest

    def _find_holder(self, parent: Context | None, preferred: int) -> int | None:
        """Return the least loaded of the replicas that have most of a context, or None."""
        context = parent
        while context is not None:
            if preferred in context.replicas:
                return preferred
            holders = (replica for replica in context.replicas if replica in self.work)
            holder = min(holders, key=self.work.__getitem__, default=None)
            if holder is not None:
                return holder
            context = context.fork
        return None

    def _assign(self, routed: RoutedQuery, replica: int) -> None:
        parent, context = routed.parent, routed.context
        routed.replica = replica
        while context is not None and replica not in context.replicas:
            context.replicas[replica] = None
            context = context.fork
        if parent is not None:
            parent.replicas[replica] = None
        self.in_flight[replica] += 1
        self._set_work(replica, self.work[replica] + routed.cost)

    def _set_work(self, replica: int, work: float) -> None:
        self.work[replica] = max(0.0, work)
