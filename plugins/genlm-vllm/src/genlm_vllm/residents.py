"""`Residents`: queries on requests that stay in vLLM.

The handle of a sequence is its living request. The first child of a request continues it,
further children are forks, and requests without references end. A query is complete when all
its sequences are computed; the workers reduce rows directly from the logits of vLLM's batches.
The request of a text to score ends when it is computed.

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
    EvaluationError,
    Generation,
    GroupQuery,
    GroupResult,
    Query,
    TokenIdError,
)
from genlm_vllm.adapters import Adapters
from genlm_vllm.contexts import ContextTable, Parent
from genlm_vllm.processes import without_frames
from genlm_vllm.running_requests import LivingRequest, RunningRequests
from genlm_vllm.scores import TextPart
from genlm_vllm.worker_rows import GroupPart, RowPart
from genlm_vllm.workers import Workers

__all__ = ["Residents"]


class _Kept:
    """State of a generation: the living request of each sequence that has one."""

    __slots__ = ("adapter", "livings")

    def __init__(self, adapter: str | None, count: int) -> None:
        self.adapter = adapter
        self.livings: list[LivingRequest | None] = [None] * count


class _Pending:
    """A query, the requests that compute its sequences, and its state.

    Attributes:
        query: The query; one that is not of a population has one sequence.
        livings: The request of each sequence, by its place in `wanted`.
        left: Number of sequences that are neither computed nor failed.
        errors: Errors of sequences that were not computed, by their place.
        is_sent: Whether the workers have its reduction.
    """

    __slots__ = ("errors", "is_sent", "left", "livings", "query")

    def __init__(self, query: Query | GroupQuery, count: int) -> None:
        self.query = query
        self.livings: list[LivingRequest | None] = [None] * count
        self.left = count
        self.errors: dict[int, Exception] = {}
        self.is_sent = False

    def fail(self, place: int, error: Exception) -> None:
        """Record the error of a sequence."""
        self.errors[place] = without_frames(error)
        self.left -= 1


class Residents:
    """Computes queries with requests that stay.

    Args:
        engine: The `vllm.LLMEngine`.
        adapters: The loaded adapters.
        workers: Compute rows and reduce them.
        check: Raises the error of a query for one sequence.
        embedded_ids: Number of ids that the model embeds.
        max_context: Maximum number of tokens of a query.

    Attributes:
        keeps: Whether requests rest between queries.
        requests: The requests in vLLM.
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
        self.requests = RunningRequests(engine, adapters, workers)
        self._workers = workers
        self._check = check
        self._embedded_ids = embedded_ids
        self._max_context = max_context
        self._block_tokens: int = engine.vllm_config.cache_config.block_size
        self._queries: dict[int, _Pending] = {}
        # The sequences that a request computes now, by its id: queries and places in them.
        self._busy: dict[str, list[tuple[_Pending, int]]] = {}
        self._to_begin: deque[tuple[_Pending, int]] = deque()
        self._contexts = ContextTable()
        self.keeps = True
        self.tokens_evaluated = self.tokens_computed = 0
        self._counts = dict.fromkeys(
            (
                *("contexts_continued", "contexts_ended"),
                *("members_continued", "members_forked", "members_begun"),
            ),
            0,
        )

    def statistics(self) -> dict[str, int]:
        """Return the counters; from any thread."""
        resident = len(self._contexts)
        return {
            "contexts_resident": resident,
            "members_living": max(0, len(self.requests.living) - resident),
            **self._counts,
        }

    @property
    def unanswered(self) -> int:
        """Number of unanswered queries."""
        return len(self._queries)

    # -- contexts, scores -------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Continue, fork or begin the request of a context, or begin that of a text to score.

        Raises:
            GenlmError: The query is not valid.
        """
        parent = None if query.targets else self._valid_parent(query)
        if parent is None:
            self._check(query)
        self.requests.end_dropped()
        pending = _Pending(query, 1)
        if query.targets:
            # A block of the prefix cache could end after the first target.
            first = len(query) - len(query.targets)
            self._begin_scores(pending, reads_cache=first >= self._block_tokens)
        else:
            living = None if parent is None else self._extended(parent, "contexts")
            if living is None:
                living = self.requests.begin(query.token_ids, query.adapter)
            self._wait_for(living, pending)
            self._contexts.put(query, living)
        self._queries[query.query_id] = pending
        self.tokens_evaluated += len(query)

    def _wait_for(self, living: LivingRequest, pending: _Pending, place: int = 0) -> None:
        """Record that a request computes a sequence."""
        pending.livings[place] = living
        self._busy.setdefault(living.name, []).append((pending, place))

    def _valid_parent(self, query: Query) -> Parent | None:
        """Return the request that a query extends if its further tokens are valid."""
        try:
            parent = self._contexts.parent(query)
        except OverflowError:  # ids that no sequence can have
            return None
        if parent is None or max(parent.added, default=0) >= self._embedded_ids:
            return None
        return parent if len(query) <= self._max_context else None

    def _extended(self, parent: Parent, kind: str) -> LivingRequest | None:
        """Return a request that computes what extends one; None if a new one is needed."""
        living, length, added = parent
        action = self.requests.action(living, length, len(added))
        if action == "feed":
            self._counts[f"{kind}_continued"] += 1
            self.requests.feed(living, added[0])
        elif action == "fork":
            if kind == "contexts":
                self._make_place(living)
            return self.requests.fork(living, length, added)
        return None if action == "begin" else living

    def _make_place(self, parent: LivingRequest) -> None:
        """End a resting request if a fork finds no place."""
        living = self.requests.living
        if len(living) >= self.requests.places:
            resting = (name for name in living if name not in self._busy)
            oldest = next((name for name in resting if name != parent.name), None)
            self._end([] if oldest is None else [oldest])

    def _begin_scores(self, pending: _Pending, *, reads_cache: bool) -> None:
        query = pending.query
        assert isinstance(query, Query)  # noqa: S101 - of a text
        first = len(query) - len(query.targets)
        living = self.requests.begin(query.token_ids, query.adapter, reads_cache=reads_cache)
        outputs = self._workers.sent(query.outputs)
        text = TextPart(query.query_id, living.name, first, query.targets, outputs)
        self._workers.inputs.texts.append(text)
        self._wait_for(living, pending)

    def release(self, adapter: str | None, key: bytes) -> None:
        """End the resting request of a context, if there is one."""
        living = self._contexts.find((adapter, key))
        if living is not None and living.name not in self._busy:
            self._end([living.name])

    # -- populations ------------------------------------------------------------------

    def submit_group(self, query: GroupQuery) -> None:
        """Continue, fork or begin the requests of the sequences that are wanted."""
        pending = _Pending(query, len(query.wanted))
        self._queries[query.query_id] = pending
        try:
            self._start(pending, query)
        except BaseException:
            self.abort(query.query_id)
            raise
        self.tokens_evaluated += len(query)

    def _start(self, pending: _Pending, query: GroupQuery) -> None:
        """Assign every sequence to a request, and drop the generation that is extended."""
        generation, lineage = query.generation, query.generation.lineage
        wanted = query.wanted.tolist()
        base, kept = self._kept(generation, query.adapter)
        own = _Kept(query.adapter, len(lineage))
        parents: Iterable[Parent | None] = [None] * len(wanted)
        if base is not None and kept is not None:
            places, suffixes = lineage.suffixes(query.wanted, base.lineage)
            self._refuse_ids(pending, suffixes)
            lengths = base.lineage.lengths[places].tolist()
            livings = [kept.livings[place] for place in places.tolist()]
            parents = [
                None if living is None else Parent(living, length, added)
                for living, length, added in zip(
                    livings, lengths, _tokens(suffixes), strict=True
                )
            ]
            if base is generation:
                own = kept
        del base, kept
        generation.keep(own)
        # Requests to which nothing refers make room for forks and new ones.
        self.requests.end_dropped()
        for place, parent in enumerate(parents):
            if place in pending.errors:
                continue
            living = None if parent is None else self._extended(parent, "members")
            if living is None:
                self._to_begin.append((pending, place))
                continue
            if parent is not None and living is not parent.living:
                how = "begun" if living.added is None else "forked"
                self._counts[f"members_{how}"] += 1
            own.livings[wanted[place]] = living
            self._wait_for(living, pending, place)
        self._begin_some()

    def _kept(
        self, generation: Generation, adapter: str | None
    ) -> tuple[Generation | None, _Kept | None]:
        base = generation.with_state()
        state = None if base is None else base.state
        if isinstance(state, _Kept) and state.adapter == adapter:
            return base, state
        return None, None

    def _refuse_ids(self, pending: _Pending, suffixes: npt.NDArray[np.int64]) -> None:
        if suffixes.size and int(suffixes.max()) >= self._embedded_ids:
            for place in np.flatnonzero((suffixes >= self._embedded_ids).any(1)).tolist():
                at = int((suffixes[place] >= self._embedded_ids).argmax())
                found = int(suffixes[place, at])
                error = TokenIdError(found, at, self._embedded_ids, "token_ids")
                pending.fail(place, error)

    def _begin_some(self) -> None:
        """Begin members, at most as many as vLLM computes at once; the rest wait."""
        while self._to_begin and len(self._busy) < self.requests.places:
            pending, place = self._to_begin.popleft()
            query: Any = pending.query
            generation, wanted = query.generation, int(query.wanted[place])
            sequence = generation.lineage.sequence(wanted)
            try:
                self._check(Query(query.query_id, sequence, query.adapter))
            except Exception as error:  # noqa: BLE001 - it fails this sequence alone
                pending.fail(place, error)
                continue
            living = self.requests.begin(sequence.token_ids, query.adapter)
            generation.state.livings[wanted] = living
            self._wait_for(living, pending, place)
            self._counts["members_begun"] += 1

    def abort(self, query_id: int) -> None:
        """Drop a query and end the requests of it alone; an unknown query is ignored."""
        pending = self._queries.pop(query_id, None)
        if pending is None:
            return
        alone = []
        for living in pending.livings:
            waiting = self._busy.get(living.name) if living is not None else None
            if living is None or waiting is None:
                continue
            waiting[:] = [each for each in waiting if each[0] is not pending]
            if not waiting:
                del self._busy[living.name]
                alone.append(living.name)
        self._end(alone)
        self._to_begin = deque(each for each in self._to_begin if each[0] is not pending)
        self._workers.inputs.dropped.append(query_id)

    # -- steps ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before a step of vLLM, end unreferenced requests and begin waiting ones."""
        self.requests.end_dropped()
        self._begin_some()

    def collect(self) -> None:
        """Request the results of the sequences that a step computed."""
        living = self.requests.living
        found: dict[_Pending, tuple[list[str], list[int]]] = {}
        for name in list(self._busy):
            request = living[name]
            if (
                request.num_computed_tokens != request.num_tokens
                or request.num_in_flight_tokens
            ):
                if request.is_finished():
                    self._fail_ended(name)
                continue
            for pending, place in self._busy.pop(name):
                names, places = found.setdefault(pending, ([], []))
                names.append(name)
                places.append(place)
        for pending in self._queries.values():
            if pending.is_sent and not pending.left:  # the last sequences have failed
                found.setdefault(pending, ([], []))
        for pending, (names, places) in found.items():
            self._request_results(pending, names, places)

    def _fail_ended(self, name: str) -> None:
        """Fail the sequences of a request that vLLM ended before it was computed."""
        for pending, place in self._busy.pop(name):
            message = "vLLM ended the request before it was complete; see its log"
            pending.fail(place, EvaluationError(message))
        self._end([name])

    def _request_results(self, pending: _Pending, names: list[str], places: list[int]) -> None:
        query, results = pending.query, self._workers.results
        self.tokens_computed += sum(
            living.computed for place in places if (living := pending.livings[place])
        )
        is_first, pending.is_sent = not pending.is_sent, True
        pending.left -= len(places)
        if isinstance(query, GroupQuery):
            reduction: Any = query.reduction
            outputs: Any = self._workers.sent((reduction,)) if is_first else ()
            row_of = query.row_of if is_first else None
            part = GroupPart(
                query.query_id,
                row_of,
                outputs,
                len(query.wanted),
                names,
                places,
                is_last=not pending.left,
            )
            results.groups.append(part)
        elif query.targets:
            results.scored.append(query.query_id)
        else:
            outputs = self._workers.sent(query.outputs)
            results.rows.append(RowPart(query.query_id, names[0], outputs))

    def finish(self, found: dict[int, Completion]) -> list[Completion]:
        """Return the queries that are complete.

        Args:
            found: Results of the workers by query id.
        """
        for query_id, pending in self._queries.items():
            if not (pending.left or pending.is_sent):  # all sequences have failed
                is_group = isinstance(pending.query, GroupQuery)
                found[query_id] = (
                    Completion(query_id, GroupResult((), {}))
                    if is_group
                    else Completion(query_id, error=pending.errors[0])
                )
        completions, ended = [], []
        for query_id, completion in found.items():
            pending = self._queries[query_id]
            query = pending.query
            stays = self.keeps and self.requests.may_stay(query.adapter)
            if isinstance(completion.result, GroupResult):
                completion.result.errors.update(pending.errors)
            elif isinstance(query, Query):
                stays = stays and not query.targets and len(query) < self._max_context
            if not stays:
                names = [each.name for each in pending.livings if each]
                ended += [name for name in names if name not in self._busy]
            if completion.result is None and completion.error is None:
                # The prefix cache served some of the positions of the targets.
                pending.left, pending.is_sent = 1, False
                self._begin_scores(pending, reads_cache=False)
                continue
            del self._queries[query_id]
            completions.append(completion)
        self._end(ended)
        return completions

    def relieve(self) -> None:
        """After a step, end resting requests that block waiting ones."""
        requests = self.requests
        if not (requests.living or self._to_begin):
            return
        waiting = requests.waiting + len(self._to_begin)
        if waiting <= 0:
            return
        self._end([name for name in requests.preempted() if name not in self._busy])
        resting = [name for name in requests.living if name not in self._busy]
        count = max(0, waiting - requests.free_places)
        if not count and (requests.lacks_blocks or not requests.has_run):
            count = (len(resting) + 1) // 2 or 1
        if resting:
            self._end(resting[:count])
        elif count and not requests.has_run:
            self._begin_again(requests.stuck())

    def _begin_again(self, stuck: Sequence[str]) -> None:
        """Free the blocks of forks that wait for further blocks."""
        for name in stuck[len(stuck) // 2 :]:
            waiting = self._busy.pop(name)
            query, place = waiting[0]
            living = query.livings[place]
            assert living is not None  # noqa: S101 - it computes the place
            self.requests.begin_again(living)
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
        requests = self.requests
        names = requests.living if adapter is None else requests.names_of(adapter)
        self._end([name for name in names if name not in self._busy])

    def end_too_many(self) -> None:
        """After an adapter is loaded, end requests that may no longer rest."""
        for adapter in self._adapters.names:
            if not self.requests.may_stay(adapter):
                self.end_resting(adapter)

    def _end(self, names: Sequence[str]) -> None:
        if names:
            self._counts["contexts_ended"] += self._contexts.remove(set(names))
            self.requests.end(names)


def _tokens(suffixes: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return the token ids of each row, without -1."""
    found: list[list[int]] = suffixes.tolist()
    if suffixes.size and int(suffixes.min()) < 0:
        return [[each for each in row if each >= 0] for row in found]
    return found
