"""`Router`: assignment of queries to replicas. Depends on neither Ray nor the time.

Queries wait here until replicas have room for them, so a replica that is faster gets more. The
work of a replica is counted in rows: its unanswered queries, and the tokens of their contexts
that it has not computed. A query goes to the replica that has most of its context, unless
another one has so much less work that this pays for the tokens that are recomputed. A
population goes to the replica that has its state.

Deterministic: equal calls have equal results, so `benchmarks/simulate_replicas.py` runs this
class at any scale.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from operator import attrgetter

import numpy as np

from genlm.plugin import GroupQuery, Query, TokenSequence
from genlm_ray.wire import PlacedGeneration

__all__ = ["AnyQuery", "Context", "RoutedQuery", "Router"]

AnyQuery = Query | GroupQuery

ContextKey = tuple[str | None, bytes]
"""The adapter and the key of the sequence, whole: equal hashes must not become equal rows."""

TOKEN_COST = 0.25
"""Cost of computing a prompt token, in rows. Tokens of one prompt share a matrix
product, so engines compute them at several times the rate of rows."""

SHARED = 8
"""Queries that continue one context in one batch make it a shared prompt, which each replica
may compute once. Contexts of fewer queries count against `MAX_RECOMPUTED`."""

MAX_RECOMPUTED = 0.04
"""Maximum share of requested tokens that is recomputed to balance the replicas' work."""

BLOCK = 128
"""Prefixes of these lengths are remembered too, for queries without a known parent."""

LOOK_BACK = 4
"""Number of lengths just below a query's at which its parent is looked up."""

MOST_HOLDERS = 16
"""Maximum number of a context's replicas whose work is compared for one query."""


class Context:
    """A requested sequence, or a prefix of one.

    Attributes:
        length: Its number of tokens.
        replicas: Replicas that have computed it or will.
        fork: Its longest prefix that more replicas had when it was added.
        sequence: The sequence; None for a prefix that was not requested.
    """

    __slots__ = ("fork", "length", "replicas", "sequence")

    def __init__(self, length: int, fork: Context | None) -> None:
        self.length = length
        self.fork = fork
        self.replicas: dict[int, None] = {}
        self.sequence: TokenSequence | None = None

    def missing_in(self, replica: int) -> int:
        """Return the number of its last tokens that a replica has not computed."""
        context: Context | None = self
        while context is not None:
            if replica in context.replicas:
                return self.length - context.length
            context = context.fork
        return self.length


class RoutedQuery:
    """A query, its context, the known prefix that it continues, and its replica.

    Attributes:
        query: The query.
        order: Its place among all queries.
        context: Its context; None for a population.
        parent: The longest known prefix of its sequence; None if there is none.
        tokens: Number of rows that are computed for it, those of its context aside.
        replica: Its replica, -1 while it waits.
        cost: Its share of the replica's work.
        placed: The state that a population's generation has after the query.
        sampled: The state of the generation of its result.
    """

    __slots__ = (
        *("context", "cost", "order", "parent", "placed", "query", "replica"),
        *("sampled", "tokens"),
    )

    def __init__(
        self, query: AnyQuery, order: int, context: Context | None, parent: Context | None
    ) -> None:
        self.query = query
        self.order = order
        self.context = context
        self.parent = parent
        self.tokens = 1
        if isinstance(query, GroupQuery):
            self.tokens = len(query.wanted)
            if query.sampling is not None:
                self.tokens *= int(np.max(query.sampling.max_tokens))
        self.replica = -1
        self.cost = 0.0
        self.placed: PlacedGeneration | None = None
        self.sampled: PlacedGeneration | None = None


class Router:
    """The unanswered queries, of which some wait and others are sent.

    Args:
        max_contexts: Maximum number of contexts; the least recently used are evicted.

    Attributes:
        tokens_asked: Tokens that the queries needed where they were first routed.
        tokens_recomputed: Tokens that were assigned to a further replica.
    """

    def __init__(self, max_contexts: int = 2**15) -> None:
        self._max_contexts = max_contexts
        self._contexts: OrderedDict[ContextKey, Context] = OrderedDict()
        self._orders = itertools.count()
        self._waiting: dict[int, RoutedQuery] = {}  # by query id, oldest first
        self._sent: dict[int, RoutedQuery] = {}
        self._in_flight: Counter[int] = Counter()  # of these, by replica
        self._work: dict[int, float] = {}
        self._least: list[tuple[float, int]] = []  # a heap, of which outdated items are left
        self._budget_used = 0
        self.tokens_asked = self.tokens_recomputed = 0

    # -- replicas ---------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas that queries are assigned to."""
        return tuple(self._work)

    @property
    def work(self) -> dict[int, float]:
        """Pending work of each replica, in rows."""
        return dict(self._work)

    def add(self, replica: int) -> None:
        """Assign queries to a replica, which has computed nothing. Numbers are never reused."""
        self._set_work(replica, 0.0)

    def reassign_from(self, replica: int) -> None:
        """Let a replica's queries wait for others, in order of submission."""
        del self._work[replica], self._in_flight[replica]
        requeued = [each for each in self._sent.values() if each.replica == replica]
        for each in requeued:
            each.replica, each.placed, each.sampled = -1, None, None
            del self._sent[each.query.query_id]
        waiting = sorted([*requeued, *self._waiting.values()], key=attrgetter("order"))
        self._waiting = {each.query.query_id: each for each in waiting}

    # -- queries ----------------------------------------------------------------------

    def submit(self, queries: Iterable[AnyQuery]) -> None:
        """Accept queries, which `take` assigns."""
        for query in queries:
            context = parent = None
            if isinstance(query, Query):
                key = (query.adapter, query.sequence.key)
                parent = self._nearest(query, key)
                context = self._remember(query.adapter, query.sequence, key, parent)
                known = 0 if parent is None else parent.length
                self.tokens_asked += max(1, context.length - known)
            routed = RoutedQuery(query, next(self._orders), context, parent)
            self._waiting[query.query_id] = routed

    def take(self, room: Mapping[int, int]) -> dict[int, list[RoutedQuery]]:
        """Choose replicas for waiting queries, oldest first; they count as sent.

        Args:
            room: Maximum number of queries for each replica.

        Returns:
            The queries by replica.
        """
        left = {replica: most for replica, most in room.items() if most > 0}
        taken: dict[int, list[RoutedQuery]] = {}
        if not left or not self._waiting:
            return taken
        families = Counter(each.parent for each in self._waiting.values())
        for each in list(self._waiting.values()):
            replica = self._choose(each, families[each.parent], left)
            if replica in left:
                self._assign(each, replica)
                taken.setdefault(replica, []).append(each)
                left[replica] -= 1
                if not left[replica]:
                    del left[replica]
                    if not left:
                        break
        return taken

    def finished(self, query_id: int, replica: int | None = None) -> RoutedQuery | None:
        """Forget a query that was answered or aborted, and return it.

        Args:
            query_id: Id of the query.
            replica: The replica that answered.

        Returns:
            None if the query was not unanswered and assigned to that replica.
        """
        if replica is None and query_id in self._waiting:
            return self._waiting.pop(query_id)
        each = self._sent.get(query_id)
        if each is None or (replica is not None and each.replica != replica):
            return None
        del self._sent[query_id]
        self._in_flight[each.replica] -= 1
        self._set_work(each.replica, self._work[each.replica] - each.cost)
        return each

    def in_flight(self, replica: int) -> int:
        """Number of queries that a replica is evaluating."""
        return self._in_flight[replica]

    def __len__(self) -> int:
        """Number of unanswered queries."""
        return len(self._waiting) + len(self._sent)

    # -- contexts ---------------------------------------------------------------------

    def computed_everywhere(self, adapter: str | None, sequence: TokenSequence) -> None:
        """Record that every replica has computed a prefix."""
        context = self._remember(adapter, sequence, (adapter, sequence.key), None)
        context.replicas |= dict.fromkeys(self._work)

    def release(self, adapter: str | None, key: bytes) -> Context | None:
        """Forget and return a context that the program dropped, if it is known."""
        return self._contexts.pop((adapter, key), None)

    def _nearest(self, query: Query, key: ContextKey) -> Context | None:
        """Find the longest known prefix of a query, near its end or at a block's end."""
        contexts, adapter, sequence = self._contexts, query.adapter, query.sequence
        known = contexts.get(key)
        length = len(sequence)
        if known is not None or length == 1:
            return known
        for shorter in itertools.chain(
            range(length - 1, max(0, length - 1 - LOOK_BACK), -1),
            range((length - 1) // BLOCK * BLOCK, 0, -BLOCK),
        ):
            known = contexts.get((adapter, sequence.prefix_key(shorter)))
            if known is not None:
                return known
        return None

    def _remember(
        self,
        adapter: str | None,
        sequence: TokenSequence,
        key: ContextKey,
        parent: Context | None,
    ) -> Context:
        context = self._contexts.get(key)
        if context is not None:
            self._contexts.move_to_end(key)
        else:
            length = len(sequence)
            begin = 0 if parent is None else parent.length // BLOCK
            for block in range(begin + 1, (length - 1) // BLOCK + 1):
                before = (adapter, sequence.prefix_key(block * BLOCK))
                if before not in self._contexts:
                    self._add(before, block * BLOCK, parent)
                parent = self._contexts[before]
            context = self._add(key, length, parent)
        context.sequence = sequence
        return context

    def _add(self, key: ContextKey, length: int, parent: Context | None) -> Context:
        fork = parent
        if parent is not None and len(parent.replicas) == 1 and parent.fork is not None:
            fork = parent.fork
        context = self._contexts[key] = Context(length, fork)
        if len(self._contexts) > self._max_contexts:
            self._contexts.popitem(last=False)
        return context

    # -- choosing ---------------------------------------------------------------------

    def _choose(self, each: RoutedQuery, family: int, room: Mapping[int, int]) -> int:
        """Choose a replica and set the cost; if it has no room, the query waits for it.

        Args:
            each: The query.
            family: Number of waiting queries that continue the same context, which share the
                tokens that are recomputed.
            room: Replicas with room.
        """
        idle = self._idlest()
        if idle not in room:
            idle = min(room, key=self._work.__getitem__)
        each.cost = each.tokens
        if isinstance(each.query, GroupQuery):
            base = each.query.generation.with_state()
            state = None if base is None else base.state
            is_placed = isinstance(state, PlacedGeneration) and state.replica in self._work
            return state.replica if is_placed and state is not None else idle
        context, parent = each.context, each.parent
        assert context is not None  # noqa: S101 - only populations have none
        home = self._holder(parent, idle)
        if home is None or home == idle or parent is None:
            known = 0 if parent is None else parent.length - parent.missing_in(idle)
            each.cost += TOKEN_COST * (max(1, context.length - known) - 1)
            return idle
        missing = parent.missing_in(idle)
        # To even out the work saves half of the difference.
        difference = self._work[home] - self._work[idle]
        if difference <= each.tokens + 2 * TOKEN_COST * missing / family:
            return home
        if missing and family < SHARED:
            if self._budget_used + missing > MAX_RECOMPUTED * self.tokens_asked:
                return home
            self._budget_used += missing
        if TOKEN_COST * missing < difference:
            each.cost += TOKEN_COST * missing
        # Else it pays over several steps, for which the rows are to be even.
        self.tokens_recomputed += missing
        return idle

    def _holder(self, parent: Context | None, idle: int) -> int | None:
        """The replica with the least work of those that have most of a context."""
        context = parent
        while context is not None:
            if idle in context.replicas:
                return idle
            holders = itertools.islice(
                (one for one in context.replicas if one in self._work), MOST_HOLDERS
            )
            found = min(holders, key=self._work.__getitem__, default=None)
            if found is not None:
                return found
            context = context.fork
        return None

    def _idlest(self) -> int:
        if len(self._least) > 16 * len(self._work) + 64:
            self._least = [(work, one) for one, work in self._work.items()]
            heapq.heapify(self._least)
        while self._work.get(self._least[0][1]) != self._least[0][0]:
            heapq.heappop(self._least)
        return self._least[0][1]

    def _assign(self, each: RoutedQuery, replica: int) -> None:
        parent, context = each.parent, each.context
        each.replica = replica
        while context is not None and replica not in context.replicas:
            context.replicas[replica] = None
            context = context.fork
        if parent is not None:
            parent.replicas[replica] = None
        del self._waiting[each.query.query_id]
        self._sent[each.query.query_id] = each
        self._in_flight[replica] += 1
        self._set_work(replica, self._work[replica] + each.cost)

    def _set_work(self, replica: int, work: float) -> None:
        self._work[replica] = max(0.0, work)
        heapq.heappush(self._least, (self._work[replica], replica))
