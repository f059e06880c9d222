"""`Router`: assignment of queries to replicas. Depends on neither Ray nor the time.

The cost of a replica is counted in rows: its waiting queries, and the tokens of the query's
context that it has not computed. A query goes to the replica that has most of its context.
Queries that continue one context are then moved from the replica with the most work to the one
with the least, while this pays for the tokens that are recomputed.

Deterministic: equal calls have equal results, so `benchmarks/simulate_replicas.py` runs this
class at any scale.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable

from genlm.plugin import Query, TokenSequence

__all__ = ["Context", "RoutedQuery", "Router"]

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
        number: Names the sequence in messages to replicas.
        length: Its number of tokens.
        replicas: Replicas that have computed it or will.
        sent: Replicas that store its tokens under its number.
        is_dropped: Whether it was forgotten, possibly while queries that reference it wait.
        fork: Its longest prefix that more replicas had when it was added.
    """

    __slots__ = ("fork", "is_dropped", "length", "number", "replicas", "sent")

    def __init__(self, number: int, length: int, fork: Context | None) -> None:
        self.number = number
        self.length = length
        self.fork = fork
        self.replicas: dict[int, None] = {}
        self.sent: set[int] = set()
        self.is_dropped = False

    def computed_by(self, replica: int) -> int:
        """Return the number of its first tokens that a replica has."""
        context: Context | None = self
        while context is not None:
            if replica in context.replicas:
                return context.length
            context = context.fork
        return 0


class RoutedQuery:
    """A query, its context, the known prefix that it continues, and its replica."""

    __slots__ = ("context", "cost", "is_sent", "order", "parent", "query", "replica", "tokens")

    def __init__(
        self, query: Query, order: int, context: Context, parent: Context | None
    ) -> None:
        self.query = query
        self.order = order
        self.context = context
        self.parent = parent
        self.tokens = 1 if query.sampling is None else query.sampling.max_tokens
        self.replica = -1
        self.cost = 0.0
        self.is_sent = False


class Router:
    """Assigns queries to replicas and keeps those that are not sent yet.

    Args:
        max_contexts: Maximum number of contexts; the least recently used are evicted.

    Attributes:
        tokens_asked: Tokens that the queries needed where they were first routed.
        tokens_recomputed: Tokens that were assigned to a further replica.
    """

    def __init__(self, max_contexts: int = 2**15) -> None:
        self._max_contexts = max_contexts
        self._contexts: OrderedDict[ContextKey, Context] = OrderedDict()
        self._numbers = itertools.count()
        self._orders = itertools.count()
        self._routed: dict[int, RoutedQuery] = {}
        self._waiting: dict[int, dict[int, RoutedQuery]] = {}  # by replica, then by query
        self._sent: dict[int, dict[int, RoutedQuery]] = {}
        self._unassigned: dict[int, RoutedQuery] = {}
        self._work: dict[int, float] = {}
        self._least: list[tuple[float, int]] = []  # a heap, of which outdated items are left
        self._changed: set[int] = set()  # replicas whose work is not in the heap yet
        self._dropped: list[Context] = []
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

    def idlest(self) -> int | None:
        """The replica with the least work; None if there is none."""
        return self._idlest() if self._work else None

    def charge(self, replica: int, rows: float) -> None:
        """Add rows of a population to a replica's work, or subtract them."""
        if replica in self._work:
            self._set_work(replica, self._work[replica] + rows)

    def add(self, replica: int) -> None:
        """Assign queries to a replica, which has computed nothing. Numbers are never reused."""
        self._waiting[replica], self._sent[replica] = {}, {}
        self._set_work(replica, 0.0)
        unassigned, self._unassigned = self._unassigned, {}
        self._place(list(unassigned.values()))

    def reassign_from(self, replica: int) -> None:
        """Assign a replica's queries to the others, in order of submission."""
        requeued = {**self._sent.pop(replica), **self._waiting.pop(replica)}
        del self._work[replica]
        for each in requeued.values():
            each.is_sent, each.replica = False, -1
        self._place(sorted(requeued.values(), key=_order))

    # -- queries ----------------------------------------------------------------------

    def assign(self, queries: Iterable[Query]) -> None:
        """Choose a replica for each query of a batch."""
        routed = []
        for query in queries:
            key = (query.adapter, query.sequence.key)
            parent = self._nearest(query, key)
            context = self._remember(query.adapter, query.sequence, key, parent)
            each = RoutedQuery(query, next(self._orders), context, parent)
            self._routed[query.query_id] = each
            routed.append(each)
            self.tokens_asked += max(1, context.length - (parent.length if parent else 0))
        self._place(routed)

    def take(self, replica: int, most: int) -> list[RoutedQuery]:
        """Return waiting queries of a replica, oldest first; they count as sent.

        If it has none, it gets waiting queries of another one, if moving them pays.
        """
        waiting = self._waiting[replica]
        if not waiting and not self._sent[replica]:
            self._take_from_others()
        taken = list(itertools.islice(waiting.values(), most))
        for each in taken:
            del waiting[each.query.query_id]
            self._sent[replica][each.query.query_id] = each
            each.is_sent = True
        return taken

    def finished(self, query_id: int, replica: int | None = None) -> bool:
        """Forget a query that was answered or aborted.

        Args:
            query_id: Id of the query.
            replica: The replica that answered.

        Returns:
            Whether the query was unanswered and assigned to that replica.
        """
        each = self._routed.get(query_id)
        if each is None or (replica is not None and each.replica != replica):
            return False
        del self._routed[query_id]
        if each.replica < 0:
            del self._unassigned[query_id]
            return True
        (self._sent if each.is_sent else self._waiting)[each.replica].pop(query_id)
        self._set_work(each.replica, self._work[each.replica] - each.cost)
        return True

    def sent_to(self, query_id: int) -> int | None:
        """The replica that is evaluating a query, None if it waits or is unknown."""
        each = self._routed.get(query_id)
        return each.replica if each is not None and each.is_sent else None

    def in_flight(self, replica: int) -> int:
        """Number of queries that a replica is evaluating."""
        return len(self._sent[replica])

    def __len__(self) -> int:
        """Number of unanswered queries."""
        return len(self._routed)

    # -- contexts ---------------------------------------------------------------------

    def computed_everywhere(self, adapter: str | None, sequence: TokenSequence) -> None:
        """Record that every replica has computed a prefix."""
        context = self._remember(adapter, sequence, (adapter, sequence.key), None)
        context.replicas |= dict.fromkeys(self._work)

    def release(self, adapter: str | None, key: bytes) -> None:
        """Forget a context that the program dropped."""
        context = self._contexts.pop((adapter, key), None)
        if context is not None:
            self._drop(context)

    def dropped(self) -> list[Context]:
        """Return contexts forgotten since the last call, which replicas may forget too."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def forget(self, context: Context) -> list[int]:
        """Return the replicas that know a dropped context, and must be told to forget it.

        Queries that continue it are sent with all their ids from now on.
        """
        replicas = [replica for replica in context.sent if replica in self._work]
        context.sent.clear()
        return replicas

    def _drop(self, context: Context) -> None:
        context.is_dropped = True
        self._dropped.append(context)

    # -- choosing ---------------------------------------------------------------------

    def _nearest(self, query: Query, key: ContextKey) -> Context | None:
        """Find the longest known prefix of a query, near its end or at a block's end."""
        contexts, adapter, sequence = self._contexts, query.adapter, query.sequence
        known = contexts.get(key)
        length = len(sequence)
        if known is not None or length == 1:
            return known
        known = contexts.get((adapter, sequence.prefix_key(length - 1)))
        if known is not None:
            return known
        for shorter in itertools.chain(
            range(length - 2, max(0, length - 1 - LOOK_BACK), -1),
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
            return context
        length = len(sequence)
        begin = 0 if parent is None else parent.length // BLOCK
        for block in range(begin + 1, (length - 1) // BLOCK + 1):
            before = (adapter, sequence.prefix_key(block * BLOCK))
            if before not in self._contexts:
                self._add(before, block * BLOCK, parent)
            parent = self._contexts[before]
        return self._add(key, length, parent)

    def _add(self, key: ContextKey, length: int, parent: Context | None) -> Context:
        fork = parent
        if parent is not None and len(parent.replicas) == 1 and parent.fork is not None:
            fork = parent.fork
        context = self._contexts[key] = Context(next(self._numbers), length, fork)
        if len(self._contexts) > self._max_contexts:
            self._drop(self._contexts.popitem(last=False)[1])
        return context

    def _place(self, routed: list[RoutedQuery]) -> None:
        if not self._work:
            self._unassigned.update((each.query.query_id, each) for each in routed)
            return
        groups: dict[int, dict[Context | None, list[RoutedQuery]]] = {}
        for each in routed:
            replica = self._preferred_replica(each.parent)
            self._put(each, replica)
            groups.setdefault(replica, {}).setdefault(each.parent, []).append(each)
        for replica in sorted(groups, key=lambda one: (-self._work[one], one)):
            # Queries without a parent went to the replica with the least work.
            groups[replica].pop(None, None)
            self._rebalance(replica, groups[replica])

    def _preferred_replica(self, parent: Context | None) -> int:
        """The holder of a context with the least work; else the replica with the least."""
        idlest = self._idlest()
        context = parent
        while context is not None:
            if idlest in context.replicas:
                return idlest
            holders = itertools.islice(
                (one for one in context.replicas if one in self._work), MOST_HOLDERS
            )
            found = min(holders, key=self._work.__getitem__, default=None)
            if found is not None:
                return found
            context = context.fork
        return idlest

    def _idlest(self) -> int:
        for replica in self._changed:
            if replica in self._work:
                heapq.heappush(self._least, (self._work[replica], replica))
        self._changed.clear()
        if len(self._least) > 16 * len(self._work) + 64:
            self._least = [(work, one) for one, work in self._work.items()]
            heapq.heapify(self._least)
        while self._work.get(self._least[0][1]) != self._least[0][0]:
            heapq.heappop(self._least)
        return self._least[0][1]

    def _rebalance(self, busy: int, groups: dict[Context | None, list[RoutedQuery]]) -> None:
        """Move waiting queries of one replica to those with the least work, while that pays.

        A query moves if half the difference in work, which is what evening out saves, is worth
        its share of the tokens that are recomputed. All queries of its group share them.
        """
        idle = self._idlest()
        cheapest_first = sorted(
            groups.items(), key=lambda group: _missing(group[0], idle) / len(group[1])
        )
        for parent, group in cheapest_first:
            for each in reversed(group):
                idle = self._idlest()
                missing = _missing(parent, idle)
                difference = self._work[busy] - self._work[idle]
                if difference <= each.tokens + 2 * TOKEN_COST * missing / len(group):
                    break
                if missing and len(group) < SHARED:
                    if self._budget_used + missing > MAX_RECOMPUTED * self.tokens_asked:
                        break
                    self._budget_used += missing
                self._move(each, idle)
                self.tokens_recomputed += missing
                if TOKEN_COST * missing >= difference:
                    # It pays over several steps, for which the rows are to be even.
                    self._set_work(idle, self._work[idle] - (each.cost - each.tokens))
                    each.cost = each.tokens

    def _take_from_others(self) -> None:
        """Move queries that wait for the replica with the most work."""
        queues = [one for one, waiting in self._waiting.items() if waiting]
        if queues:
            busy = max(queues, key=lambda one: (self._work[one], -one))
            groups: dict[Context | None, list[RoutedQuery]] = {}
            for each in self._waiting[busy].values():
                groups.setdefault(each.parent, []).append(each)
            self._rebalance(busy, groups)

    # -- bookkeeping ------------------------------------------------------------------

    def _put(self, each: RoutedQuery, replica: int) -> None:
        parent, length = each.parent, each.context.length
        known = 0 if parent is None else parent.computed_by(replica)
        each.cost = each.tokens + TOKEN_COST * (max(1, length - known) - 1)
        each.replica = replica
        context: Context | None = each.context
        while context is not None and replica not in context.replicas:
            context.replicas[replica] = None
            context = context.fork
        if parent is not None:
            parent.replicas[replica] = None
        self._waiting[replica][each.query.query_id] = each
        self._set_work(replica, self._work[replica] + each.cost)

    def _move(self, each: RoutedQuery, replica: int) -> None:
        self._set_work(each.replica, self._work[each.replica] - each.cost)
        del self._waiting[each.replica][each.query.query_id]
        each.context.replicas.pop(each.replica, None)
        self._put(each, replica)

    def _set_work(self, replica: int, work: float) -> None:
        self._work[replica] = max(0.0, work)
        self._changed.add(replica)


def _missing(context: Context | None, replica: int) -> int:
    return 0 if context is None else context.length - context.computed_by(replica)


def _order(routed: RoutedQuery) -> int:
    return routed.order
