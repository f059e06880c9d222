"""`Residents`: row queries and populations on requests that stay in vLLM.

The handle of a sequence is its living request. The first child of a request continues it,
further children are forks, and requests without references end. A query is complete when all
its sequences are computed; the workers reduce rows directly from the logits of vLLM's batches.

    population      generation.state          vLLM's running list
    member 0, 2 ->  place 0: LivingRequest -> request, blocks 4 9
    member 1    ->  place 1: LivingRequest -> request, blocks 4 7
                    place 2: None             (restarted on demand)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.plugin import (
    Completion,
    Generation,
    GroupQuery,
    GroupResult,
    Query,
    TokenIdError,
    TokenSequence,
)
from genlm_vllm.adapters import Adapters
from genlm_vllm.contexts import ContextTable, Parent
from genlm_vllm.row_buffer import without_frames
from genlm_vllm.running_requests import LivingRequest, RunningRequests
from genlm_vllm.worker_rows import GroupPart, RowPart
from genlm_vllm.workers import Workers

__all__ = ["Residents"]


class _Kept:
    """State of a generation: the living request of each sequence that has one."""

    __slots__ = ("adapter", "livings")

    def __init__(self, adapter: str | None, count: int) -> None:
        self.adapter = adapter
        self.livings: list[LivingRequest | None] = [None] * count


class _Row:
    """A query for one row.

    Attributes:
        query: The query.
        livings: The request that computes it.
    """

    __slots__ = ("livings", "query")

    def __init__(self, query: Query, living: LivingRequest) -> None:
        self.query = query
        self.livings: list[LivingRequest | None] = [living]


class _Group:
    """A query of a population, the requests that compute its sequences, and its state.

    Attributes:
        query: The query.
        livings: The request of each sequence, by its place in `wanted`.
        left: Number of sequences that are neither computed nor failed.
        errors: Errors of sequences that were not computed, by their place.
        is_sent: Whether the workers have its reduction.
    """

    __slots__ = ("errors", "is_sent", "left", "livings", "query")

    def __init__(self, query: GroupQuery) -> None:
        self.query = query
        self.livings: list[LivingRequest | None] = [None] * len(query.wanted)
        self.left = len(query.wanted)
        self.errors: dict[int, Exception] = {}
        self.is_sent = False

    def fail(self, place: int, error: Exception) -> None:
        """Record the error of a sequence."""
        self.errors[place] = without_frames(error)
        self.left -= 1

    def sequence(self, place: int) -> TokenSequence:
        """Return a sequence by its place in `wanted`."""
        return self.query.generation.lineage.sequence(int(self.query.wanted[place]))


class _Plan:
    """Assignment of a query's sequences to continued, forked and new requests.

    Args:
        requests: The living requests.
        group: The query.

    Attributes:
        fed: Places, requests that are continued, and their new tokens.
        forked: Places, forked requests, numbers of shared tokens, and the new tokens.
        begun: Places of new requests.
    """

    def __init__(self, requests: RunningRequests, group: _Group) -> None:
        self._requests = requests
        self._group = group
        self.fed: list[tuple[int, LivingRequest, int]] = []
        self.forked: list[tuple[int, LivingRequest, int, list[int]]] = []
        self.begun: list[int] = []

    def add(
        self, place: int, parent: LivingRequest | None, length: int, new: list[int]
    ) -> None:
        """Assign a sequence.

        Args:
            place: Its place in `wanted`.
            parent: The request that has its first tokens, if any.
            length: Number of these tokens.
            new: The further ones.
        """
        action = "begin"
        if parent is not None:
            action = self._requests.action(parent, length, len(new))
        if parent is None or action == "begin":
            self.begun.append(place)
        elif action == "wait":
            self._group.livings[place] = parent
        elif action == "feed":
            parent.length += 1  # further children of it are forks
            self.fed.append((place, parent, new[0]))
        else:
            self.forked.append((place, parent, length, new))


class Residents:
    """Computes row queries and group queries with requests that stay.

    Args:
        engine: The `vllm.LLMEngine`; queries are accepted only if `running_requests.obstacle`
            returns None for it.
        adapters: The loaded adapters.
        workers: Compute rows and reduce them.
        check: Raises the error of a query for one sequence.
        embedded_ids: Number of ids that the model embeds.
        max_context: Maximum number of tokens of a query.

    Attributes:
        keeps: Whether requests rest between queries.
        tokens_evaluated: Tokens of all queries.
        tokens_computed: Tokens that the model computed for them.
    """

    def __init__(
        self,
        engine: Any,
        adapters: Adapters,
        *,
        workers: Workers,
        check: Callable[[Query], None],
        embedded_ids: int,
        max_context: int,
    ) -> None:
        self._adapters = adapters
        self._requests = RunningRequests(engine, adapters, workers)
        self._workers = workers
        self._check = check
        self._embedded_ids = embedded_ids
        self._max_context = max_context
        self._queries: dict[int, _Row | _Group] = {}
        # The sequences that a request computes now, by its id: queries and places in them.
        self._busy: dict[str, list[tuple[_Row | _Group, int]]] = {}
        self._to_begin: deque[tuple[_Group, int]] = deque()
        self._contexts = ContextTable()
        self.keeps = True
        self.tokens_evaluated = self.tokens_computed = 0
        self._members = {"continued": 0, "forked": 0, "begun": 0}
        self._contexts_continued = self._contexts_ended = 0

    def statistics(self) -> dict[str, int]:
        """Return the counters; from any thread."""
        resident = len(self._contexts)
        return {
            "contexts_resident": resident,
            "contexts_continued": self._contexts_continued,
            "contexts_ended": self._contexts_ended,
            "members_living": max(0, len(self._requests.living) - resident),
            **{f"members_{how}": count for how, count in self._members.items()},
        }

    @property
    def unanswered(self) -> int:
        """Number of unanswered queries."""
        return len(self._queries)

    # -- contexts ---------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Continue, fork or begin the request of a context.

        Raises:
            GenlmError: The query is not valid.
        """
        parent = self._valid_parent(query)
        if parent is None:
            self._check(query)
        self._requests.end_dropped()
        living = self._continued(parent) if parent is not None else None
        if living is None:
            living = self._requests.begin(query.token_ids, query.adapter)
        row = self._queries[query.query_id] = _Row(query, living)
        self._busy.setdefault(living.name, []).append((row, 0))
        self._contexts.put(query, living)
        self.tokens_evaluated += len(query)

    def _valid_parent(self, query: Query) -> Parent | None:
        """Return the request that a query extends if its further tokens are valid."""
        try:
            parent = self._contexts.parent(query)
        except OverflowError:  # ids that no sequence can have
            return None
        if parent is None or max(parent.added, default=0) >= self._embedded_ids:
            return None
        return parent if len(query) <= self._max_context else None

    def _continued(self, parent: Parent) -> LivingRequest | None:
        living, length, added = parent
        action = self._requests.action(living, length, len(added))
        if action == "wait":
            return living
        if action == "feed":
            self._contexts_continued += 1
            self._requests.feed([living], added)
            return living
        if action == "fork":
            self._make_place(living)
            return self._requests.fork(living, length, added)
        return None

    def _make_place(self, parent: LivingRequest) -> None:
        """End a resting request if a fork finds no place."""
        living = self._requests.living
        if len(living) >= self._requests.places:
            resting = (name for name in living if name not in self._busy)
            oldest = next((name for name in resting if name != parent.name), None)
            self._end([] if oldest is None else [oldest])

    def release(self, adapter: str | None, key: bytes) -> None:
        """End the resting request of a context, if there is one."""
        living = self._contexts.find((adapter, key))
        if living is not None and living.name not in self._busy:
            self._end([living.name])

    # -- populations ------------------------------------------------------------------

    def submit_group(self, query: GroupQuery) -> None:
        """Continue, fork or begin the requests of the sequences that are wanted."""
        group = _Group(query)
        plan = self._planned(group)
        # Requests to which nothing refers make room for forks and new ones.
        self._requests.end_dropped()
        self._queries[query.query_id] = group
        try:
            self._start(group, plan)
        except BaseException:
            self.abort(query.query_id)
            raise
        self.tokens_evaluated += len(query)

    def _planned(self, group: _Group) -> _Plan:
        """Assign every sequence and drop the generation that this one extends."""
        query = group.query
        generation, lineage = query.generation, query.generation.lineage
        base, kept = self._kept(generation, query.adapter)
        before = lineage if base is None else base.lineage
        wanted = query.wanted.tolist()
        plan, own = _Plan(self._requests, group), _Kept(query.adapter, len(lineage))
        if base is None or kept is None:
            plan.begun = list(range(len(wanted)))
        else:
            parents, suffixes = lineage.suffixes(query.wanted, before)
            self._refuse_ids(group, suffixes)
            lengths = before.lengths[parents].tolist()
            entries = map(kept.livings.__getitem__, parents.tolist())
            for place, (parent, length, new) in enumerate(
                zip(entries, lengths, _tokens(suffixes), strict=True)
            ):
                if place not in group.errors:
                    plan.add(place, parent, length, new)
        if base is generation and kept is not None:
            own = kept
        generation.keep(own)
        return plan

    def _kept(
        self, generation: Generation, adapter: str | None
    ) -> tuple[Generation | None, _Kept | None]:
        base = generation.with_state()
        state = None if base is None else base.state
        if isinstance(state, _Kept) and state.adapter == adapter:
            return base, state
        return None, None

    def _refuse_ids(self, group: _Group, suffixes: npt.NDArray[np.int64]) -> None:
        if suffixes.size and int(suffixes.max()) >= self._embedded_ids:
            for place in np.flatnonzero((suffixes >= self._embedded_ids).any(1)).tolist():
                at = int((suffixes[place] >= self._embedded_ids).argmax())
                found = int(suffixes[place, at])
                error = TokenIdError(found, at, self._embedded_ids, "token_ids")
                group.fail(place, error)

    def _start(self, group: _Group, plan: _Plan) -> None:
        """Execute the assignments and record which queries wait for which requests."""
        requests, livings, query = self._requests, group.livings, group.query
        for place, parent, length, new in plan.forked:
            livings[place] = child = requests.fork(parent, length, new)
            self._members["begun" if child.added is None else "forked"] += 1
        for place, living, _ in plan.fed:
            living.length -= 1  # `feed` counts it
            livings[place] = living
        requests.feed([each for _, each, _ in plan.fed], [token for *_, token in plan.fed])
        self._members["continued"] += len(plan.fed)
        kept = query.generation.state.livings
        for place, (at, each) in enumerate(zip(query.wanted.tolist(), livings, strict=True)):
            kept[at] = each
            if each is not None:
                self._busy.setdefault(each.name, []).append((group, place))
        self._to_begin += ((group, place) for place in plan.begun)
        self._begin_some()

    def _begin_some(self) -> None:
        """Begin members, at most as many as vLLM computes at once; the rest wait."""
        while self._to_begin and len(self._busy) < self._requests.places:
            group, place = self._to_begin.popleft()
            query, sequence = group.query, group.sequence(place)
            try:
                self._check(Query(query.query_id, sequence, query.adapter))
            except Exception as error:  # noqa: BLE001 - it fails this sequence alone
                group.fail(place, error)
                continue
            living = self._requests.begin(sequence.token_ids, query.adapter)
            group.livings[place] = living
            query.generation.state.livings[int(query.wanted[place])] = living
            self._busy[living.name] = [(group, place)]
            self._members["begun"] += 1

    def abort(self, query_id: int) -> bool:
        """Drop a query and end the requests of it alone; return False for an unknown query."""
        query = self._queries.pop(query_id, None)
        if query is None:
            return False
        alone = []
        for living in query.livings:
            waiting = self._busy.get(living.name) if living is not None else None
            if living is None or waiting is None:
                continue
            waiting[:] = [each for each in waiting if each[0] is not query]
            if not waiting:
                del self._busy[living.name]
                alone.append(living.name)
        self._end(alone)
        if isinstance(query, _Group):
            self._to_begin = deque(each for each in self._to_begin if each[0] is not query)
            self._workers.inputs.dropped.append(query_id)
        return True

    # -- steps ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before a step of vLLM, end unreferenced requests and begin waiting ones."""
        self._requests.end_dropped()
        self._begin_some()

    def collect(self) -> None:
        """Request the results of the sequences that a step computed."""
        living, results = self._requests.living, self._workers.results
        found: dict[_Group, tuple[list[str], list[int]]] = {}
        for name in list(self._busy):
            request = living[name]
            if request.num_computed_tokens != request.num_tokens:
                continue
            for query, place in self._busy.pop(name):
                if isinstance(query, _Row):
                    outputs = self._workers.sent(query.query.outputs)
                    results.rows.append(RowPart(query.query.query_id, name, outputs))
                    self._count_computed(query, (0,))
                else:
                    names, places = found.setdefault(query, ([], []))
                    names.append(name)
                    places.append(place)
        for group, (names, places) in found.items():
            self._count_computed(group, places)
            results.groups.append(self._part(group, names, places))

    def _count_computed(self, query: _Row | _Group, places: Iterable[int]) -> None:
        self.tokens_computed += sum(
            living.computed for place in places if (living := query.livings[place])
        )

    def _part(self, group: _Group, names: list[str], places: list[int]) -> GroupPart:
        query, is_first = group.query, not group.is_sent
        group.left -= len(places)
        group.is_sent = True
        return GroupPart(
            query.query_id,
            query.row_of if is_first else None,
            self._workers.sent((query.reduction,)) if is_first else (),  # type: ignore[arg-type]
            len(query.wanted),
            names,
            places,
            is_last=not group.left,
        )

    def finish(self, found: dict[int, Completion]) -> list[Completion]:
        """Return the queries that are complete.

        Args:
            found: Results of the workers by query id, of which those of these queries are
                removed.
        """
        for query_id, query in self._queries.items():
            if isinstance(query, _Group) and not (query.left or query.is_sent):
                found[query_id] = Completion(query_id, GroupResult((), {}))  # all have failed
        completions = []
        for query_id in [each for each in found if each in self._queries]:
            query, completion = self._queries.pop(query_id), found.pop(query_id)
            completions.append(completion)
            adapter = query.query.adapter
            stays = self.keeps and self._requests.may_stay(adapter)
            if isinstance(query, _Group):
                if isinstance(completion.result, GroupResult):
                    completion.result.errors.update(query.errors)
            else:
                stays = stays and len(query.query) < self._max_context
            if not stays:
                names = [each.name for each in query.livings if each]
                self._end([name for name in names if name not in self._busy])
        return completions

    def relieve(self, *, has_run: bool) -> None:
        """After a step, end resting requests that block waiting ones.

        Args:
            has_run: Whether the step executed the model.
        """
        requests = self._requests
        if not (requests.living or self._to_begin):
            return
        waiting = requests.waiting + len(self._to_begin)
        if waiting <= 0:
            return
        self._end([name for name in requests.preempted() if name not in self._busy])
        resting = [name for name in requests.living if name not in self._busy]
        count = max(0, waiting - requests.free_places)
        if not count and (requests.lacks_blocks or not has_run):
            count = (len(resting) + 1) // 2 or 1
        if resting:
            self._end(resting[:count])
        elif count and not has_run:
            self._begin_again(requests.stuck())

    def _begin_again(self, stuck: Sequence[str]) -> None:
        """Free the blocks of forks that wait for further blocks."""
        for name in stuck[len(stuck) // 2 :]:
            waiting = self._busy.pop(name)
            query, place = waiting[0]
            living = query.livings[place]
            assert living is not None  # noqa: S101 - it computes the place
            self._requests.begin_again(living)
            self._busy[living.name] = waiting

    # -- ends -------------------------------------------------------------------------

    def drop_all(self) -> list[int]:
        """Drop all queries, leaving their requests at rest; return the query ids."""
        dropped = list(self._queries)
        self._workers.inputs.dropped += dropped
        self._queries.clear()
        self._to_begin.clear()
        self._busy.clear()
        return dropped

    def end_resting(self, adapter: str | None = None) -> None:
        """End the resting requests of one adapter or of all."""
        requests = self._requests
        names = requests.living if adapter is None else requests.names_of(adapter)
        self._end([name for name in names if name not in self._busy])

    def end_too_many(self) -> None:
        """After an adapter is loaded, end requests that may no longer rest."""
        for adapter in self._adapters.names:
            if not self._requests.may_stay(adapter):
                self.end_resting(adapter)

    def _end(self, names: Sequence[str]) -> None:
        if names:
            self._contexts_ended += self._contexts.remove(names)
            self._requests.end(names)


def _tokens(suffixes: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return the token ids of each row, without -1."""
    found: list[list[int]] = suffixes.tolist()
    if suffixes.size and int(suffixes.min()) < 0:
        return [[each for each in row if each >= 0] for row in found]
    return found
