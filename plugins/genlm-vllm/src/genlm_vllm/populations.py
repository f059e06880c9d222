"""`RunningPopulations`: the queries of populations on requests that stay in vLLM.

The handle of a member is its living request. The first child of a request continues it, further
children are forks, and requests without references end. A query is complete when all its
sequences are computed; rows are reduced directly from the logits of vLLM's batches.

    population      generation.state          vLLM's running list
    member 0, 2 ->  place 0: LivingRequest -> request, blocks 4 9
    member 1    ->  place 1: LivingRequest -> request, blocks 4 7
                    place 2: None             (restarted on demand)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from genlm.plugin import (
    Completion,
    Generation,
    GroupQuery,
    GroupValues,
    GroupWork,
    Query,
    TokenIdError,
    Vocabulary,
)
from genlm_vllm.adapters import Adapters
from genlm_vllm.row_buffer import device_index, without_frames
from genlm_vllm.running_requests import LivingRequest, RunningRequests

__all__ = ["RunningPopulations"]

_GATHERED = 2**22
"""Maximum number of logits that are gathered at once from a batch with other rows."""


class _Kept:
    """State of a generation: the living request of each sequence that has one."""

    __slots__ = ("adapter", "livings")

    def __init__(self, adapter: str | None, count: int) -> None:
        self.adapter = adapter
        self.livings: list[LivingRequest | None] = [None] * count


class _Group:
    """A query, the requests that compute its sequences, and their results.

    Attributes:
        work: Reduces the rows.
        livings: The request of each sequence, by its place in `wanted`.
        left: Number of sequences that are neither computed nor failed.
    """

    __slots__ = ("left", "livings", "query", "work")

    def __init__(self, query: GroupQuery, vocabulary: Vocabulary) -> None:
        self.query = query
        self.work = GroupWork(query, vocabulary)
        self.livings: list[LivingRequest | None] = [None] * len(query.wanted)
        self.left = len(query.wanted)

    def fail(self, places: Sequence[int], error: Exception) -> None:
        """Record the error of some sequences."""
        self.work.errors.update(dict.fromkeys(places, without_frames(error)))
        self.left -= len(places)


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
        if parent is None or not self._requests.is_alive(parent):
            self.begun.append(place)
        elif parent.request.num_computed_tokens != length:
            if not new and parent.length == length:  # another query waits for the same row
                self._group.livings[place] = parent
            else:
                self.begun.append(place)
        elif len(new) == 1 and parent.length == length:
            parent.length += 1  # further children of it are forks
            self.fed.append((place, parent, new[0]))
        elif new:
            self.forked.append((place, parent, length, new))
        else:  # the row is not stored: its last token is computed again
            last = [int(parent.request.all_token_ids[length - 1])]
            self.forked.append((place, parent, length - 1, last))


class RunningPopulations:
    """Computes group queries with resident requests.

    Args:
        engine: The `vllm.LLMEngine`, for which `running_requests.obstacle` returns None.
        adapters: The loaded adapters.
        vocabulary: Vocabulary of the rows.
        check: Raises the error of a query for one sequence.
        embedded_ids: Number of ids that the model embeds.

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
        vocabulary: Vocabulary,
        check: Callable[[Query], None],
        embedded_ids: int,
    ) -> None:
        self._adapters = adapters
        self._requests = RunningRequests(engine, adapters, self._receive)
        self._vocabulary = vocabulary
        self._check = check
        self._embedded_ids = embedded_ids
        self._groups: dict[int, _Group] = {}
        # The sequences that a request computes now, by its id: groups and places in them.
        self._busy: dict[str, list[tuple[_Group, int]]] = {}
        self._to_begin: deque[tuple[_Group, int]] = deque()
        self._has_run = False
        self.keeps = True
        self.tokens_evaluated = self.tokens_computed = 0
        self._continued = self._forked = self._begun = 0

    def close(self) -> None:
        """Undo the changes in vLLM."""
        self._requests.close()

    def statistics(self) -> dict[str, int]:
        """Return the counters; from any thread."""
        return {
            "members_living": len(self._requests.living),
            "members_continued": self._continued,
            "members_forked": self._forked,
            "members_begun": self._begun,
        }

    @property
    def unanswered(self) -> int:
        """Number of unanswered queries."""
        return len(self._groups)

    @property
    def resting(self) -> int:
        """Number of living requests that compute nothing."""
        return len(self._requests.living) - len(self._busy)

    @property
    def living(self) -> int:
        """Number of living requests."""
        return len(self._requests.living)

    # -- queries ----------------------------------------------------------------------

    def submit(self, query: GroupQuery) -> None:
        """Continue, fork or begin the requests of the sequences that are wanted."""
        group = _Group(query, self._vocabulary)
        plan = self._planned(group)
        # Requests to which no population refers make room for forks and new ones.
        self._requests.end_dropped()
        self._groups[query.query_id] = group
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
                if place not in group.work.errors:
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
                group.fail([place], error)

    def _start(self, group: _Group, plan: _Plan) -> None:
        """Execute the assignments and record which queries wait for which requests."""
        requests, livings, query = self._requests, group.livings, group.query
        for place, parent, length, new in plan.forked:
            livings[place] = child = requests.fork(parent, length, new)
            self._forked += child.added is not None
            self._begun += child.added is None
        for place, living, _ in plan.fed:
            living.length -= 1  # `feed` counts it
            livings[place] = living
        requests.feed([each for _, each, _ in plan.fed], [token for *_, token in plan.fed])
        self._continued += len(plan.fed)
        kept = query.generation.state.livings
        for place, (at, each) in enumerate(zip(query.wanted.tolist(), livings, strict=True)):
            kept[at] = each
            if each is not None:
                self._busy.setdefault(each.name, []).append((group, place))
        self._to_begin += ((group, place) for place in plan.begun)
        self._begin_some()

    def _begin_some(self) -> None:
        """Begin requests, at most as many as vLLM computes at once; the rest wait."""
        while self._to_begin and len(self._busy) < self._requests.places:
            group, place = self._to_begin.popleft()
            query = group.query
            at = int(query.wanted[place])
            sequence = query.generation.lineage.sequence(at)
            try:
                self._check(Query(query.query_id, sequence, query.adapter))
            except Exception as error:  # noqa: BLE001 - it fails this sequence alone
                group.fail([place], error)
                continue
            living = self._requests.begin(sequence.token_ids, query.adapter)
            group.livings[place] = query.generation.state.livings[at] = living
            self._busy[living.name] = [(group, place)]
            self._begun += 1

    def abort(self, query_id: int) -> bool:
        """Drop a query and end the requests of it alone; return False for an unknown query."""
        group = self._groups.pop(query_id, None)
        if group is None:
            return False
        alone = []
        for living in group.livings:
            waiting = self._busy.get(living.name) if living is not None else None
            if living is None or waiting is None:
                continue
            waiting[:] = [each for each in waiting if each[0] is not group]
            if not waiting:
                del self._busy[living.name]
                alone.append(living.name)
        self._to_begin = deque(each for each in self._to_begin if each[0] is not group)
        self._requests.end(alone)
        return True

    # -- steps ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before a step of vLLM, end unreferenced requests and begin waiting ones."""
        self._has_run = False
        self._requests.end_dropped()
        self._begin_some()

    def _receive(self, logits: torch.Tensor, names: Sequence[str]) -> list[int]:
        """Reduce the rows of members whose tokens are all computed; never raises.

        Returns:
            The rows of all members, of which vLLM samples nothing.
        """
        self._has_run = True
        living = self._requests.living
        if not living:
            return []
        own: list[int] = []
        found: dict[_Group, tuple[list[int], list[int]]] = {}
        for row, name in enumerate(names):
            request = living.get(name)
            if request is None:
                continue
            own.append(row)
            if request.num_computed_tokens != request.num_tokens:  # a chunk of a prompt
                continue
            for group, place in self._busy.pop(name, ()):
                rows, places = found.setdefault(group, ([], []))
                rows.append(row)
                places.append(place)
        for group, (rows, places) in found.items():
            self._reduce(group, logits, rows, places)
        return own

    def _reduce(
        self, group: _Group, logits: torch.Tensor, rows: list[int], places: list[int]
    ) -> None:
        self.tokens_computed += sum(
            living.computed for place in places if (living := group.livings[place])
        )
        group.left -= len(places)
        done = 0
        try:
            # vLLM computes in inference mode, whose tensors cannot be changed outside.
            with torch.inference_mode(False), torch.no_grad():
                for part, chosen in _parts(logits, rows):
                    at = np.array(places[done : done + len(part)])
                    group.work.reduce(at, GroupValues(part, are_logits=True))
                    done += len(chosen)
        except Exception as error:  # noqa: BLE001 - out of memory, for one; vLLM goes on
            failed = dict.fromkeys(places[done:], without_frames(error))
            group.work.errors.update(failed)

    def collect(self) -> list[Completion]:
        """Return the queries that a step completed."""
        complete = [group for group in self._groups.values() if not group.left]
        completions = []
        for group in complete:
            query = group.query
            del self._groups[query.query_id]
            result = group.work.result()
            _share_with_callers(result.columns)
            completions.append(Completion(query.query_id, result))
            if not (self.keeps and self._requests.may_stay(query.adapter)):
                self._requests.end([each.name for each in group.livings if each])
        return completions

    def relieve(self, end_others: Callable[[int], bool]) -> None:
        """After a step, end resting requests that block waiting ones.

        Args:
            end_others: Ends up to that many other resting requests; returns whether any ended.
        """
        requests = self._requests
        waiting = requests.waiting + len(self._to_begin)
        if waiting <= 0:
            return
        requests.end([name for name in requests.preempted() if name not in self._busy])
        resting = [name for name in requests.living if name not in self._busy]
        count = max(0, waiting - requests.free_places)
        if not count and (requests.lacks_blocks or not self._has_run):
            count = (len(resting) + 1) // 2 or 1
        if resting:
            requests.end(resting[:count])
        elif count and not end_others(count) and not self._has_run:
            self._begin_again(requests.stuck())

    def _begin_again(self, stuck: Sequence[str]) -> None:
        """Free the blocks of forks that wait for further blocks."""
        for name in stuck[len(stuck) // 2 :]:
            waiting = self._busy.pop(name)
            group, place = waiting[0]
            living = group.livings[place]
            assert living is not None  # noqa: S101 - it computes the place
            self._requests.begin_again(living)
            self._busy[living.name] = waiting

    # -- ends -------------------------------------------------------------------------

    def drop_all(self) -> list[int]:
        """Drop all queries, leaving their requests at rest; return the query ids."""
        dropped = list(self._groups)
        self._groups.clear()
        self._to_begin.clear()
        self._busy.clear()
        return dropped

    def end_resting(self, adapter: str | None = None) -> None:
        """End the resting requests of one adapter or of all."""
        requests = self._requests
        names = requests.living if adapter is None else requests.names_of(adapter)
        requests.end([name for name in names if name not in self._busy])

    def end_too_many(self) -> None:
        """After an adapter is loaded, end requests that may no longer rest."""
        for adapter in self._adapters.names:
            if not self._requests.may_stay(adapter):
                self.end_resting(adapter)


def _tokens(suffixes: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return the token ids of each row, without -1."""
    found: list[list[int]] = suffixes.tolist()
    if suffixes.size and int(suffixes.min()) < 0:
        return [[each for each in row if each >= 0] for row in found]
    return found


def _parts(
    logits: torch.Tensor, rows: list[int]
) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
    """Yield some rows of logits: without a copy if they are consecutive, else in parts."""
    first, count = rows[0], len(rows)
    if rows[-1] - first == count - 1:
        yield logits[first : first + count], rows
        return
    size = max(1, _GATHERED // logits.shape[1])
    index = device_index(rows, logits.device)
    for begin in range(0, count, size):
        yield logits[index[begin : begin + size]], rows[begin : begin + size]


def _share_with_callers(columns: Sequence[torch.Tensor]) -> None:
    """Have the default stream, on which callers read columns, wait for vLLM's stream."""
    for column in columns:
        if column.is_cuda:
            default = torch.cuda.default_stream(column.device)
            default.wait_stream(torch.cuda.current_stream(column.device))
            column.record_stream(default)
