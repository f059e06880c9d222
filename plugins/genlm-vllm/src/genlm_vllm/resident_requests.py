"""`ResidentRequests`: row queries as requests that stay in vLLM between steps.

vLLM never ends or preempts a parked request, which counts as running and holds KV blocks. Only
this module ends them, so it always knows which ones can be continued: those that nobody used
for the longest time end when requests need their places or their blocks. By its
rules nobody waits for ever:

- Idle residents take only places that no unanswered request needs.
- While a request waits and the KV cache has no room for it, the older half of them ends after
  each step.
- When vLLM runs nothing although requests are unanswered, the older half of them ends; when
  none is left, the younger half of the residents that wait to be continued begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from genlm.plugin import Completion, EvaluationError, Query
from genlm_vllm.adapters import Adapters
from genlm_vllm.core_requests import CoreRequests, Load
from genlm_vllm.forks import Fork
from genlm_vllm.populations import RunningPopulations
from genlm_vllm.requests import (
    LocalRows,
    Request,
    Result,
    capture_row,
    completion,
    params_of,
)
from genlm_vllm.residents import MOST_ADDED, Parent, Resident, ResidentTable

__all__ = ["Answered", "ResidentRequests"]

_STALLED_STEPS = 2
"""Steps without a running request after which residents end."""

_LOST_STEPS = 1000
"""Steps without a running request, with nothing left to end, after which requests fail."""


class Answered(NamedTuple):
    """A query that vLLM has computed or dropped.

    Attributes:
        query: The query.
        key: The key of its row.
        computed: Tokens that the model computed for it.
        error: Why it has no row.
    """

    query: Query
    key: int
    computed: int = 0
    error: EvaluationError | None = None

    def completion(self, result: Result | None) -> Completion:
        """Make the completion from the result that was fetched."""
        return completion(self.query, result if self.error is None else self.error)


class ResidentRequests:
    """Begins, continues and ends the requests of row queries.

    Args:
        core: Sends the requests.
        adapters: The loaded adapters.
        rows: Is told which rows nobody will fetch.
        others: Unanswered requests of vLLM that are not residents, by any name.
        numbers: Ascending; names and row keys of requests.
        max_context: Most tokens of a query.
        embedded_ids: Number of ids that the model embeds.
        forks: Whether the workers copy KV blocks of forked requests.
        populations: Whose requests also stay in vLLM; None if there are none.
    """

    def __init__(
        self,
        core: CoreRequests,
        *,
        adapters: Adapters,
        rows: LocalRows,
        others: Mapping[str, Request],
        numbers: Iterator[int],
        max_context: int,
        embedded_ids: int,
        forks: bool,
        populations: RunningPopulations | None,
    ) -> None:
        self._core = core
        self._adapters = adapters
        self._rows = rows
        self._others = others
        self._numbers = numbers
        self._max_context = max_context
        self._embedded_ids = embedded_ids
        self._forks = forks
        self._populations = populations
        self._table = ResidentTable()
        # To be sent, by query id, with what the query continued when it came.
        self._pending: dict[int, tuple[Query, Parent | None]] = {}
        self._ending: list[str] = []  # names of idle residents that were ended
        self._stalls = 0
        self._continued = self._ended = 0

    def statistics(self) -> dict[str, int]:
        """Return the counters; from any thread."""
        return {
            "contexts_resident": len(self._table),
            "contexts_continued": self._continued,
            "contexts_ended": self._ended,
        }

    def close(self) -> None:
        """Take back what was changed in vLLM."""
        self._core.close()

    @property
    def unanswered(self) -> int:
        """Number of unanswered queries."""
        return len(self._pending) + self._table.busy

    def queries(self) -> list[Query]:
        """Return the unanswered queries."""
        return [query for query, _ in self._pending.values()] + list(self._table.unanswered())

    def accept(self, query: Query) -> bool:
        """Accept a query for the next `send` if only its last tokens need a check.

        Returns:
            False: it continues no context of a resident, or the last tokens are invalid.
        """
        try:
            parent = self._table.parent(query)
        except OverflowError:  # ids that no sequence can have
            return False
        if parent is None or max(parent.added) >= self._embedded_ids:
            return False
        if len(query) > self._max_context:
            return False
        self._pending[query.query_id] = query, parent
        return True

    def accept_checked(self, query: Query) -> None:
        """Accept a checked query for the next `send`."""
        self._pending[query.query_id] = query, None

    def abort(self, query_id: int) -> bool:
        """Drop a query and the resident that computes it; False if there is none."""
        if self._pending.pop(query_id, None) is not None:
            return True
        resident = self._table.end_query(query_id)
        if resident is None:
            return False
        self._end([resident])
        self._send_ends()
        self._rows.abandon(resident.number)
        return True

    def send(self) -> list[Completion]:
        """Send the accepted queries to vLLM; return the errors of those that it refuses.

        First those that continue residents: new requests may then end the others.
        """
        begun: list[tuple[Query, Fork | None]] = []
        while self._pending:
            query, parent = self._pending.pop(next(iter(self._pending)))
            resumes = parent is not None and self._table.can_resume(parent)
            if not resumes:  # others may have come, or gone
                parent = self._table.parent(query)
                resumes = parent is not None and self._table.can_resume(parent)
            if parent is not None and resumes:
                resident = parent.resident
                self._table.resume(parent, query)
                asked = capture_row(resident.number, query, self._rows)
                self._core.extend(resident.request, parent.added, asked)
                self._continued += 1
            else:
                begun.append((query, self._fork(parent)))
        self._make_room(len(begun))
        self._send_ends()
        return [error for each in begun if (error := self._begin(*each)) is not None]

    def _fork(self, parent: Parent | None) -> Fork | None:
        # An aborted request that vLLM sees again after its end has `MOST_ADDED` tokens at most.
        if parent is None or not self._forks or parent.length <= MOST_ADDED:
            return None
        return Fork(parent.resident.name, parent.length)

    def _begin(self, query: Query, fork: Fork | None) -> Completion | None:
        request = Request(query, next(self._numbers))
        lora_request = self._adapters.request(query.adapter)
        try:
            core_request = self._core.new(
                request.number,
                query.token_ids,
                params_of(request, self._rows, fork),
                lora_request,
            )
        except Exception as error:  # noqa: BLE001 - it fails this query alone
            return Completion(query.query_id, error=error)
        resident = Resident(core_request.request_id, request.number, core_request, query)
        self._table.begin(resident)
        self._core.send(core_request)
        return None

    def collect(self) -> list[Answered]:
        """Return what the last step answered; its rows must be fetched before the next.

        The residents stay unless they cannot be continued.
        """
        answered: list[Answered] = []
        ends: list[Resident] = []
        for output in self._core.take():
            resident = self._table.answered(output.name)
            if resident is None:
                continue
            query, length = resident.query, len(resident.query)
            if output.reason is not None:
                self._table.end(resident)
                answered.append(Answered(query, resident.number, error=_dropped(output.reason)))
                continue
            computed = length - output.cached if resident.added is None else resident.added
            answered.append(Answered(query, resident.number, computed))
            if length < self._max_context and self._core.can_continue(length):
                other = self._table.rest(resident)
                ends += [] if other is None else [other]
            else:
                self._table.end(resident)
                ends.append(resident)
        self._end(ends)
        return answered

    def _make_room(self, new: int = 0) -> None:
        """End idle residents in places that unanswered and new requests need."""
        room = self._core.slots - self._table.busy - len(self._others) - new
        if self._populations is not None:
            room -= self._populations.living
        self._end(self._table.end_oldest(self._table.idle - max(0, room)))

    def relieve(self) -> list[Completion]:
        """End residents in the way of requests that wait, after a step.

        Returns:
            Errors of queries that vLLM lost.
        """
        self._make_room()
        load = self._core.load()
        if load is not None and self._populations is not None:
            load = load._replace(running=load.running - self._populations.resting)
        if load is None or self._table.busy + len(self._others) <= load.running:
            self._stalls = 0
        else:
            self._end_for_waiting(load)
        self._send_ends()
        return self._fail_lost() if self._stalls >= _LOST_STEPS else []

    def _end_for_waiting(self, load: Load) -> None:
        if load.running or self._core.progressed:
            self._stalls = 0
        elif load.is_settled:
            self._stalls += 1
        stalled = self._stalls >= _STALLED_STEPS
        if self._table.idle:
            if stalled or load.free_tokens < 2 * self._longest_wait():
                self._end(self._table.end_oldest((self._table.idle + 1) // 2))
        elif stalled:
            for resident in self._table.end_youngest_resumed():
                self._end([resident])
                self._rows.abandon(resident.number)
                self.accept_checked(resident.query)

    def _longest_wait(self) -> int:
        """Most tokens of an unanswered request, what it may draw included."""
        lengths = [len(query) for query in self._table.unanswered()]
        for other in self._others.values():
            sampling = other.query.sampling
            lengths.append(len(other.query) + (sampling.max_tokens if sampling else 0))
        return min(max(lengths, default=0), self._max_context)

    def _fail_lost(self) -> list[Completion]:
        """Fail the queries that vLLM no longer has, which would wait for ever."""
        error = "vLLM lost the request; this is a defect of genlm-vllm or vLLM"
        lost = list(self._table.unanswered())
        for query in lost:
            self.abort(query.query_id)
        return [Completion(query.query_id, error=EvaluationError(error)) for query in lost]

    # -- ends -------------------------------------------------------------------------

    def release(self, adapter: str | None, key: bytes) -> None:
        """End the idle resident of a context, if there is one."""
        resident = self._table.end_context(adapter, key)
        if resident is not None:
            self._end([resident])

    def end_idle(self) -> None:
        """End all idle residents."""
        self._end(self._table.end_idle())
        self._send_ends()

    def end_oldest(self, count: int) -> bool:
        """End up to so many idle residents; return whether there were any."""
        ended = self._table.end_oldest(count)
        self._end(ended)
        self._send_ends()
        return bool(ended)

    def end_adapter(self, name: str) -> None:
        """End the idle residents of an adapter."""
        self._end(self._table.end_idle(lambda resident: resident.query.adapter == name))
        self._send_ends()

    def _end(self, residents: Sequence[Resident]) -> None:
        self._ended += len(residents)
        self._ending += [resident.name for resident in residents]

    def _send_ends(self) -> None:
        """Have vLLM end what was ended here: together, as each of its calls costs much."""
        if self._ending:
            names, self._ending = self._ending, []
            self._core.end(names)


def _dropped(reason: str) -> EvaluationError:
    return EvaluationError(
        f"vLLM ended the request with {reason!r} before it was complete; see its log"
    )
