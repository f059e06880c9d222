"""`Residents`: computes queries with requests that stay in vLLM.

Queries for one sequence begin when they are submitted, populations when vLLM has room for them
(`WaitingGroups`).

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
from typing import Any

import numpy as np

from genlm.plugin import (
    Completion,
    Count,
    EvaluationError,
    GroupQuery,
    GroupResult,
    Query,
    check_query,
)
from genlm_vllm.adapters import Adapters
from genlm_vllm.contexts import ContextTable
from genlm_vllm.idle_requests import IdleRequests
from genlm_vllm.member_requests import MemberRequests, RecentGenerations
from genlm_vllm.messages import ComputedPart, NewQuery, Outputs
from genlm_vllm.pending_query import PendingQuery
from genlm_vllm.running_requests import (
    Integers64,
    Parent,
    ResidentRequest,
    RunningRequests,
)
from genlm_vllm.waiting_groups import WaitingGroups
from genlm_vllm.workers import Workers


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
        idle: Those that no query in progress needs.
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
        self._unstarted: deque[tuple[PendingQuery, int]] = deque()
        self._contexts = ContextTable()
        self._generations = RecentGenerations(self.requests.block_size)
        self.idle = IdleRequests(self.requests, self._contexts, adapters)
        self._busy = self.idle.busy
        self._waiting = WaitingGroups(self.requests, self.idle, self._queries)
        self.keeps = True
        self.tokens_evaluated = 0
        self._counts = dict.fromkeys(
            (
                "contexts_continued",
                *("members_continued", "members_forked", "members_begun"),
            ),
            0,
        )

    def statistics(self) -> dict[str, int]:
        """Return counts and sizes. May be called from any thread."""
        contexts = len(self._contexts)
        return {
            "contexts_resident": contexts,
            "contexts_ended": Count(self._contexts.removed),
            "members_living": max(0, len(self.requests.by_name) - contexts),
            **{name: Count(number) for name, number in self._counts.items()},
        }

    @property
    def unanswered(self) -> int:
        """Number of unanswered queries."""
        return len(self._queries) + len(self._waiting)

    @property
    def is_deferring(self) -> bool:
        """Whether the next step should wait for further requests; see `BatchEngine.defers`."""
        return bool(self._waiting) and not self._queries and self._waiting.lacks_room

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
            if parent and resident is None and self.idle.make_place(parent.resident):
                resident = self._extend(parent, "contexts")
            if resident is None:
                resident = self._fork(query, pending.turn, len(query) - 1)
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

    def _begin_scores(self, pending: PendingQuery, *, reads_cache: bool) -> None:
        query = pending.query
        assert isinstance(query, Query)  # noqa: S101 - populations have no targets
        first = query.first_target
        resident = self._fork(query, pending.turn, first) or self.requests.begin(
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

    def _fork(self, query: Query, turn: int, shared: int) -> ResidentRequest | None:
        """Add a request that shares the first tokens of a context or of a population.

        Args:
            query: Query for the sequence of the new request.
            turn: Turn of the new request.
            shared: Maximum number of shared tokens.

        Returns:
            The new request; None if no request has these tokens, or if it cannot be forked.
        """
        parent = self._contexts.parent(query, shared + 1)
        parent = parent or self._generations.parent(query, shared + 1)
        if parent is None:
            return None
        length = min(parent.length, shared)
        added = list(query.sequence.ids_from(length))
        return self.requests.fork(Parent(parent.resident, length, added), turn)

    def release(self, adapter: str | None, key: bytes) -> None:
        """Drop a context; its request ends unless it has others or a query needs it."""
        self._contexts.release((adapter, key))
        self.requests.end_dropped()

    # -- populations ------------------------------------------------------------------

    def submit_group(self, query: GroupQuery) -> None:
        """Accept a query, which begins before a step for which vLLM has room."""
        self._waiting.add(query)

    def _begin_group(self, query: GroupQuery) -> None:
        """Continue, fork or begin requests of the wanted sequences; others stay idle."""
        generation, wanted = query.generation, query.wanted
        pending = PendingQuery(query, len(wanted), self.requests.turns.current)
        self._queries[query.query_id] = pending
        reduction = Outputs((query.reduction,))
        self._workers.inputs.add(NewQuery(query.query_id, reduction, query.row_of, len(wanted)))
        members = MemberRequests.of(generation)
        residents, lengths, *_ = members
        parents = self._parents(query, members)
        members.count_query(wanted)
        generation.keep(members)
        self._generations.add(generation)
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
        lengths[wanted] = generation.lineage.lengths[wanted]
        self._begin_members()
        self.tokens_evaluated += len(query)

    def _parents(self, query: GroupQuery, members: MemberRequests) -> list[Parent | None]:
        """Return the request that each sequence extends; None where it needs a new one."""
        lineage, wanted = query.generation.lineage, query.wanted
        lengths = members.lengths[wanted]
        # Sequences without a request have the length 0, and need no tokens here.
        missing = np.where(lengths > 0, lineage.lengths[wanted] - lengths, 0)
        columns = (
            wanted.tolist(),
            members.states[wanted],
            lengths.tolist(),
            _tokens(lineage.last_tokens(wanted, missing)),
        )
        parents: list[Parent | None] = []
        for index, resident, length, added in zip(*columns, strict=True):
            parent = None if resident is None else Parent(resident, length, added)
            if parent is not None and len(added) > 1:
                single = _single_query(query, index)
                other = self._generations.parent(single, len(single))
                if other is not None and other.length > length:
                    parent = other
            parents.append(parent)
        return parents

    def _begin_members(self) -> None:
        """Begin requests of members while vLLM has places; the other members wait."""
        while self._unstarted and len(self._busy) < self.requests.places:
            pending, place = self._unstarted.popleft()
            try:
                self._begin_member(pending, place)
            except Exception as error:  # noqa: BLE001 - the error of this sequence only
                pending.fail(place, error)

    def _begin_member(self, pending: PendingQuery, place: int) -> None:
        """Fork or begin the request of one member."""
        query: Any = pending.query
        index = int(query.wanted[place])
        single = _single_query(query, index)
        self._check(single)
        turn = pending.turn + place
        resident = self._fork(single, turn, len(single) - 1)
        if resident is None:
            resident = self.requests.begin(single.token_ids, query.adapter, turn)
            self._counts["members_begun"] += 1
        else:
            self._counts["members_forked"] += 1
        query.generation.state.states[index] = resident
        self._wait_for(resident, pending, place)

    def abort(self, query_id: int) -> None:
        """Drop a query and the requests that no other query needs; ignore an unknown query."""
        self._waiting.drop(query_id)
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
        self.idle.end(unneeded)
        self._unstarted = deque(item for item in self._unstarted if item[0] is not pending)
        self._workers.inputs.drop(query_id)

    def abort_all(self) -> list[int]:
        """Drop all queries and return their ids."""
        query_ids = [*self._queries, *self._waiting.query_ids]
        for query_id in query_ids:
            self.abort(query_id)
        return query_ids

    # -- steps ------------------------------------------------------------------------

    def prepare(self) -> list[Completion]:
        """Before a step of vLLM, begin what there is room for, and send the workers its inputs.

        Returns:
            Completions of populations that failed to begin. The step is then not prepared.
        """
        failed = []
        for query in self._waiting.take():
            try:
                self._begin_group(query)
            except Exception as error:  # noqa: BLE001 - it fails this query alone
                self.abort(query.query_id)
                failed.append(Completion(query.query_id, error=error))
        if failed:
            return failed
        self.requests.end_dropped()
        self._begin_members()
        self.idle.before_step()
        self._workers.prepare()
        return []

    def collect(self) -> list[Completion]:
        """Return the completions of the queries that a step finished."""
        return self._finish(self._workers.collect(self._computed_parts()))

    def _computed_parts(self) -> list[ComputedPart]:
        """Return the sequences of each query that a step computed."""
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
        parts = []
        for pending, (names, places) in computed.items():
            pending.remaining -= len(places)
            is_last = not pending.remaining
            parts.append(ComputedPart(pending.query.query_id, names, places, is_last))
        return parts

    def _fail_ended(self, name: str) -> None:
        """Fail the sequences of a request that vLLM ended before it was computed."""
        for pending, place in self._busy.pop(name):
            message = "vLLM ended the request before it was complete; see its log"
            pending.fail(place, EvaluationError(message))
        self.idle.end([name])

    def _finish(self, results: dict[int, Completion]) -> list[Completion]:
        """Return the completions of finished queries, and make room for waiting requests.

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
        self.idle.end(ended)
        self.idle.after_step(len(self._unstarted))
        return completions


def _single_query(group: GroupQuery, index: int) -> Query:
    """Return a query for one sequence of a group's generation."""
    return Query(group.query_id, group.generation.lineage.sequence(index), group.adapter)


def _tokens(suffixes: Integers64) -> list[list[int]]:
    """Return the token ids of each row without the padding -1."""
    rows: list[list[int]] = suffixes.tolist()
    if suffixes.size and int(suffixes.min()) < 0:
        return [[token_id for token_id in row if token_id >= 0] for row in rows]
    return rows
