"""`IdleRequests`: ends requests that no query needs where others need their room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from genlm.plugin import GroupQuery
from genlm_vllm.adapters import Adapters
from genlm_vllm.contexts import ContextTable
from genlm_vllm.pending_query import PendingQuery
from genlm_vllm.running_requests import ResidentRequest, Room, RunningRequests


class IdleRequests:
    """Ends idle requests where others need their room.

    A request is idle if no query in progress needs it.

    Args:
        requests: The requests in vLLM.
        contexts: Table from which ended requests are removed.
        adapters: The loaded adapters.

    Attributes:
        busy: Queries and places of the sequences that a request computes now, by the request's
            id.
    """

    def __init__(
        self, requests: RunningRequests, contexts: ContextTable, adapters: Adapters
    ) -> None:
        self._requests = requests
        self._contexts = contexts
        self._adapters = adapters
        self.busy: dict[str, list[tuple[PendingQuery, int]]] = {}
        self._computed_before = 0  # number of computed tokens before the latest step

    @property
    def names(self) -> list[str]:
        """Names of the idle requests, least recently used first."""
        return [name for name in self._requests.by_name if name not in self.busy]

    def end(self, names: Sequence[str]) -> None:
        """End requests, idle or not."""
        self._contexts.remove(names)
        self._requests.end(names)

    def end_all(self, adapter: str | None = None) -> None:
        """End the idle requests of one adapter, or all idle requests."""
        lora, requests = self._adapters.request(adapter), self._requests.by_name
        is_any = adapter is None
        self.end([name for name in self.names if is_any or requests[name].lora_request is lora])

    def end_excess(self) -> None:
        """After an adapter was loaded, end the idle requests that may no longer stay."""
        for adapter in self._adapters.names:
            if not self._requests.may_stay(adapter):
                self.end_all(adapter)

    # -- room in vLLM -----------------------------------------------------------------

    @property
    def free_room(self) -> Room:
        """Room that no request has and no population in progress needs."""
        self._requests.end_dropped()
        members = (
            name
            for name, uses in self.busy.items()
            if any(isinstance(pending.query, GroupQuery) for pending, _ in uses)
        )
        return self._requests.free_room(members)

    def make_room(self, room: Room, names: Iterable[str], *, partly: bool = False) -> set[str]:
        """End the idle ones of some requests, in order, until there is room.

        Args:
            room: Room that is needed.
            names: Names of requests.
            partly: Whether to end them also if there is too little room without them.

        Returns:
            Names of the ended requests.
        """
        requests = self._requests.by_name
        idle = [name for name in names if name in requests and name not in self.busy]
        count = self._requests.count_to_end(idle, room - self.free_room)
        ended = [] if count is None and not partly else idle[:count]
        self.end(ended)
        return set(ended)

    def make_place(self, other: ResidentRequest) -> bool:
        """If vLLM's batch is full, end the least recently used idle request.

        Args:
            other: Request that is not ended.

        Returns:
            Whether a request was ended.
        """
        if len(self._requests.by_name) < self._requests.places:
            return False
        oldest = [name for name in self.names if name != other.name][:1]
        self.end(oldest)
        return bool(oldest)

    # -- steps ------------------------------------------------------------------------

    def before_step(self) -> None:
        """End idle requests whose places new requests need."""
        if (missing := -self._requests.free_places) > 0:
            self.end(self.names[:missing])
        self._computed_before = self._requests.tokens_computed

    def after_step(self, unstarted: int) -> None:
        """End idle requests whose places or blocks waiting requests need.

        Otherwise, their callers could continue them before each step.

        Args:
            unstarted: Number of sequences that wait for a place.
        """
        requests = self._requests
        if requests.waiting + unstarted <= 0:
            return
        self.end([name for name in requests.preempted() if name not in self.busy])
        idle = self.names
        count = max(0, unstarted - requests.free_places)
        has_run = requests.tokens_computed > self._computed_before
        if not count and (requests.lacks_blocks or not has_run):
            count = (len(idle) + 1) // 2
        if idle:
            self.end(idle[:count])
        elif not has_run:
            self._restart_forks(requests.stuck())

    def _restart_forks(self, stuck: Sequence[str]) -> None:
        """Restart the younger half of the forks that wait for blocks, which frees theirs."""
        for name in stuck[len(stuck) // 2 :]:
            pending, place = self.busy[name][0]
            resident = pending.residents[place]
            assert resident is not None  # noqa: S101 - it computes this sequence
            self._requests.restart(resident)
