"""`Residents`: computes queries with requests that stay in vLLM.

A sequence is represented by its resident request. The first child of a request continues it,
further children are forks, and a request without references ends. A query is complete when all
its sequences are computed; the workers reduce rows directly from the logits of vLLM's batches.
The request of a text to score ends when it is computed.

    population      generation.state          vLLM's running list
    member 0, 2 ->  place 0: ResidentRequest -> request, blocks 4 9
    member 1    ->  place 1: ResidentRequest -> request, blocks 4 7
                    place 2: None               (begun again on demand)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from genlm.plugin import (
    Completion,
    EvaluationError,
    GroupQuery,
    GroupResult,
    MemberStates,
    Query,
    check_query,
)
from genlm_vllm.adapters import Adapters
from genlm_vllm.contexts import ContextTable
from genlm_vllm.messages import ComputedPart, NewQuery
from genlm_vllm.pending_query import PendingQuery
from genlm_vllm.processes import Outputs
from genlm_vllm.running_requests import (
    Integers64,
    Parent,
    ResidentRequest,
    Room,
    RunningRequests,
)
from genlm_vllm.workers import Workers


class MemberRequests(MemberStates):
    """The `ResidentRequest` of each sequence of a generation."""


class Residents:
    """Computes queries with requests that stay in vLLM.

    Args:
        engine: The `vllm.LLMEngine`.
        adapters: The loaded adapters.
        workers: vLLM's workers, which reduce rows.
        vocab_size: Number of token ids of the vocabulary.

    Attributes:
        max_context: Maximum number of tokens of a query.
        keeps: Whether the requests of contexts stay between queries.
        requests: The requests in vLLM.
        tokens_evaluated: Number of tokens of all queries.
    """

    def __init__(
        self,
        engine: Any,
        adapters: Adapters,
        *,
        workers: Workers,
        vocab_size: int,
    ) -> None:
        config = engine.vllm_config
        self._adapters = adapters
        self.requests = RunningRequests(engine, adapters, workers)
        self._workers = workers
        self._vocab_size = vocab_size
        self._embedded_ids: int = config.model_config.get_vocab_size()
        # vLLM must generate one token.
        self.max_context: int = config.model_config.max_model_len - 1
        self._queries: dict[int, PendingQuery] = {}
        # Queries and places of the sequences that a request computes now, by the request's id.
        self._busy: dict[str, list[tuple[PendingQuery, int]]] = {}
        self._unstarted: deque[tuple[PendingQuery, int]] = deque()
        self._contexts = ContextTable()
        self.keeps = True
        self.tokens_evaluated = 0
        self._computed_before = 0  # number of computed tokens before the latest step
        self._counts = dict.fromkeys(
            (
                "contexts_continued",
                *("members_continued", "members_forked", "members_begun"),
            ),
            0,
        )

    def statistics(self) -> dict[str, int]:
        """Return the counters. May be called from any thread."""
        contexts = len(self._contexts)
        return {
            "contexts_resident": contexts,
            "contexts_ended": self._contexts.removed,
            "members_living": max(0, len(self.requests.by_name) - contexts),
            **self._counts,
        }

    @property
    def unanswered(self) -> int:
        """Number of unanswered queries."""
        return len(self._queries)

    @property
    def computes_groups(self) -> bool:
        """Whether a query of a population is unanswered."""
        return any(isinstance(pending.query, GroupQuery) for pending in self._queries.values())

    # -- contexts, scores -------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Continue, fork or begin the request of a context, or begin that of a text to score.

        Raises:
            GenlmError: The query is invalid.
        """
        self._check(query)
        self.requests.end_dropped()
        pending = PendingQuery(query, 1, self.requests.turns.current + query.turn)
        if query.targets:
            # Otherwise the first block of the prefix cache could cover a scored position.
            first = query.first_target
            self._begin_scores(pending, reads_cache=first >= self.requests.block_size)
        else:
            parent = self._contexts.parent(query, len(query))
            resident = None if parent is None else self._extend(parent, "contexts")
            if resident is None and parent is not None and self._evict_for_fork(parent):
                resident = self._extend(parent, "contexts")
            if resident is None:
                resident = self.requests.begin(query.token_ids, query.adapter, pending.turn)
            self._wait_for(resident, pending)
            self._contexts.put(query, resident)
            self._workers.inputs.add(NewQuery(query.query_id, Outputs(query.outputs)))
        self._queries[query.query_id] = pending
        self.tokens_evaluated += len(query)

    def _wait_for(
        self, resident: ResidentRequest, pending: PendingQuery, place: int = 0
    ) -> None:
        """Record that a request computes a sequence."""
        pending.residents[place] = resident
        self._busy.setdefault(resident.name, []).append((pending, place))

    def _check(self, query: Query) -> None:
        """Raise the error of an invalid query for one sequence."""
        embeds_all = self._embedded_ids >= self._vocab_size
        check_query(
            query,
            embedding_rows=None if query.is_checked and embeds_all else self._embedded_ids,
            max_context=self.max_context,
            adapters=self._adapters.loaded,
            vocab_size=self._vocab_size,  # a worker that fails ends vLLM
        )

    def _extend(self, parent: Parent, kind: str) -> ResidentRequest | None:
        """Continue or fork a request; return None if the sequence needs a new request."""
        if max(parent.added, default=0) >= self._embedded_ids:
            return None  # `_check` raises its error
        resident = self.requests.extend(parent)
        if resident is parent.resident and parent.added:
            self._counts[f"{kind}_continued"] += 1
        return resident

    def _evict_for_fork(self, parent: Parent) -> bool:
        """End the oldest idle request if vLLM has no place for a fork.

        Returns:
            Whether a request was ended.
        """
        names = self.requests.by_name
        if len(names) < self.requests.places:
            return False
        idle = (name for name in names if name not in self._busy)
        oldest = next((name for name in idle if name != parent.resident.name), None)
        self._end([] if oldest is None else [oldest])
        return oldest is not None

    def _begin_scores(self, pending: PendingQuery, *, reads_cache: bool) -> None:
        query = pending.query
        assert isinstance(query, Query)  # noqa: S101 - populations have no targets
        first = query.first_target
        resident = self._fork_context(query, pending.turn, first) or self.requests.begin(
            query.token_ids, query.adapter, pending.turn, reads_cache=reads_cache
        )
        self._workers.inputs.add(
            NewQuery(
                query.query_id,
                Outputs(query.outputs),
                targets=query.targets,
                first=first,
                name=resident.name,
            )
        )
        self._wait_for(resident, pending)

    def _fork_context(self, query: Query, turn: int, shared: int) -> ResidentRequest | None:
        """Add a request that shares the first tokens of a context of the table.

        Args:
            query: Query for the sequence of the new request.
            turn: Turn of the new request.
            shared: Maximum number of shared tokens.

        Returns:
            The new request; None without such a context, or if it cannot be forked.
        """
        context = self._contexts.parent(query, shared + 1)
        if context is None:
            return None
        length = min(context.length, shared)
        added = list(query.sequence.ids_from(length))
        return self.requests.fork(Parent(context.resident, length, added), turn)

    def release(self, adapter: str | None, key: bytes) -> None:
        """Drop a context; its request ends unless it has others or a query needs it."""
        self._contexts.release((adapter, key))
        self.requests.end_dropped()

    # -- populations ------------------------------------------------------------------

    def submit_group(self, query: GroupQuery) -> None:
        """Continue, fork or begin the requests of the wanted sequences."""
        pending = PendingQuery(query, len(query.wanted), self.requests.turns.current)
        self._queries[query.query_id] = pending
        reduction = Outputs((query.reduction,))
        self._workers.inputs.add(
            NewQuery(query.query_id, reduction, query.row_of, len(query.wanted))
        )
        try:
            self._assign_requests(pending, query)
        except BaseException:
            self.abort(query.query_id)
            raise
        self.tokens_evaluated += len(query)

    def _assign_requests(self, pending: PendingQuery, query: GroupQuery) -> None:
        """Assign a request to every sequence; the requests of other members stay idle."""
        generation, lineage, wanted = query.generation, query.generation.lineage, query.wanted
        members = MemberRequests.of(generation)
        residents, lengths, *_ = members
        # Sequences without a request have the length 0, and need no tokens here.
        missing = np.where(lengths[wanted] > 0, lineage.lengths[wanted] - lengths[wanted], 0)
        parents = [
            None if resident is None else Parent(resident, length, added)
            for resident, length, added in zip(
                residents[wanted],
                lengths[wanted].tolist(),
                _tokens(lineage.last_tokens(wanted, missing)),
                strict=True,
            )
        ]
        members.count_query(wanted)
        generation.keep(members)
        # Ending unreferenced requests frees places for forks and new requests.
        self.requests.end_dropped()
        for place, (index, parent) in enumerate(zip(wanted.tolist(), parents, strict=True)):
            resident = None if parent is None else self._extend(parent, "members")
            residents[index] = resident
            if resident is None:
                self._unstarted.append((pending, place))
                continue
            if parent is not None and resident is not parent.resident:
                self._counts["members_forked"] += 1
            self._wait_for(resident, pending, place)
        lengths[wanted] = lineage.lengths[wanted]
        self._begin_members()

    def _begin_members(self) -> None:
        """Begin requests of members while vLLM has places; the other members wait."""
        while self._unstarted and len(self._busy) < self.requests.places:
            pending, place = self._unstarted.popleft()
            query: Any = pending.query
            generation, index = query.generation, int(query.wanted[place])
            sequence = generation.lineage.sequence(index)
            single = Query(query.query_id, sequence, query.adapter)
            try:
                self._check(single)
            except Exception as error:  # noqa: BLE001 - the error of this sequence only
                pending.fail(place, error)
                continue
            turn = pending.turn + place
            resident = self._fork_context(single, turn, len(single) - 1)
            if resident is None:
                resident = self.requests.begin(sequence.token_ids, query.adapter, turn)
                self._counts["members_begun"] += 1
            else:
                self._counts["members_forked"] += 1
            generation.state.states[index] = resident
            self._wait_for(resident, pending, place)

    def abort(self, query_id: int) -> None:
        """Drop a query and the requests that no other query needs; ignore an unknown query."""
        pending = self._queries.pop(query_id, None)
        if pending is None:
            return
        unneeded = []
        for resident in pending.residents:
            waiting = self._busy.get(resident.name) if resident is not None else None
            if resident is None or waiting is None:
                continue
            waiting[:] = [item for item in waiting if item[0] is not pending]
            if not waiting:
                del self._busy[resident.name]
                unneeded.append(resident.name)
        self._end(unneeded)
        self._unstarted = deque(item for item in self._unstarted if item[0] is not pending)
        self._workers.inputs.drop(query_id)

    # -- steps ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before a step of vLLM, begin waiting members, and end idle requests for new ones."""
        self.requests.end_dropped()
        self._begin_members()
        if (missing := -self.requests.free_places) > 0:
            self._end(self._idle[:missing])
        self._computed_before = self.requests.tokens_computed

    def collect(self) -> None:
        """Request the results of the sequences that a step computed."""
        computed: dict[PendingQuery, tuple[list[str], list[int]]] = {}
        for name in list(self._busy):
            request = self.requests.by_name[name]
            if (
                request.num_computed_tokens != request.num_tokens
                or request.num_in_flight_tokens
            ):
                if request.is_finished():
                    self._fail_ended(name)
                continue
            for pending, place in self._busy.pop(name):
                names, places = computed.setdefault(pending, ([], []))
                names.append(name)
                places.append(place)
        for pending in self._queries.values():
            if not pending.remaining and isinstance(pending.query, GroupQuery):
                computed.setdefault(pending, ([], []))  # its last sequences have failed
        for pending, (names, places) in computed.items():
            pending.remaining -= len(places)
            is_last = not pending.remaining
            part = ComputedPart(pending.query.query_id, names, places, is_last)
            self._workers.computed.append(part)

    def _fail_ended(self, name: str) -> None:
        """Fail the sequences of a request that vLLM ended before it was computed."""
        for pending, place in self._busy.pop(name):
            message = "vLLM ended the request before it was complete; see its log"
            pending.fail(place, EvaluationError(message))
        self._end([name])

    def finish(self, results: dict[int, Completion]) -> list[Completion]:
        """Return the completions of finished queries.

        Args:
            results: Results of the workers by query id.
        """
        for query_id, pending in self._queries.items():
            if pending.errors and isinstance(pending.query, Query):
                results[query_id] = Completion(query_id, error=pending.errors[0])
                self._workers.inputs.drop(query_id)
        completions, ended = [], []
        for query_id, completion in results.items():
            pending = self._queries[query_id]
            query = pending.query
            stays = self.keeps and self.requests.may_stay(query.adapter)
            failed = [] if completion.error is None else pending.residents
            if isinstance(completion.result, GroupResult):
                errors = completion.result.errors
                errors.update(pending.errors)
                failed = [pending.residents[place] for place in errors]
            elif isinstance(query, Query):
                stays = stays and not query.targets and len(query) < self.max_context
            # Forks of failed requests would copy their NaN.
            unneeded = failed if stays else pending.residents
            names = [resident.name for resident in unneeded if resident]
            ended += [name for name in names if name not in self._busy]
            if completion.result is None and completion.error is None:
                # The prefix cache had some of the scored positions, which were not computed.
                pending.remaining = 1
                self._begin_scores(pending, reads_cache=False)
                continue
            del self._queries[query_id]
            completions.append(completion)
        self._end(ended)
        return completions

    def evict_for_waiting(self) -> None:
        """After a step, end idle requests whose places or blocks waiting requests need.

        Otherwise, their callers could continue them before each step.
        """
        requests = self.requests
        waiting = requests.waiting + len(self._unstarted)
        if waiting <= 0:
            return
        self._end([name for name in requests.preempted() if name not in self._busy])
        idle = self._idle
        count = max(0, len(self._unstarted) - requests.free_places)
        has_run = requests.tokens_computed > self._computed_before
        if not count and (requests.lacks_blocks or not has_run):
            count = (len(idle) + 1) // 2 or 1
        if idle:
            self._end(idle[:count])
        elif count and not has_run:
            self._restart_forks(requests.stuck())

    @property
    def _idle(self) -> list[str]:
        """Names of the requests that no query needs, least recently used first."""
        return [name for name in self.requests.by_name if name not in self._busy]

    def _restart_forks(self, stuck: Sequence[str]) -> None:
        """Restart the younger half of the forks that wait for blocks, which frees theirs."""
        for name in stuck[len(stuck) // 2 :]:
            pending, place = self._busy[name][0]
            resident = pending.residents[place]
            assert resident is not None  # noqa: S101 - it computes this sequence
            self.requests.restart(resident)

    # -- room -------------------------------------------------------------------------

    @property
    def free_room(self) -> Room:
        """Room that no request has and no population in progress needs."""
        self.requests.end_dropped()
        members = (
            name
            for name, uses in self._busy.items()
            if any(isinstance(pending.query, GroupQuery) for pending, _ in uses)
        )
        return self.requests.free_room(members)

    def make_room(self, room: Room, names: Iterable[str], *, partly: bool = False) -> set[str]:
        """End the idle ones of some requests, in order, until there is room.

        Args:
            room: Room that is needed.
            names: Names of requests.
            partly: Whether to end them also if there is too little room without them.

        Returns:
            Names of the ended requests.
        """
        idle = [
            name for name in names if name in self.requests.by_name and name not in self._busy
        ]
        count = self.requests.count_to_end(idle, room - self.free_room)
        ended = [] if count is None and not partly else idle[:count]
        self._end(ended)
        return set(ended)

    # -- ends -------------------------------------------------------------------------

    def drop_all(self) -> list[int]:
        """Drop all queries and return their ids; their requests become idle."""
        dropped = list(self._queries)
        for query_id in dropped:
            self._workers.inputs.drop(query_id)
        self._queries.clear()
        self._unstarted.clear()
        self._busy.clear()
        return dropped

    def end_idle(self, adapter: str | None = None) -> None:
        """End the idle requests of one adapter, or all idle requests."""
        lora = self._adapters.request(adapter)
        idle = [
            name
            for name, request in self.requests.by_name.items()
            if name not in self._busy and (adapter is None or request.lora_request is lora)
        ]
        self._end(idle)

    def end_excess_idle(self) -> None:
        """After an adapter was loaded, end the idle requests that may no longer stay."""
        for adapter in self._adapters.names:
            if not self.requests.may_stay(adapter):
                self.end_idle(adapter)

    def _end(self, names: Sequence[str]) -> None:
        if names:
            self._contexts.remove(names)
            self.requests.end(names)


def _tokens(suffixes: Integers64) -> list[list[int]]:
    """Return the token ids of each row without the padding -1."""
    rows: list[list[int]] = suffixes.tolist()
    if suffixes.size and int(suffixes.min()) < 0:
        return [[token_id for token_id in row if token_id >= 0] for row in rows]
    return rows
