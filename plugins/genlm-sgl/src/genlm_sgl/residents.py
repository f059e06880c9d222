"""`Residents`: contexts whose requests stay in SGLang after their rows were returned.

A request that stays (a resident) keeps its slots of the KV cache. A query for its context and
one more token continues it, at the cost of one row of a decode batch, whatever the context's
length. Any other query is a new request; what it has in common with a resident is first shared
with it through the radix cache.

A resident is in one of these states:

- waiting: SGLang has yet to compute its context, at first or after a retraction;
- ready: its next token is in place, but was not passed to SGLang;
- running: in SGLang's decode batch, with that token;
- idle: its row was returned, and it is paused: in none of SGLang's batches.

Idle residents end, the least recently used first, where other requests need their room. Nothing
here depends on SGLang's code, which `resident_api` calls. Longer than other modules because
every method moves residents between the same tables.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from genlm.plugin import Completion, Query
from genlm_sgl.requests import Requests
from genlm_sgl.resident_api import ResidentApi
from genlm_sgl.scheduler_api import Iteration

__all__ = ["Residents"]

_REACH = 8
"""Maximum number of tokens that a query may add to a resident's context to share it."""

_HISTORY = 8
"""Number of earlier contexts by which a resident is indexed, for later siblings."""

Key = tuple[str | None, bytes]
"""Adapter and key of the token ids."""


@dataclass(eq=False, slots=True)
class Resident:
    """A request that stays.

    Attributes:
        rid: Its id.
        req: SGLang's request.
        keys: The contexts that its slots of the KV cache hold, the newest last: the one whose
            row was returned, or is being computed.
        paused: Whether the request is in none of SGLang's batches.
        leaving: Whether the request ends after the next iteration, unless continued.
    """

    rid: str
    req: Any
    keys: deque[Key]
    paused: bool = False
    leaving: bool = False


class Residents:
    """The requests that stay in one engine.

    Args:
        api: SGLang's calls for resident requests.
        requests: The engine's queries.
        enqueue: Creates a new request for a query.

    Attributes:
        free_tables: Function that frees slots of populations; returns False if there are none.
        slots_in_tables: Function that returns the number of these slots.
        continued: Number of queries that continued a resident.
        ended: Number of residents that were ended, to make room or because their context was
            released.
    """

    def __init__(
        self, api: ResidentApi, requests: Requests, enqueue: Callable[[Query], None]
    ) -> None:
        self._api = api
        self._requests = requests
        self._enqueue = enqueue
        self._by_rid: dict[str, Resident] = {}
        self._idle: OrderedDict[Key, Resident] = OrderedDict()  # least recently used first
        self._earlier: dict[Key, Resident] = {}  # by the contexts before the current one
        self._pinned: dict[Key, Resident] = {}  # idle, in use by populations
        self._ready: dict[str, Resident] = {}  # oldest query first
        self._running: dict[str, Resident] = {}
        self._leaving: dict[str, Resident] = {}
        self._adapters_limited = False
        self._queued = 0
        self._starved = 0  # iterations in a row that let no request in from the queue
        self._passed_over = False
        self._deferred = False
        self._progressed = True
        self.free_tables: Callable[[], bool] = lambda: False
        self.slots_in_tables: Callable[[], int] = lambda: 0
        self.continued = self.ended = 0

    def __len__(self) -> int:
        return len(self._by_rid) - len(self._leaving)

    @property
    def hold_slots(self) -> bool:
        """Whether any resident holds slots of the KV cache."""
        return bool(self._by_rid)

    # -- queries ----------------------------------------------------------------------

    def extend(self, query: Query, token_id: int) -> bool:
        """Continue a resident with the last token of a query; False without a match.

        Args:
            query: A query for a row, of two tokens at least.
            token_id: Its last token, which the model embeds.
        """
        sequence = query.sequence
        parent = (query.adapter, sequence.prefix_key(len(sequence) - 1))
        resident = self._idle.pop(parent, None)
        if resident is None:
            return False
        self._keep(resident)
        self._earlier[parent] = resident
        resident.keys.append((query.adapter, sequence.key))
        if len(resident.keys) > _HISTORY + 1:
            self._forget_earlier(resident, resident.keys.popleft())
        self._requests.continue_with(resident.rid, query)
        self._api.put_token(resident.req, token_id)
        self._ready[resident.rid] = resident
        self.continued += 1
        return True

    def share(self, query: Query) -> None:
        """Share the prefix of a query that a resident has, through the radix cache."""
        if not self._by_rid:
            return
        sequence = query.sequence
        # A scored text shares what comes before its first target.
        longest = len(sequence) - max(0, len(query.targets) - 1)
        for length in range(longest, max(0, longest - _REACH - 1), -1):
            key = (query.adapter, sequence.prefix_key(length))
            resident = self._idle.get(key) or self._earlier.get(key) or self._pinned.get(key)
            if resident is not None and self._api.share(resident.req, length):
                return

    def adopt(self, rid: str, req: Any, query: Query) -> None:
        """Have a new request for a row stay."""
        key = (query.adapter, query.sequence.key)
        self._by_rid[rid] = Resident(rid, req, deque([key]))

    def abort(self, query_id: int) -> bool:
        """Drop a query; False if SGLang must abort its request.

        A token that was not computed is removed. A pass that computes it is not stopped.
        """
        rid = self._requests.rid_of(query_id)
        resident = None if rid is None else self._by_rid.get(rid)
        if rid is None or resident is None:
            return False
        request = self._requests.get(rid)
        computed = request is not None and request.answer is not None
        if not computed and not self._api.has_token(resident.req):
            self._forget(resident)
            return False
        self._requests.drop(query_id)
        if not computed:
            self._ready.pop(rid, None)
            self._running.pop(rid, None)
            resident.keys.pop()
            self._forget_earlier(resident, resident.keys[-1])
            self._rest(resident)
        return True

    def release(self, adapter: str | None, key: bytes) -> None:
        """End the resident of a context after the next iteration, unless it is continued."""
        resident = self._idle.get((adapter, key))
        if resident is not None:
            self._idle.move_to_end((adapter, key), last=False)
            self._leave(resident)

    # -- populations ------------------------------------------------------------------

    def request_of(self, key: Key) -> Any | None:
        """Return SGLang's request of a context that is pinned, or idle and may be pinned.

        At most half of the rows of SGLang's table of slots are pinned.
        """
        resident = self._pinned.get(key)
        if resident is None and 2 * len(self._pinned) + 2 <= self._api.rows:
            resident = self._idle.get(key)
        return None if resident is None else resident.req

    def pinned_request(self, adapter: str | None) -> Any:
        """Return SGLang's request of a pinned context of an adapter."""
        return next(each.req for key, each in self._pinned.items() if key[0] == adapter)

    def pin(self, key: Key) -> None:
        """Prevent the end of an idle resident, and its continuation, until `unpin`."""
        resident = self._pinned[key] = self._idle.pop(key)
        self._keep(resident)

    def unpin(self, key: Key) -> None:
        """End a pinned resident."""
        self._end([self._pinned[key]])

    def end_oldest(self) -> bool:
        """End the idle resident that was used least recently; return False if there is none."""
        found = bool(self._idle)
        self._end_oldest(1)
        return found

    # -- iterations of SGLang's loop --------------------------------------------------

    def before_iteration(self) -> None:
        """Put exactly the residents whose next token is known into SGLang's batches."""
        self._deferred, self._queued = False, 0
        if not self._by_rid:
            return
        self._pause()
        self._end_oldest(self._api.missing_rows)
        chosen = list(self._ready.values())
        if self._adapters_limited:
            chosen = self._servable(chosen)
        self._free_memory(chosen)
        self._api.pass_tokens([each.req for each in chosen if not each.paused])
        self._api.resume([each.req for each in chosen if each.paused])
        for each in chosen:
            each.paused = False
            self._running[each.rid] = self._ready.pop(each.rid)
        # SGLang prefers prefills. Residents that the last one passed over go first.
        self._deferred = self._passed_over and bool(self._running) and self._api.defer_prefill()
        self._queued = self._api.queued

    def after_iteration(self, done: Iteration) -> list[Completion]:
        """Return the new rows, and make room for waiting requests."""
        for each in done.finished:  # out of memory, or at the end of the window
            if each.rid in self._by_rid:
                self._forget(self._by_rid[each.rid])
        answers = []
        for rid in done.processed:
            resident = self._by_rid.get(rid)
            if resident is None:
                continue
            answer = self._requests.take_row(rid)
            if answer is not None:
                answers.append(answer)
            elif self._requests.get(rid) is not None:
                continue  # a chunk of its context
            self._running.pop(rid, None)
            self._rest(resident)
        self._progressed = done.progressed
        self._look_back()
        if self._by_rid:
            self._make_room()
        return answers

    def _pause(self) -> None:
        for req in self._api.pause(self._stays):
            self._by_rid[req.rid].paused = True

    def _stays(self, rid: str) -> bool:
        """Whether a request stays in SGLang's batches."""
        if rid not in self._by_rid:
            return True
        request = self._requests.get(rid)
        # Under overlap the row may exist before SGLang has processed the pass.
        wanted = request is not None and request.answer is None
        return wanted and not (self._adapters_limited and rid in self._ready)

    def _look_back(self) -> None:
        """Record which residents and queued requests the iteration did not run."""
        if self._running:
            self._running = {
                rid: each for rid, each in self._running.items() if self._runs(each)
            }
        self._passed_over = bool(self._running)
        if self._deferred:
            self._api.admit_prefill()
        elif 0 < self._queued <= self._api.queued and not self._api.computes_chunks:
            self._starved += 1
        else:
            self._starved = 0

    def _runs(self, resident: Resident) -> bool:
        """Whether a resident in SGLang's decode batch has yet to run."""
        request = self._requests.get(resident.rid)
        waits = request is not None and request.answer is None
        return waits and self._api.has_token(resident.req)  # not one that was retracted

    # -- adapters ---------------------------------------------------------------------

    def limit_adapters(self, adapter_ids: Iterable[str]) -> None:
        """Record whether one batch can serve all loaded adapters."""
        self._adapters_limited = not self._api.adapters_fit({None, *adapter_ids})

    def _servable(self, ready: list[Resident]) -> list[Resident]:
        """Return residents whose adapters one batch can serve, oldest query first.

        A request in SGLang's queue that is older keeps a place for its adapter, unless the
        iteration before had nothing to run.
        """
        api = self._api
        used = set(api.running_adapters)
        first = api.first_queued if self._progressed else None
        queued = None if first is None else self._requests.get(first.rid)
        chosen = []
        for each in ready:
            request = self._requests.get(each.rid)
            assert request is not None  # noqa: S101 - ready residents have a query
            if queued is not None and queued.order < request.order:
                wanted = used | {api.adapter_of(first)}
                used, queued = (wanted if api.adapters_fit(wanted) else used), None
            wanted = used | {api.adapter_of(each.req)}
            if wanted == used or api.adapters_fit(wanted):
                used = wanted
                chosen.append(each)
        return chosen

    # -- room -------------------------------------------------------------------------

    def _free_memory(self, chosen: list[Resident]) -> None:
        """Free slots of the KV cache for the next decode, or SGLang would abort requests."""
        resumed = [each.req for each in chosen if each.paused]
        missing = self._api.missing_tokens(resumed)
        while missing > 0 and (self.end_oldest() or self.free_tables()):
            missing = self._api.missing_tokens(resumed)
        # Residents may also wait for other adapters' batches. The newest of them restart.
        picked = {each.rid for each in chosen} if missing > 0 else set()
        others = [each for rid, each in self._ready.items() if rid not in picked]
        while others and missing > 0:
            self._start_over(others.pop())
            missing = self._api.missing_tokens(resumed)

    def _make_room(self) -> None:
        """End idle residents, just completed ones included, for waiting requests."""
        if self._leaving:
            self._end(list(self._leaving.values()))
        count = self._api.missing_rows
        if self._starved and self._first_fits():
            half = len(self._idle) // 2 + 1
            count = max(count, half if self._starved == 1 else len(self._idle))
        self._end_oldest(count)
        if self._starved > 1:
            while self.free_tables():
                pass

    def _first_fits(self) -> bool:
        """Whether SGLang could serve the adapter of the first request in its queue."""
        if not self._adapters_limited:
            return True
        first = self._api.first_queued
        wanted = {self._api.adapter_of(first)} if first is not None else set()
        return self._api.adapters_fit(wanted | self._api.running_adapters)

    def _end_oldest(self, count: int) -> None:
        if count > 0:
            self._end(list(itertools.islice(self._idle.values(), count)))

    def _end(self, residents: list[Resident]) -> None:
        if any(not each.paused for each in residents):
            self._pause()
        for each in residents:
            self._api.end(each.req)
            self._forget(each)
        self.ended += len(residents)

    def _start_over(self, resident: Resident) -> None:
        """Replace a paused resident by a new request with the same query."""
        request = self._requests.get(resident.rid)
        assert request is not None  # noqa: S101 - ready residents have a query
        self._requests.drop(request.query.query_id)
        self._end([resident])
        self._enqueue(request.query)

    def end_idle(self) -> None:
        """End all idle residents."""
        self._end(list(self._leaving.values()))
        self._end(list(self._idle.values()))

    def unaccounted_tokens(self) -> int:
        """Return the number of free KV cache slots, while no request runs."""
        lost = self._api.unaccounted_tokens(each.req for each in self._by_rid.values())
        return lost - self.slots_in_tables()

    # -- tables -----------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all residents, after SGLang's tables were emptied."""
        for table in (self._by_rid, self._idle, self._earlier, self._ready, self._running):
            table.clear()
        self._leaving.clear()
        self._pinned.clear()
        self._starved = 0
        self._passed_over = self._deferred = False
        self._progressed = True

    def _rest(self, resident: Resident) -> None:
        """Make a resident idle; one of two with the same context is enough."""
        key = resident.keys[-1]
        twin = self._idle.pop(key, None)
        if twin is not None:
            self._leave(twin)
        self._idle[key] = resident

    def _leave(self, resident: Resident) -> None:
        resident.leaving = True
        self._leaving[resident.rid] = resident

    def _keep(self, resident: Resident) -> None:
        if resident.leaving:
            resident.leaving = False
            del self._leaving[resident.rid]

    def _forget(self, resident: Resident) -> None:
        del self._by_rid[resident.rid]
        self._ready.pop(resident.rid, None)
        self._running.pop(resident.rid, None)
        self._keep(resident)
        for table in (self._idle, self._pinned):
            if table.get(resident.keys[-1]) is resident:
                del table[resident.keys[-1]]
        for key in resident.keys:
            self._forget_earlier(resident, key)

    def _forget_earlier(self, resident: Resident, key: Key) -> None:
        if self._earlier.get(key) is resident:
            del self._earlier[key]
