"""`ReplicaLink`, one replica as a driver sees it, and the events that it causes."""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from genlm_ray.replica import new_session
from genlm_ray.router import RoutedQuery
from genlm_ray.wire import PackedGroup, ReplicaRequest, ReplicaResponse, packed_queries

__all__ = ["Attached", "Dead", "Event", "Events", "Lost", "ReplicaLink", "Reply", "Wake"]

_COUNTED = ("tokens_computed", "tokens_evaluated", "tokens_drawn")


@dataclass(frozen=True, slots=True)
class Wake:
    """The scheduler has new queries for the engine."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A message was answered, or failed."""

    link: ReplicaLink
    session: str
    message: int
    response: ReplicaResponse | None
    error: BaseException | None
    routed: Sequence[RoutedQuery]
    group_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica does not answer any more; Ray may start it again."""

    link: ReplicaLink
    session: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class Attached:
    """A replica has loaded its engine and begun a session."""

    link: ReplicaLink
    session: str
    description: dict[str, Any]
    adapters: dict[str, str]
    prefixes: list[Any]


@dataclass(frozen=True, slots=True)
class Dead:
    """A replica will not answer again."""

    link: ReplicaLink
    error: BaseException


Event = Wake | Reply | Lost | Attached | Dead

Events = queue.SimpleQueue[Event]


class ReplicaLink:
    """An actor, this driver's session with it, and its in-flight calls.

    Attributes:
        index: Position among the replicas.
        number: The router's number of this incarnation of the replica; None while it has none.
        session: Session name, None without a session.
        calls: Number of unanswered messages.
        last_message: Number of the last message whose reply carries completions.
        pending_queries: Maximum number of queries that the replica accepts at a time.
        is_dead: Whether the replica is lost for good.
        restarts: Number of ended incarnations.
        pid: Process id.
        lost_by: Reason of the last incarnation's end.
        attached: A new session that the engine's thread has not used yet.
        attach_since_s: Start time of the pending call of `attach`.
        ping_since_s: Start time of the in-flight ping.
        dropped: Numbers of generations that programs have dropped, on any thread.
    """

    def __init__(self, index: int, actor: Any, driver: str, events: Events) -> None:
        self.index = index
        self.actor = actor
        self.number: int | None = None
        self.session: str | None = None
        self.calls = 0
        self.last_message = -1
        self.pending_queries = sys.maxsize
        self.is_dead = False
        self.restarts = 0
        self.pid = 0
        self.lost_by: BaseException | None = None
        self.attached: str | None = None
        self.attach_since_s: float | None = None
        self.ping_since_s: float | None = None
        self.pinged_s = 0.0
        self._driver = driver
        self._events = events
        self._messages = 0
        # Messages are numbered in the order they are sent in; it also guards these lists, and
        # the monitor's `send_oneway` against a session that begins meanwhile.
        self._sending = threading.RLock()
        self._aborts: list[int] = []
        self._forgotten: list[int] = []
        self.dropped: deque[int] = deque()
        self._statistics: dict[str, Any] = {}
        self._before: dict[str, float] = {}  # counted in earlier incarnations

    # -- the engine's thread ----------------------------------------------------------

    def begin(self, session: str, number: int, description: dict[str, Any]) -> None:
        """Use a session that the replica has begun."""
        self._statistics = description["statistics"]
        self.pid = description["pid"]
        self.pending_queries = description["pending_queries"]
        with self._sending:
            self.calls = self._messages = 0
            self._aborts, self._forgotten = [], []
            self.session, self.number = session, number

    def end(self, error: BaseException) -> None:
        """Forget a lost session, and keep its counters."""
        self.lost_by = error
        for name in _COUNTED:
            if name in self._statistics:
                self._before[name] = self.counted(name) or 0
        self._statistics = {}
        self.session = self.number = None
        self.restarts += 1

    def send_queries(
        self, routed: Sequence[RoutedQuery], groups: Sequence[PackedGroup] = ()
    ) -> None:
        """Send queries, or poll for completions; the reply becomes an event."""
        session, number = self.session, self.number
        assert session is not None and number is not None  # noqa: S101, PT018

        message = -1

        def replied(response: ReplicaResponse | None, error: BaseException | None) -> None:
            ids = [each.query_id for each in groups]
            self._events.put(Reply(self, session, message, response, error, routed, ids))

        request = packed_queries(routed, number) if routed else ReplicaRequest()
        request.groups = list(groups)
        self.calls += 1  # after the send: a failed one gets no reply
        with self._sending:
            self.last_message = message = self._messages
            self._send("exchange", replied, session, request)

    def abort(self, query_id: int) -> None:
        """Have the replica drop a query with the next message."""
        with self._sending:
            self._aborts.append(query_id)

    def forget(self, sequence: int) -> None:
        """Have the replica forget a sequence, by its number, with the next message."""
        with self._sending:
            self._forgotten.append(sequence)

    def send_oneway(self) -> None:
        """Send pending messages that need no reply; on any thread."""
        with self._sending:
            session = self.session
            if session is None or not (self._aborts or self._forgotten or self.dropped):
                return

            def replied(_: Any, error: BaseException | None) -> None:
                # The replica may have missed it, and accepts no later message.
                if error is not None and not isinstance(error, RayTaskError):
                    self._events.put(Lost(self, session, error))

            self._send("notify", replied, session, ReplicaRequest())

    def store(self, statistics: dict[str, Any]) -> None:
        """Keep the latest statistics of the engine."""
        self._statistics = statistics

    # -- any thread -------------------------------------------------------------------

    def counted(self, name: str) -> float | None:
        """Counters of all incarnations; None if the engine has none."""
        now: float | None = self._statistics.get(name)
        before = self._before.get(name)
        return before if now is None else now + (before or 0)

    def statistics(self) -> dict[str, int | float | str]:
        """The engine's statistics and the replica's state."""
        state = "dead" if self.is_dead else "up" if self.session else "starting"
        found = {"state": state, "restarts": self.restarts, "pid": self.pid, **self._statistics}
        counts = {name: self.counted(name) for name in _COUNTED}
        return found | {name: value for name, value in counts.items() if value is not None}

    def start(self, method: str, *arguments: Any) -> concurrent.futures.Future[Any]:
        """Start a call that loads or frees session state; its end wakes the engine.

        The result is False if the session has ended.
        """
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def replied(result: Any, error: BaseException | None) -> None:
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)
            self._events.put(Wake())

        self._call(method, replied, self.session, *arguments)
        return done

    def detach(self) -> None:
        """Have the replica end the session and drop this driver's queries."""
        self._call("detach", lambda *_: None, self.session)

    # -- the monitor's thread ---------------------------------------------------------

    def attach(self, adapters: dict[str, str], prefixes: list[Any]) -> None:
        """Request a session; the reply becomes an event, unless a retry follows."""
        session = new_session()
        self.attach_since_s = time.monotonic()

        def replied(description: Any, error: BaseException | None) -> None:
            if error is None:
                # No retry meanwhile: another session would end this one.
                self.attached = session
                self._events.put(Attached(self, session, description, adapters, prefixes))
                return
            if not isinstance(error, ActorUnavailableError):  # which is starting again
                self._events.put(Dead(self, error))
            self.attach_since_s = None

        self._call("attach", replied, self._driver, session, adapters, prefixes)

    def ping(self, session: str) -> None:
        """Ping the replica; `ping_since_s` reveals silence."""
        self.ping_since_s = self.pinged_s = time.monotonic()

        def replied(_: Any, error: BaseException | None) -> None:
            self.ping_since_s = None
            if error is not None:
                self._events.put(Lost(self, session, error))

        self._call("ping", replied, session)

    # ---------------------------------------------------------------------------------

    def _send(
        self,
        method: str,
        replied: Callable[[Any, BaseException | None], None],
        session: str,
        request: ReplicaRequest,
    ) -> None:
        with self._sending:
            request.aborted, self._aborts = self._aborts, []
            request.forgotten, self._forgotten = self._forgotten, []
            request.dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
            self._messages += 1
            self._call(method, replied, session, self._messages - 1, request)

    def _call(
        self,
        method: str,
        replied: Callable[[Any, BaseException | None], None],
        *arguments: Any,
    ) -> None:
        """Call a method of the actor; `replied` gets its result or its error, on any thread."""
        if not ray.is_initialized():  # else Ray would start another cluster for the call
            replied(None, ConnectionError("Ray was shut down in this process"))
            return
        try:
            future = getattr(self.actor, method).remote(*arguments).future()
        except Exception as error:  # noqa: BLE001 - Ray was shut down, or refuses the call
            replied(None, error)
            return
        future.add_done_callback(lambda done: replied(*_outcome(done)))


def _outcome(done: Any) -> tuple[Any, BaseException | None]:
    error = done.exception()
    return (None, error) if error is not None else (done.result(), None)
